"""Before and after: checks that a model can be measured, and the promise that it comes back as it was."""

from __future__ import annotations

import copy
import inspect
import math
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import ClassVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

from flatness.errors import ModelError, NotFiniteError, listed
from flatness.network.attention import open_attention
from flatness.network.parts import buffers, modules, named_modules, named_parameters, parameters
from flatness.network.weight_normalization import plain_weight_norm
from flatness.problem.autocast import Suppressed
from flatness.problem.interrupts import UnsplitStack
from flatness.problem.process_state import PROCESS, ProcessState
from flatness.problem.snapshot import HeldTensor, Snapshot


def unwrap(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """The model inside DataParallel, DistributedDataParallel, torch.compile and Lightning Fabric; notes."""
    notes: list[str] = []
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            notes.append(f"unwrapped {type(model).__name__}")
            model = model.module
        elif _is_compiled(model):
            notes.append("unwrapped torch.compile")
            model = model._orig_mod  # type: ignore[assignment]
        elif _is_of_fabric(model):
            notes.append("unwrapped Lightning Fabric")
            model = model._original_module  # type: ignore[assignment]
        else:
            return model, notes


def _is_of_fabric(module: nn.Module) -> bool:
    """Whether Lightning Fabric set the module up: then it casts inputs as only autocast understands."""
    package = type(module).__module__.split(".")[0]
    return type(module).__name__ == "_FabricModule" and package in ("lightning", "lightning_fabric")


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules


def check_model(model: object) -> None:
    """Refuse what cannot be measured, with the reason."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"Expected a torch.nn.Module but got {type(model).__name__}. Pass the model itself, with its "
            "weights loaded."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            "Expected an eager torch.nn.Module but got a TorchScript module, whose layers cannot be "
            "recorded. Pass the model before scripting."
        )
    refuse_measured(model)
    if any(type(module).__module__.split(".")[0] == "peft" for module in modules(model)):
        raise ModelError(
            "Expected plain layers but got a PEFT model, whose adapters change what a layer's weight is. "
            "Call model.merge_and_unload() and measure the merged model."
        )
    parameters = named_parameters(model)
    if not parameters:
        raise ModelError(
            f"Expected a model with parameters but {type(model).__name__} has none. Pass the network whose "
            "weights were trained."
        )
    _check_kinds(parameters)
    _check_batch_norm(model)
    _check_finite(parameters)


def _check_kinds(parameters: dict[str, nn.Parameter]) -> None:
    lazy = [name for name, value in parameters.items() if isinstance(value, UninitializedParameter)]
    if lazy:
        raise ModelError(
            f"Expected initialised parameters but got lazy ones: {listed(lazy)}. Run one forward pass first."
        )
    meta = [name for name, value in parameters.items() if value.is_meta]
    if meta:
        raise ModelError(
            f"Expected parameters with values but got meta tensors: {listed(meta)}. Load the weights first."
        )
    sharded = [name for name, value in parameters.items() if hasattr(value, "full_tensor")]
    if sharded:
        raise ModelError(
            f"Expected whole parameters but got sharded ones (DTensor): {listed(sharded)}. "
            "Gather them into an unsharded copy of the model and measure that."
        )
    odd = [f"{name} ({value.dtype})" for name, value in parameters.items() if not value.is_floating_point()]
    if odd:
        raise ModelError(
            f"Expected real floating-point parameters but got {listed(odd)}. Second derivatives of complex "
            "or integer parameters are not defined here; dequantise or use a real model."
        )


def _check_batch_norm(model: nn.Module) -> None:
    norms = [(name, module) for name, module in named_modules(model) if isinstance(module, _BatchNorm)]
    without = [name or "the model itself" for name, module in norms if module.running_mean is None]
    if without:
        raise ModelError(
            f"Expected batch norm with running statistics but got none in {listed(without)}: there each "
            "sample's output depends on its batch, and a loss per sample does not exist. Train with "
            "track_running_stats=True, or set running_mean and running_var."
        )


def _check_finite(parameters: dict[str, nn.Parameter]) -> None:
    # Norms first, all in one call and one question to each device: NaN and infinity stay in a norm. Those of
    # large numbers may overflow.
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for value in parameters.values():
        if value.layout is not torch.strided or value.element_size() < 2:
            # Sparse ones and those of eight bits have no norm.
            kinds.setdefault((value.device, torch.float64), []).append(
                value.detach().sum(dtype=torch.float64)
            )
        elif value.numel():
            kinds.setdefault((value.device, value.dtype), []).append(value.detach())
    norms = (torch.stack(torch._foreach_norm(same)).sum(dtype=torch.float64) for same in kinds.values())
    if all(math.isfinite(float(norm)) for norm in norms):
        return
    broken = [name for name, value in parameters.items() if not bool(value.detach().isfinite().all())]
    if broken:
        raise NotFiniteError(
            f"Expected finite weights but got NaN or infinity in {listed(broken)}. "
            "Training diverged, or the checkpoint is damaged: measure an earlier one."
        )


def converted(model: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
    """The model itself when nothing is to change, else a copy on that device and in that dtype.

    Tensors made under `torch.inference_mode` cannot be differentiated through: such a model is copied too.

    Raises:
        ModelError: If the model cannot be copied, or has parameters of several types and none is asked for.
    """
    sample = next(model.parameters())
    types = {value.dtype for value in parameters(model)}
    if dtype is None and len(types) > 1:
        raise _several_types(model)
    same_device = device is None or (sample.device.type, sample.device.index or 0) == (
        device.type,
        device.index or 0,
    )
    inference = any(value.is_inference() for value in (*parameters(model), *buffers(model)))
    if same_device and (dtype is None or types == {dtype}) and not inference:
        return model
    _check_own_forward(model)
    try:
        with torch.inference_mode(False):
            duplicate = copy.deepcopy(model)
    except Exception as error:
        raise ModelError(
            "Expected a model that copy.deepcopy can copy, as device= and dtype= work on a copy, but got: "
            f"{error}. Convert the model yourself and leave device and dtype out."
        ) from error
    return duplicate.to(device=device, dtype=dtype)


def _several_types(model: nn.Module) -> ModelError:
    """The error about weights of several types, which do not meet in one product."""
    first: dict[torch.dtype, str] = {}
    for name, value in named_parameters(model).items():
        first.setdefault(value.dtype, name)
    widest = max(first, key=lambda kind: (torch.finfo(kind).bits, torch.finfo(kind).eps < 1e-2))
    kinds = [f"{str(kind).removeprefix('torch.')} ({name})" for kind, name in first.items()]
    return ModelError(
        f"Expected parameters of one floating-point type but got {listed(kinds)}. Pass dtype={widest}, which "
        "measures a copy of the model in that type."
    )


def _check_own_forward(model: nn.Module) -> None:
    """Refuse to copy a function that stands in for a forward: the copy's would still run the original."""
    replaced = [
        name or "the model itself"
        for name, module in named_modules(model)
        if isinstance(own := vars(module).get("forward"), FunctionType) and _knows_modules(own)
    ]
    if replaced:
        raise ModelError(
            "Expected a model that copy.deepcopy can copy, as device= and dtype= work on a copy, but got a "
            f"function in place of the forward of {listed(replaced)}, which would run the original. Convert "
            "the model yourself and leave device and dtype out."
        )


def _knows_modules(function: FunctionType) -> bool:
    """Whether a function holds anything, or reads a module or a method of one by a global name."""
    names = inspect.getclosurevars(function)
    owners = (getattr(value, "__self__", value) for value in names.globals.values())
    return bool(names.nonlocals) or any(isinstance(owner, nn.Module) for owner in owners)


def measuring(model: nn.Module, seed: int, original: nn.Module | None = None) -> Guard:
    """Evaluation mode, gradients, full precision and seeded randomness inside; everything as it was outside.

    All that the model holds is restored, also after an exception, and compared by content: modes, parameters,
    buffers, hooks, and whatever attributes lead to. So are random states and torch's switches. Ctrl-C splits
    neither the beginning nor the end. One measurement runs at a time: other threads wait, and are refused if
    their model is the same or shares parts with it.

    Parameters are never moved here; a forward pass that writes to them is found out, see `Guard.written`.
    Backward hooks of the user, on modules or parameters, do not run, and gradients are set aside. Attention
    and weight normalisation run in plain operators, and `nn.MultiheadAttention` through its projections.
    Autocast is off, also where the model turns it on. Where the model is a copy, what its original holds is
    restored as well.
    """
    return Guard(model, seed, original)


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
        refuse_measured(self._model)
        # Twice: the second call completes one that an exception of any kind cut off.
        release = PROCESS.release()
        self.callback(release)
        self.callback(release)
        PROCESS.acquire(self._while_waiting)
        refuse_measured(self._model)
        self.callback(self._at_work.pop, self, None)
        self._at_work[self] = (threading.get_ident(), _parts_of(self._model))
        # Copies of tensors made in inference mode could not be compared outside.
        with torch.inference_mode(False):
            self._before = Snapshot(self._model)
        self.callback(self._before.restore)
        self.callback(self._before.restore)
        self.let_go()

    def _while_waiting(self) -> None:
        self.handle_waiting()
        refuse_measured(self._model)


class Guard(Kept):
    """What `measuring` returns: a context for one model.

    Attributes:
        autocast: Whether anything tried to turn autocast on inside.
    """

    def __init__(self, model: nn.Module, seed: int, original: nn.Module | None = None) -> None:
        super().__init__(model)
        self._seed, self._original = seed, original
        self.autocast = Suppressed()
        self._settled: dict[str, HeldTensor] | None = None

    def prepare(self) -> None:
        """Everything that measuring needs; each step comes after what undoes it."""
        super().prepare()
        if self._original is not None:
            self.enter_context(Kept(self._original))
        model = self._model
        gpus = sorted({value.device.index or 0 for value in parameters(model) if value.device.type == "cuda"})
        process = ProcessState(gpus)
        self.callback(process.restore)
        self.callback(process.restore)
        self.let_go()
        self.enter_context(torch.inference_mode(False))
        process.prepare(self._seed)
        self._prepare_modules()
        self.enter_context(plain_weight_norm(model))
        for kind in dict.fromkeys(("cpu", next(model.parameters()).device.type)):
            self.enter_context(torch.autocast(kind, enabled=False))
        # Ends before those, which turn on again what was on.
        self.autocast = Suppressed()
        self.callback(self.autocast.end)
        self.callback(self.autocast.end)
        self.autocast.start()
        if any(_is_compiled(module) or module._compiled_call_impl is not None for module in modules(model)):
            self.enter_context(torch.compiler.set_stance("force_eager"))

    def _prepare_modules(self) -> None:
        own = modules(self._model)
        if not _switches_as_torch(own) or any(module.training for module in own):
            self._model.eval()
        for module in own:
            if module._backward_hooks or module._backward_pre_hooks:
                module._backward_hooks, module._backward_pre_hooks = OrderedDict(), OrderedDict()
        hooked = {value: hooks for value in parameters(self._model) if (hooks := value._backward_hooks)}
        for _ in range(2 if hooked else 0):
            self.callback(_hook_again, hooked)
        for parameter in hooked:
            parameter._backward_hooks = None  # one that clips gradients, for example
        for parameter in parameters(self._model):
            # A forward pass that has a backward pass inside adds to gradients in place.
            if parameter.grad is not None:
                parameter.grad = None
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
        found = [name for name, value in held.items() if value.changed(beyond_rounding=name in self._settled)]
        for name in found:
            self._settled[name] = HeldTensor(held[name].tensor, None)
        return found

    def _refuse_late_writing(self, kind: type[BaseException] | None, *_: object) -> None:
        late = [] if kind is not None else self.written()
        if late:
            raise changing_weights(late)


def _hook_again(hooked: dict[nn.Parameter, dict]) -> None:
    for parameter, hooks in hooked.items():
        parameter._backward_hooks = hooks


def changing_weights(names: list[str]) -> ModelError:
    """The error about parameters that keep changing."""
    return ModelError(
        "Expected weights that stay as they are while the model runs, or that its first pass brings to where "
        f"they stay, but {listed(names)} changed later on. Move the change out of forward, or write it as "
        "a parametrization (torch.nn.utils.parametrize), which derivatives go through."
    )


def refuse_measured(model: nn.Module) -> None:
    """Refuse a model that another thread is measuring just now, or that shares parts with such a one."""
    others = [ids for thread, ids in list(Kept._at_work.values()) if thread != threading.get_ident()]
    if others and not frozenset().union(*others).isdisjoint(_parts_of(model)):
        raise ModelError(
            "Expected a model that nothing else is measuring but another thread is measuring this "
            f"{type(model).__name__}, or a model that shares parts with it. Wait for it to end, or give each "
            "thread a copy, made beforehand with copy.deepcopy(model)."
        )


def _parts_of(model: nn.Module) -> frozenset[int]:
    return frozenset(map(id, (*modules(model), *parameters(model), *buffers(model))))


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Parameters that all require gradients, so that the graph shows what reads them; restored afterwards."""
    frozen = [parameter for parameter in parameters(model) if not parameter.requires_grad]
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
    for module in modules(model):
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            weight = module.weight.detach()
            rows = torch.arange(len(weight), device=weight.device)
            torch.embedding_renorm_(weight, rows, float(module.max_norm), float(module.norm_type))


def _switches_as_torch(own: list[nn.Module]) -> bool:
    """Whether `train` and `eval` set nothing but `training`: neither a class nor a module has its own."""
    kinds = {type(module) for module in own}
    if not all(kind.train is nn.Module.train and kind.eval is nn.Module.eval for kind in kinds):
        return False
    return not any("train" in vars(module) or "eval" in vars(module) for module in own)
