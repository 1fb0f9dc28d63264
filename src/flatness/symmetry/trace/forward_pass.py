"""One forward pass, written down operator by operator.

The model runs on a real example while every call into torch is intercepted, so that any Python in its forward
pass is fine: modules, functions, methods, operators, loops and branches. What is recorded holds for inputs
like the example, and for all others where their way through the network does not depend on the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from flatness.errors import FlatnessError, ModelError, NondeterministicError
from flatness.problem import batches
from flatness.problem.batches import describe, logits_of
from flatness.symmetry.trace.calls import Call, Value
from flatness.symmetry.trace.recorder import Recorder, Unrecorded, located

Forward = Callable[[nn.Module, Any], Any]

# Operators that put out as many entries as the data say; Python code can read that off a shape.
_SHAPED_BY_DATA = frozenset(
    """
    nonzero nonzero_static argwhere masked_select unique unique_consecutive unique_dim bincount one_hot
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Trace:
    """A recorded forward pass.

    Attributes:
        values: All tensors that took part.
        calls: All calls, in order.
        output: The model's output.
        model: Name of the model's class.
        shapes: Shape of every parameter and buffer, by name.
    """

    values: list[Value]
    calls: list[Call]
    output: Value
    model: str
    shapes: dict[str, tuple[int, ...]]

    @cached_property
    def used(self) -> frozenset[Value]:
        """All values that calls take."""
        return frozenset(value for call in self.calls for value in call.operands())

    @cached_property
    def complete(self) -> bool:
        """Whether every parameter is used."""
        return all(value in self.used for value in self.values if value.kind == "parameter")


def default_forward(model: nn.Module, example: Any) -> Any:
    """The model on a tensor, on a tuple of arguments or on a dict of keyword arguments."""
    if isinstance(example, Mapping):
        return logits_of(model(**example))
    return logits_of(model(*example) if isinstance(example, (tuple, list)) else model(example))


def run(model: nn.Module, example: Any, forward: Forward, recorder: Recorder | None = None) -> Tensor:
    """The model's output on the example, which it may write into; an error says where it came from."""
    with torch.no_grad(), located(model, recorder) as location, ExitStack() as recording:
        if recorder is not None:
            recorder.location = location
            recording.enter_context(recorder)
            recording.enter_context(Unrecorded(recorder))
        try:
            return _one_tensor(forward(model, example))
        except FlatnessError:
            raise
        except Exception as error:
            raise _stopped(location.describe(model), example, recorder, error) from error


def _stopped(where: str, example: Any, recorder: Recorder | None, error: Exception) -> ModelError:
    """What to raise where a model stops with an error, by itself or while it is recorded."""
    what = f"{type(error).__name__}: {first_line(error)}"
    if recorder is None:
        return ModelError(
            f"Expected an example that the model can run on but {where} stopped at {describe(example)} with "
            f"{what}. Pass inputs as the model takes them, one row per sample: a tensor, a tuple of "
            "arguments or a dict of keyword arguments."
        )
    after = f" after {recorder.calls[-1]}" if recorder.calls else ""
    return ModelError(
        f"Expected a forward pass whose calls to torch can be recorded but {where}{after} stopped with "
        f"{what}. The model runs when nothing is recorded: replace that part with plain torch operations, "
        "or check only the part of the model before it."
    )


def first_line(error: BaseException) -> str:
    """What an error says, in short."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else "no message"


def trace(model: nn.Module, example: Any, forward: Forward) -> Trace:
    """Record one forward pass; the model must be in evaluation mode.

    Raises:
        ModelError: When the model cannot run on the example, or where its computation cannot be followed.
        NondeterministicError: When two runs differ.
    """
    expected = run(model, batches.copied(example), forward)
    _check_values(expected, example)
    example = batches.copied(example)
    recorder = Recorder(model, example)
    output = run(model, example, forward, recorder)
    change = difference(expected, output)
    if not change <= 1e-4:
        raise NondeterministicError(
            "Expected the same output for the same example but two runs in evaluation mode differ by "
            f"{change:.3g} of its size. Look for F.dropout(x) without training=self.training, for noise, or "
            "for random sampling inside forward."
        )
    known = recorder.known(output)
    if known is None or known.kind == "constant":
        raise ModelError(
            f"Expected a forward pass made of torch operations but the output of {type(model).__name__} was "
            "computed where torch operations cannot be followed (TorchScript, numpy, another library). Pass "
            "the eager torch model, or wrap only the torch part of it."
        )
    shapes = {name: tuple(value.shape) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    return Trace(recorder.values, recorder.calls, known, type(model).__name__, shapes)


def _one_tensor(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    raise ModelError(
        f"Expected the model to return one tensor but got {describe(output)}. Say which part is the output, "
        "for example forward=lambda model, x: model(x)[0]."
    )


def _check_values(output: Tensor, example: Any) -> None:
    """Refuse examples that say nothing about the model."""
    if output.numel() == 0:
        raise ModelError(
            f"Expected an example of at least one sample but got {describe(example)}, for which the "
            f"model returns nothing ({describe(output)}). Pass at least one sample."
        )
    if output.is_floating_point() and not bool(output.isfinite().all()):
        raise ModelError(
            f"Expected finite outputs but the model returns NaN or infinity for the example, "
            f"{describe(example)}. Look for NaN in the example, or for weights that overflow."
        )


def difference(expected: Tensor, output: Tensor) -> float:
    """max|a − b| / max|a|, the size of a change in units of the output; infinite between shapes."""
    if expected.shape != output.shape:
        return math.inf
    if expected.numel() == 0:
        return 0.0
    expected, output = expected.double(), output.double()
    return float((expected - output).abs().max() / expected.abs().max().clamp(min=1e-300))


def way_through(trace: Trace) -> str | None:
    """Why other data may take another way than the example did; None when they cannot.

    Numbers that Python reads may decide a branch. Where they come from floating-point data, any branch is
    possible. Where they come from whole numbers and masks alone, as lengths and paddings do, the example
    shows all of the network as long as it uses every parameter.
    """
    data = {value: value.floating for value in trace.values if value.kind == "input"}
    for call in trace.calls:
        given = [data[value] for value in call.operands() if value in data]
        if given and _is_read(call) and (any(given) or not trace.complete):
            return f"Python code reads the data ({call}), so other data may take another path"
        data |= _made_of(given, call.outputs)
    return None


def _made_of(given: list[bool], outputs: list[Value]) -> dict[Value, bool]:
    """What is made of data, and whether of floating-point data: such numbers may decide any branch."""
    return {value: any(given) or value.floating for value in outputs} if given else {}


def _is_read(call: Call) -> bool:
    """Whether a call shows Python code something about values."""
    if call.enclosed:
        return False
    if not call.outputs or call.name in _SHAPED_BY_DATA:
        return True
    operands = call.operands()
    if call.name == "getitem":
        return any(_is_mask(value) for value in operands[1:])
    if call.name == "where":
        return len(operands) == 1
    return call.name in ("repeat_interleave", "tensor_split") and len(operands) > 1


def _is_mask(value: Value) -> bool:
    return value.kind != "constant" and value.dtype in (torch.bool, torch.uint8)
