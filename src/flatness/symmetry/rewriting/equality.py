"""Whether a rewritten network puts out what it should: on the example, on new inputs like it, and on data."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from flatness.errors import ModelError
from flatness.problem import batches
from flatness.problem.guard import Guard
from flatness.symmetry.flow.groups import placed
from flatness.symmetry.rewriting.base import Rescaling
from flatness.symmetry.trace.forward_pass import Forward, difference, first_line, run

# New inputs are drawn until there are about so many samples, in so many batches at most.
_SAMPLES, _BATCHES = 16, 8
_EXAMPLE, _NEW, _SHUFFLED, _DATA = (
    "",
    " on new random inputs like the example",
    " on the example in another order",
    " on the measured data",
)
_ADVICE = "an operator does not do what its name says, or the rewriting itself is wrong"
_ADVICE_ELSEWHERE = (
    "it treats other values differently from the example (a branch, an index or a rounding depends "
    "on values): leave this kind out, or rescale only a part of the network"
)


class Comparison:
    """Outputs of a network that a rewritten copy of it has to put out as well.

    The example alone is not enough: a branch, an index or a rounding that depends on values may treat other
    data in another way. So new random inputs of the example's kind and scale are compared too.

    Args:
        model: The network.
        example: Inputs that it runs on.
        forward: ``forward(model, example) -> output``.
        data: Batches to compare on as well.

    Attributes:
        notes: What could not be compared, in words.
    """

    def __init__(self, model: nn.Module, example: Any, forward: Forward, data: Iterable[Any] = ()) -> None:
        self.notes: list[str] = []
        self._model, self._forward, self._data = model, forward, data
        example = placed(model, example)
        self._outputs = [(_EXAMPLE, example, self._output(model, example)), *self._elsewhere(example)]

    def check(self, changed: nn.Module, change: Rescaling) -> None:
        """Refuse a copy that does not put out what it should.

        Raises:
            ModelError: When an output differs by more than rounding.
        """
        on_data = (placed(self._model, batch) for batch in self._data)
        measured = ((_DATA, inputs, self._output(self._model, inputs)) for inputs in on_data)
        for where, inputs, before in chain(self._outputs, measured):
            drift = difference(change.expected(before), self._output(changed, inputs))
            precision = before.dtype if before.is_floating_point() else torch.float32
            allowed = math.sqrt(torch.finfo(precision).eps)
            if not drift <= allowed:
                advice = _ADVICE if where == _EXAMPLE else _ADVICE_ELSEWHERE
                raise ModelError(
                    f"Expected the {change.kind} copy to put out the same but outputs differ by {drift:.3g} "
                    f"of their size{where}, more than rounding ({allowed:.1g} in "
                    f"{str(precision).removeprefix('torch.')}). Convert the model with model.double() if it "
                    f"is badly conditioned; otherwise {advice}."
                )

    def _elsewhere(self, example: Any) -> list[tuple[str, Any, Tensor]]:
        """New inputs and what the network puts out; the example in another order where it does not run."""
        samples = batches.size_of(example)
        generator = torch.Generator().manual_seed(0)
        found = []
        for _ in range(max(2, min(_BATCHES, _SAMPLES // samples))):
            inputs, output, reason = inputs_like(example, generator), None, "it returns NaN or infinity"
            try:
                output = self._output(self._model, inputs)
            except ModelError as error:
                reason = first_line(error.__cause__ or error)
            if output is None or not bool(output.isfinite().all()):
                self.notes.append(
                    "the networks were compared on the example only (also in another order), since "
                    f"the model does not run on similar random inputs ({reason})"
                )
                shuffled = batches.picked(example, torch.randperm(samples, generator=generator))
                return [(_SHUFFLED, shuffled, self._output(self._model, shuffled))]
            found.append((_NEW, inputs, output))
        return found

    def _output(self, model: nn.Module, inputs: Any) -> Tensor:
        with Guard(model, 0):
            return run(model, batches.copied(inputs), self._forward)


def inputs_like(example: Any, generator: torch.Generator) -> Any:
    """New random inputs of the example's kind and scale, the same for the same state of the generator.

    Floating-point numbers are uniform within the range of the example's, and so are whole numbers. Masks
    (booleans, zeros and ones, anything with infinities) and constants keep their rows, in another order.

    >>> new = inputs_like((torch.tensor([2.0, 4.0]), torch.tensor([3, 9])), torch.Generator().manual_seed(0))
    >>> [tensor.dtype for tensor in new], bool(new[0].min() >= 2), bool(new[1].max() <= 9)
    ([torch.float32, torch.int64], True, True)
    """

    def drawn(tensor: Tensor) -> Tensor:
        if tensor.numel() == 0 or tensor.is_complex():
            return tensor
        if _is_mask(tensor):
            if tensor.dim() == 0:
                return tensor
            return tensor[torch.randperm(len(tensor), generator=generator).to(tensor.device)]
        low, high = tensor.min().item(), tensor.max().item()
        if tensor.is_floating_point():
            spread = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
            return (low + (high - low) * spread).to(tensor)
        return torch.randint(int(low), int(high) + 1, tensor.shape, generator=generator).to(tensor)

    return batches.map_tensors(example, drawn)


def _is_mask(tensor: Tensor) -> bool:
    if tensor.dtype == torch.bool or bool(((tensor == 0) | (tensor == 1)).all()):
        return True
    return tensor.is_floating_point() and (
        not bool(tensor.isfinite().all()) or (tensor.numel() > 2 and len(torch.unique(tensor)) <= 2)
    )
