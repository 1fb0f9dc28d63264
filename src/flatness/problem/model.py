"""The model that is to be measured: unwrapped, checked, converted where that is asked for, given batches."""

from __future__ import annotations

import copy
import inspect
import math
import traceback
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

from flatness.errors import DataError, FlatnessError, ModelError, NotFiniteError, OptionError, listed
from flatness.losses import Loss
from flatness.problem.batches import describe, logits_of, on_host
from flatness.problem.guard import is_compiled, refuse_measured

if TYPE_CHECKING:
    from flatness.problem.alignment import Alignment

Forward = Callable[[nn.Module, Any], tuple[Tensor, Any]]
"""``forward(model, batch) -> (output, target)``."""


def unwrap(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """The model inside DataParallel, DistributedDataParallel, torch.compile and Lightning Fabric; notes."""
    notes: list[str] = []
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            wrapper, key = type(model).__name__, "module"
        elif is_compiled(model):
            wrapper, key = "torch.compile", "_orig_mod"
        elif _is_of_fabric(model):
            wrapper, key = "Lightning Fabric", "_original_module"
        else:
            return model, notes
        notes.append(f"unwrapped {wrapper}")
        model = getattr(model, key)


def _is_of_fabric(module: nn.Module) -> bool:
    """Whether Lightning Fabric set the module up: then it casts inputs as only autocast understands."""
    package = type(module).__module__.split(".")[0]
    return type(module).__name__ == "_FabricModule" and package in ("lightning", "lightning_fabric")


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
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ModelError(
            f"Expected a model with parameters but {type(model).__name__} has none. Pass the network whose "
            "weights were trained."
        )
    _check_kinds(parameters)
    _check_batch_norm(model)
    _check_finite(parameters)


def _refuse(names: Iterable[str], said: str, error: type[FlatnessError] = ModelError) -> None:
    """Raise an error about parts of a model, if there are any; their names come in the place of "{}"."""
    names = [name or "the model itself" for name in names]
    if names:
        raise error(said.format(listed(names)))


def _check_kinds(parameters: dict[str, nn.Parameter]) -> None:
    held = parameters.items()
    _refuse(
        [name for name, value in held if isinstance(value, UninitializedParameter)],
        "Expected initialised parameters but got lazy ones: {}. Run one forward pass first.",
    )
    _refuse(
        [name for name, value in held if value.is_meta],
        "Expected parameters with values but got meta tensors: {}. Load the weights first.",
    )
    _refuse(
        [name for name, value in held if hasattr(value, "full_tensor")],
        "Expected whole parameters but got sharded ones (DTensor): {}. In all processes, build the model "
        "again and load into it what get_model_state_dict(model, "
        "options=StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint.state_dict "
        "returns; measure that copy.",
    )
    _refuse(
        [f"{name} ({value.dtype})" for name, value in held if not value.is_floating_point()],
        "Expected real floating-point parameters but got {}. Second derivatives of complex or integer "
        "parameters are not defined here; dequantise the model or use a real one.",
    )


def _check_batch_norm(model: nn.Module) -> None:
    norms = [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    _refuse(
        [name for name, module in norms if module.running_mean is None],
        "Expected batch norm with running statistics but got none in {}: each sample's output depends "
        "on its batch, so there is no loss per sample. Train with track_running_stats=True, or set "
        "running_mean and running_var.",
    )


def _check_finite(parameters: dict[str, nn.Parameter]) -> None:
    held = {name: value.detach() for name, value in parameters.items()}
    # NaN and infinity stay in a sum, which takes a fortieth of the time; that of large numbers may overflow.
    # There is none in eight bits.
    sums = on_host([v.sum(dtype=torch.float64 if v.element_size() < 2 else None) for v in held.values()])
    odd = [name for name, total in zip(held, sums, strict=True) if not math.isfinite(total)]
    _refuse(
        [name for name in odd if not held[name].isfinite().all()],
        "Expected finite weights but got NaN or infinity in {}. Training diverged, or the checkpoint is "
        "damaged: measure an earlier one.",
        NotFiniteError,
    )


def refuse_missing_row(model: nn.Module, error: IndexError) -> None:
    """Refuse an index outside an embedding table if that is why the model failed."""
    names = {module: name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        table, indices = frame.f_locals.get("self"), frame.f_locals.get("input")
        if not (isinstance(table, nn.Embedding) and isinstance(indices, Tensor)):
            continue
        for place in ((indices < 0) | (indices >= table.num_embeddings)).nonzero().tolist():
            raise DataError(
                f"Expected indices from 0 to {table.num_embeddings - 1} for the embedding table "
                f"{names.get(table, '')!r} but row {place[0]} of its input has {int(indices[tuple(place)])}. "
                "Use the tokenizer that the model was trained with; for a table of positions, cut samples to "
                "its length."
            ) from error


def usable_device(device: Any) -> torch.device | None:
    """The device that was asked for, if torch can use it."""
    if device is None:
        return None
    try:
        # The device of a tensor, as that of a weight is compared with it: "cuda" has no number.
        chosen = torch.empty(0, device=torch.device(device)).device
        if chosen.type == "meta":
            raise RuntimeError("it holds no values")
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise OptionError(
            f"Expected a device that torch can use but got {device!r}: {reason}. For example device='cpu'."
        ) from error
    return chosen


def converted(model: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
    """The model itself when nothing is to change, else a copy on that device and in that dtype.

    Tensors made under `torch.inference_mode` cannot be differentiated through: such a model is copied too.

    Raises:
        ModelError: If the model cannot be copied, or has parameters of several types and none is asked for.
    """
    types = {value.dtype for value in model.parameters()}
    if dtype is None and len(types) > 1:
        raise _several_types(model)
    inference = any(value.is_inference() for value in (*model.parameters(), *model.buffers()))
    same_type = dtype is None or types == {dtype}
    if same_type and not inference and device in (None, next(model.parameters()).device):
        return model
    _check_own_forward(model)
    try:
        with torch.inference_mode(False):
            duplicate = copy.deepcopy(model)
    except Exception as error:
        raise ModelError(
            "Expected a model that copy.deepcopy can copy, since device= and dtype= work on a copy, but got: "
            f"{error}. Convert the model yourself and leave device and dtype out."
        ) from error
    return duplicate.to(device=device, dtype=dtype)


def _several_types(model: nn.Module) -> ModelError:
    """The error about weights of several types, which do not meet in one product."""
    first: dict[torch.dtype, str] = {}
    for name, value in model.named_parameters():
        first.setdefault(value.dtype, name)
    widest = max(first, key=lambda kind: (torch.finfo(kind).bits, torch.finfo(kind).eps < 1e-2))
    kinds = [f"{str(kind).removeprefix('torch.')} ({name})" for kind, name in first.items()]
    return ModelError(
        f"Expected parameters of one floating-point type but got {listed(kinds)}. Pass dtype={widest}, which "
        "measures a copy of the model in that type."
    )


def _check_own_forward(model: nn.Module) -> None:
    """Refuse to copy a function that stands in for a forward: the copy's would still run the original."""
    own = [(name, vars(module).get("forward")) for name, module in model.named_modules()]
    _refuse(
        [name for name, forward in own if isinstance(forward, FunctionType) and _knows_modules(forward)],
        "Expected a model that copy.deepcopy can copy, since device= and dtype= work on a copy, but got a "
        "function in place of the forward of {}, which would run the original. Convert the model yourself "
        "and leave device and dtype out.",
    )


def _knows_modules(function: FunctionType) -> bool:
    """Whether a function holds anything, or reads a module or a method of one by a global name."""
    names = inspect.getclosurevars(function)
    owners = (getattr(value, "__self__", value) for value in names.globals.values())
    return bool(names.nonlocals) or any(isinstance(owner, nn.Module) for owner in owners)


class DefaultForward:
    """(output, target) of an (input, target) batch, or of a dict with "labels".

    Where a model returns a loss of its own for labels, outputs and labels are paired as that loss does.

    Args:
        loss: The loss that is going to be measured.

    Attributes:
        alignment: How outputs and labels are paired; None before the first dict with "labels".
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self.alignment: Alignment | None = None

    def settle(self, model: nn.Module, batch: Any) -> list[str]:
        """Decide once how outputs and labels are paired, by runs of these samples; what is to be noted."""
        if self.alignment is not None or not _labelled(batch):
            return []
        from flatness.problem.alignment import find_alignment

        self.alignment = find_alignment(model, batch, self._loss)
        return [self.alignment.note] if self.alignment.note else []

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Run the model on a batch."""
        if _labelled(batch):
            self.settle(model, batch)
            assert self.alignment is not None
            return self.alignment.run(model, batch)
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            x, target = batch
            if isinstance(x, Mapping):
                return logits_of(model(**x)), target
            return logits_of(model(*x) if isinstance(x, (tuple, list)) else model(x)), target
        by_name = isinstance(batch, Mapping)
        example = "model(batch['image']), batch['class']" if by_name else "model(batch[0]), batch[1]"
        raise DataError(
            f"Expected batches (input, target) or dicts with 'labels' but got {describe(batch)}. "
            f"Say how to use them, for example forward=lambda model, batch: ({example})."
        )


def _labelled(batch: Any) -> bool:
    return isinstance(batch, Mapping) and "labels" in batch


def line_for(batch: Any, output: Any) -> str:
    """The `forward` to write for a model that puts out more than one tensor."""
    call, target = "model(batch[0])", "batch[1]"
    if isinstance(batch, Mapping):
        target = "batch['labels']"
        call = "model(**{key: batch[key] for key in batch if key != 'labels'})"
    elif isinstance(batch, (tuple, list)) and isinstance(batch[0], Mapping):
        call = "model(**batch[0])"
    elif isinstance(batch, (tuple, list)) and isinstance(batch[0], (tuple, list)):
        call = "model(*batch[0])"
    return f"forward=lambda model, batch: ({call}{_choice(output)}, {target})"


def _choice(output: Any) -> str:
    """How the first floating-point tensor of an output is reached."""
    if isinstance(output, Mapping):
        return next((f"[{key!r}]" for key, value in output.items() if _is_floating(value)), "['logits']")
    if isinstance(output, (tuple, list)):
        return next((f"[{place}]" for place, value in enumerate(output) if _is_floating(value)), "[0]")
    named = getattr(output, "__dict__", {})
    return next((f".{key}" for key, value in named.items() if _is_floating(value)), "[0]")


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
