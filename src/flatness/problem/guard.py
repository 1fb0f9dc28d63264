"""While a model is measured: what it needs, and the promise that it comes back as it was."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode

from flatness.errors import ModelError, listed
from flatness.network.attention import open_attention
from flatness.problem.batches import on_host
from flatness.problem.process_state import PROCESS, ProcessState, UnsplitStack
from flatness.problem.snapshot import HeldTensor, Snapshot


class Kept(UnsplitStack):
    """A context after which a model holds what it held before; the model stays as it is to begin with.

    For work on a copy: hooks and other functions are not copied, so those of a copy write where the
    original's do.

    Args:
        model: The model.
    """

    _at_work: ClassVar[dict[Kept, tuple[int, frozenset[int]]]] = {}

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._before: Snapshot | None = None

    def prepare(self) -> None:
        """Wait for other measurements to end, and remember everything."""
        if not PROCESS.is_mine():
            self.undo(PROCESS.release)
            while not PROCESS.lock.acquire(timeout=0.05):
                self.handle_waiting()
                refuse_measured(self._model)
        self.callback(self._at_work.pop, self, None)
        self._at_work[self] = (threading.get_ident(), _parts_of(self._model))
        # Copies of tensors made in inference mode could not be compared outside.
        with torch.inference_mode(False):
            self._before = Snapshot(self._model)
        self.undo(self._before.restore)
        self.let_go()


@contextmanager
def repeated_tokens(
    tables: Mapping[nn.Module, Tensor], samples: Callable[[], int]
) -> Iterator[Callable[[], Any]]:
    """Let tables that look tokens up once for all samples, such as positions, do so for each sample.

    Derivatives of their outputs then come sample by sample. Call what the context returns to keep the hooks
    when it ends.

    Args:
        tables: The tables, with what they were asked for. Other batches may ask for rows of another
            length, or, where some samples are padded, for a row of each sample: those stay as they are.
        samples: How many samples the model runs on.
    """

    def repeat(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tokens, usual = args[0] if args else kwargs["input"], tables[module]
        if tokens.dim() == usual.dim():
            own = tokens.shape[1:] if len(usual) == 1 and usual.dim() > 1 else tokens.shape
            tokens = tokens.expand(samples(), *own)
        return (tokens, *args[1:]), {key: value for key, value in kwargs.items() if key != "input"}

    with ExitStack() as hooks:
        for table in tables:
            hooks.callback(table.register_forward_pre_hook(repeat, with_kwargs=True).remove)
        yield hooks.pop_all


class Guard(Kept):
    """Evaluation mode, gradients, full precision and seeded randomness inside; everything as it was outside.

    All that the model holds is restored, also after an exception, and compared by content: modes, parameters,
    buffers, hooks, and whatever attributes lead to. So are random states and torch's switches. Ctrl-C splits
    neither the beginning nor the end. One measurement runs at a time: other threads wait, and are refused if
    their model is the same or shares parts with it.

    Parameters are never moved here; a forward pass that writes to them is found out, see `written`.
    Backward hooks of the user, on modules or parameters, do not run, and gradients are set aside. Attention,
    weight normalisation and `F.hardsigmoid` run in plain operators, and `nn.MultiheadAttention` through its
    projections. Autocast is off, also where the model turns it on. Where the model is a copy, what its
    original holds is restored as well.

    Args:
        model: The model.
        seed: Of torch's random states inside.
        original: What the model is a copy of, if it is one.
        tf32: Whether GPUs are to multiply float32 matrices as TF32.

    Attributes:
        autocast: Whether anything tried to turn autocast on inside.
        samples: How many samples the model runs on, for tables that get the same tokens for all of them.
    """

    def __init__(
        self, model: nn.Module, seed: int, original: nn.Module | None = None, *, tf32: bool = False
    ) -> None:
        super().__init__(model)
        self._seed, self._original, self._tf32 = seed, original, tf32
        self.autocast = Suppressed()
        self.samples = 0
        self._settled: dict[str, HeldTensor] | None = None

    def prepare(self) -> None:
        """Everything that measuring needs; each step comes after what undoes it."""
        super().prepare()
        if self._original is not None:
            self.enter_context(Kept(self._original))
        model = self._model
        devices = {value.device for value in model.parameters()}
        gpus = sorted({place.index or 0 for place in devices if place.type == "cuda"})
        process = ProcessState(gpus, tf32=self._tf32)
        self.undo(process.restore)
        self.let_go()
        self.enter_context(torch.inference_mode(False))
        process.prepare(self._seed)
        self._prepare_modules()
        if any(map(_is_normalized, model.modules())):
            self.enter_context(PlainWeightNorm())
        self.undo(partial(setattr, F, "hardsigmoid", F.hardsigmoid))
        F.hardsigmoid = piecewise_hardsigmoid
        for kind in dict.fromkeys(("cpu", next(model.parameters()).device.type)):
            self.enter_context(torch.autocast(kind, enabled=False))
        # Ends before those, which turn on again what was on.
        self.autocast = Suppressed()
        self.undo(self.autocast.end)
        self.autocast.start()
        if any(is_compiled(module) or module._compiled_call_impl is not None for module in model.modules()):
            self.enter_context(torch.compiler.set_stance("force_eager"))

    def _prepare_modules(self) -> None:
        self._model.eval()
        for module in self._model.modules():
            module._backward_hooks, module._backward_pre_hooks = OrderedDict(), OrderedDict()
        for parameter in self._model.parameters():
            parameter._backward_hooks = None  # one that clips gradients, for example
            parameter.grad = None  # a forward pass that has a backward pass inside adds to it in place
        for module in self._model.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                # Sparse gradients cannot be laid out; scaled ones are no derivatives.
                for option in ("sparse", "scale_grad_by_freq"):
                    self.undo(partial(setattr, module, option, getattr(module, option)))
                    setattr(module, option, False)
        open_attention(self._model)
        _shorten_rows(self._model)

    def written(self) -> list[str]:
        """Names of the parameters that hold other numbers than at the beginning, or than when last asked.

        Once asked, parameters are to stay as they are: the context ends with an error if they do not.
        """
        assert self._before is not None
        if self._settled is None:
            self._settled = {}
            self.push(self._refuse_late_writing)
        held = {**self._before.parameters, **self._settled}
        changed = zip(held, on_host([value.changed() for value in held.values()]), strict=True)
        found = [name for name, other in changed if other]
        found = [name for name in found if not (name in self._settled and held[name].rounded())]
        for name in found:
            self._settled[name] = HeldTensor(held[name].tensor, held[name].tensor.device)
        return found

    def _refuse_late_writing(self, kind: type[BaseException] | None, *_: object) -> None:
        late = [] if kind is not None else self.written()
        if late:
            raise changing_weights(late)


def changing_weights(names: list[str]) -> ModelError:
    """The error about parameters that keep changing."""
    return ModelError(
        "Expected weights that stay as they are while the model runs, or that settle after its "
        f"first pass, but {listed(names)} changed later on. Move the change out of forward, or write it as "
        "a parametrization (torch.nn.utils.parametrize), which derivatives go through."
    )


def refuse_measured(model: nn.Module) -> None:
    """Refuse a model that another thread is measuring just now, or that shares parts with such a one."""
    others = [ids for thread, ids in list(Kept._at_work.values()) if thread != threading.get_ident()]
    if others and not frozenset().union(*others).isdisjoint(_parts_of(model)):
        raise ModelError(
            "Another thread is already measuring this "
            f"{type(model).__name__}, or a model that shares parts with it. Wait until it has finished, or "
            "give each thread its own copy, made beforehand with copy.deepcopy(model)."
        )


def _parts_of(model: nn.Module) -> frozenset[int]:
    return frozenset(map(id, (*model.modules(), *model.parameters(), *model.buffers())))


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Parameters that all require gradients, so that the graph shows what reads them; restored afterwards."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _shorten_rows(model: nn.Module) -> None:
    """What embeddings with a largest norm do to the rows that they look up, for all rows at once.

    Otherwise parameters would be others after every batch.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            weight = module.weight.detach()
            rows = torch.arange(len(weight), device=weight.device)
            torch.embedding_renorm_(weight, rows, float(module.max_norm), float(module.norm_type))


class Suppressed:
    """In one thread, ``torch.autocast`` as if it said ``enabled=False``, from `start` to `end`.

    Accelerate and the Trainer of transformers wrap a model's forward in it, and some models have it inside.
    Half precision leaves second derivatives two digits, and gives features another type than weights. Other
    threads may train under autocast meanwhile; only one of them measures at a time.

    Attributes:
        seen: Whether anything tried to turn autocast on.
    """

    def __init__(self) -> None:
        self.seen = False
        self._thread = threading.get_ident()
        self._outer = torch.set_autocast_enabled

    def start(self) -> None:
        """Turn it off."""
        torch.set_autocast_enabled = self._set

    def end(self) -> None:
        """As it was; after an interrupted call as well."""
        torch.set_autocast_enabled = self._outer

    def _set(self, *arguments: Any) -> None:
        """`torch.set_autocast_enabled` of (kind of device, enabled), or of the latter; off in this thread."""
        *kind, enabled = arguments
        here = threading.get_ident() == self._thread
        self.seen = self.seen or bool(enabled and here)
        self._outer(*kind, bool(enabled and not here))  # type: ignore[call-overload]


class PlainWeightNorm(TorchFunctionMode):
    """`torch._weight_norm` is `normalized` inside."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One call of torch."""
        return (normalized if func is torch._weight_norm else func)(*args, **(kwargs or {}))


def normalized(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g·v/‖v‖, with a norm for each place along an axis, or one for all of v where it is −1."""
    v = v.view_as(v)  # reads the parameter once, as the kernel does: uses of parameters are counted
    return v * (g / torch.norm_except_dim(v, 2, dim))


def piecewise_hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """`F.hardsigmoid` of operators that torch can differentiate twice; its own it can only once."""
    result = F.hardtanh(input + 3, 0.0, 6.0) / 6
    return input.copy_(result) if inplace else result


def _is_normalized(module: nn.Module) -> bool:
    """Whether it is weight normalisation, as a parametrisation or, as it once was, a hook of the layer."""
    if isinstance(module, parametrizations._WeightNorm):
        return True
    return any(isinstance(hook, WeightNorm) for hook in module._forward_pre_hooks.values())


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` wrapped the module."""
    return "_orig_mod" in module._modules
