"""One forward pass, written down operator by operator.

The model runs on a real example while every call into torch is intercepted, so that any Python in its forward
pass is fine: modules, functions, methods, operators, loops and branches. What is recorded holds for inputs
like the example, and for all others where their way through the network does not depend on the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatness.errors import FlatnessError, ModelError, NondeterministicError
from flatness.problem import batches
from flatness.problem.batches import describe
from flatness.symmetry.trace.calls import Call, Ref, Value
from flatness.symmetry.trace.recorder import Location, Recorder, Unrecorded, located

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
    output: Ref
    model: str
    shapes: dict[str, tuple[int, ...]]


def default_forward(model: nn.Module, example: Any) -> Any:
    """The model on a tensor, on a tuple of arguments or on a dict of keyword arguments."""
    if isinstance(example, Mapping):
        return _logits(model(**example))
    if isinstance(example, (tuple, list)):
        return _logits(model(*example))
    return _logits(model(example))


def run(model: nn.Module, example: Any, forward: Forward) -> Tensor:
    """The model's output on the example, without recording; an error says where it came from."""
    with torch.no_grad(), located(model) as location:
        try:
            # a model may write into its inputs
            return _one_tensor(forward(model, batches.copied(example)))
        except FlatnessError:
            raise
        except Exception as error:
            raise ModelError(
                f"Expected an example that the model can run on but {location.describe(model)} stopped at "
                f"{describe(example)} with "
                f"{type(error).__name__}: {_first_line(error)}. Pass inputs as the model takes them, one row "
                "per sample: a tensor, "
                "a tuple of arguments or a dict of keyword arguments."
            ) from error


def trace(model: nn.Module, example: Any, forward: Forward) -> Trace:
    """Record one forward pass; the model must be in evaluation mode.

    Raises:
        ModelError: When the model cannot run on the example, or where its computation cannot be followed.
        NondeterministicError: When two runs differ.
    """
    expected = run(model, example, forward)
    _check_values(expected, example)
    example = batches.copied(example)
    recorder = Recorder(model, example)
    with torch.no_grad(), located(model, recorder) as location:
        recorder.location = location
        output = _recorded(model, example, forward, recorder, location)
    _check_same(expected, output)
    ref = recorder.known(output)
    if ref is None or recorder.values[ref.index].kind == "constant":
        raise ModelError(
            f"Expected a forward pass made of torch operations but the output of {type(model).__name__} was "
            "computed where they cannot "
            "be followed (TorchScript, numpy, another library). Pass the eager torch model, or wrap only the "
            "torch part of it."
        )
    shapes = {name: tuple(value.shape) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    return Trace(recorder.values, recorder.calls, ref, type(model).__name__, shapes)


def _recorded(
    model: nn.Module, example: Any, forward: Forward, recorder: Recorder, location: Location
) -> Tensor:
    try:
        with recorder, Unrecorded(recorder):
            return _one_tensor(forward(model, example))
    except FlatnessError:
        raise
    except Exception as error:
        after = f" after {recorder.calls[-1]}" if recorder.calls else ""
        raise ModelError(
            "Expected a forward pass whose calls into torch can be recorded but "
            f"{location.describe(model)}{after} stopped with "
            f"{type(error).__name__}: {_first_line(error)}. The model runs when nothing is recorded: replace "
            "that part by plain torch "
            "operations, or check the part of the model before it."
        ) from error


def _one_tensor(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    raise ModelError(
        f"Expected the model to return one tensor but got {describe(output)}. Say which part is the output, "
        "for example "
        "forward=lambda model, x: model(x)[0]."
    )


def _logits(output: Any) -> Any:
    """The logits of an output that names them, as `flatness.measure` takes them."""
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    return getattr(output, "logits", output)


def _check_values(output: Tensor, example: Any) -> None:
    """Refuse examples that say nothing about the model."""
    if output.numel() == 0:
        raise ModelError(
            f"Expected an example of at least one sample but got {describe(example)}, for which the model "
            f"puts out nothing ({describe(output)}). Pass one sample or more."
        )
    if output.is_floating_point() and not bool(output.isfinite().all()):
        raise ModelError(
            f"Expected finite outputs but the model puts out NaN or infinity for the example, "
            f"{describe(example)}. Look for NaN in the example, or for weights that overflow."
        )


def _check_same(expected: Tensor, output: Tensor) -> None:
    if expected.shape != output.shape:
        change = float("inf")
    else:
        change = difference(expected, output)
        if change <= 1e-4:
            return
    raise NondeterministicError(
        "Expected the same output for the same example but two runs in evaluation mode differ by "
        f"{change:.3g} of its size. Look for "
        "F.dropout(x) without training=self.training, for noise, or for random sampling inside forward."
    )


def difference(expected: Tensor, output: Tensor) -> float:
    """max|a − b| / max|a|, the size of a change in units of the output."""
    if expected.numel() == 0:
        return 0.0
    expected, output = expected.double(), output.double()
    return float((expected - output).abs().max() / expected.abs().max().clamp(min=1e-300))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else "no message"


def way_through(trace: Trace) -> str | None:
    """Why other data may take another way than the example did; None when they cannot.

    Numbers that Python reads may decide a branch. Where they come from floating-point data, any branch is
    possible. Where they come from whole numbers and masks alone, as lengths and paddings do, the example
    shows all of the network as long as it uses every parameter.
    """
    data = _inputs(trace)
    for call in trace.calls:
        given = [data[ref.index] for ref in call.refs() if ref.index in data]
        if any(given) and _is_read(trace, call):
            return f"Python code reads the data ({call}), so that other data may take another way"
        for ref in call.outputs() if given else ():
            data[ref.index] = any(given) or trace.values[ref.index].floating
    return None


def _inputs(trace: Trace) -> dict[int, bool]:
    """The inputs, and whether numbers read off them may decide a branch that the example does not show."""
    used = {trace.values[ref.index].name for call in trace.calls for ref in call.refs()}
    partial = any(value.kind == "parameter" and value.name not in used for value in trace.values)
    inputs = {index: value for index, value in enumerate(trace.values) if value.kind == "input"}
    return {index: value.floating or partial for index, value in inputs.items()}


def _is_read(trace: Trace, call: Call) -> bool:
    """Whether a call shows Python code something about values."""
    if call.enclosed:
        return False
    if not call.outputs() or call.name in _SHAPED_BY_DATA:
        return True
    if call.name == "where":
        return len(call.refs()) == 1
    if call.name in ("getitem", "setitem"):
        return call.name == "getitem" and any(_is_mask(trace, ref) for ref in call.refs()[1:])
    return call.name in ("repeat_interleave", "tensor_split") and len(call.refs()) > 1


def _is_mask(trace: Trace, ref: Ref) -> bool:
    value = trace.values[ref.index]
    return (
        value.kind != "constant"
        and value.tensor is not None
        and str(value.dtype) in ("torch.bool", "torch.uint8")
    )
