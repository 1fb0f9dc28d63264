"""Parameters with one copy per sample, so that their derivatives come sample by sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]
"""The shape of one sample's copy."""


def shapes_of_copies(parameter: Tensor) -> list[Shape]:
    """Shapes (…) that one sample's copy may have, such that copies (n, …) may stand for the parameter.

    A parameter (1, …) is repeated along its first dimension. One with a single long dimension, such as a
    scale for each channel, is broadcast to what the model has of each sample, which may be rows of a matrix.
    """
    if parameter.dim() > 1 and len(parameter) == 1:
        return [parameter.shape[1:]]
    if parameter.dim() and parameter.numel() == max(parameter.shape):
        return [(*[1] * places, *parameter.shape) for places in range(3)]
    return []


class RepeatedParameters:
    """A context that replaces parameters by their copies for n samples.

    Args:
        model: The network.
        shapes: The shape of one sample's copy, by the parameter's name in `named_parameters`.

    Attributes:
        copies: The copies of the batch that `prepare` was called for, by name.
    """

    def __init__(self, model: nn.Module, shapes: Mapping[str, Shape]) -> None:
        parameters = dict(model.named_parameters())
        self._own, self._shapes = {name: parameters[name] for name in shapes}, shapes
        owners = [(module, key) for module in model.modules() for key in module._parameters]
        self._places = {
            name: [(module, key) for module, key in owners if module._parameters[key] is parameter]
            for name, parameter in self._own.items()
        }
        self.copies: dict[str, Tensor] = {}

    def __enter__(self) -> RepeatedParameters:
        """Do nothing yet: `prepare` makes the copies once the number of samples is known."""
        return self

    def __exit__(self, *error: object) -> None:
        """Put the parameters back."""
        for name, places in self._places.items():
            for module, key in places:
                module._parameters[key] = self._own[name]
        self.copies.clear()

    def prepare(self, samples: int) -> None:
        """Fresh copies for a batch with this many samples."""
        for name, parameter in self._own.items():
            copies = parameter.detach().reshape(1, *self._shapes[name]).expand(samples, *self._shapes[name])
            self.copies[name] = copies.clone().requires_grad_()
            for module, key in self._places[name]:
                module._parameters[key] = self.copies[name]  # type: ignore[assignment]


def told_apart(
    before: Tensor, after: Tensor, copies: Iterable[object], originals: Iterable[Tensor] = ()
) -> bool:
    """Whether copies leave the outputs unchanged, and each acts on its own sample alone.

    Args:
        before: The outputs without copies, samples first.
        after: The outputs with copies, with their graph.
        copies: The copies, or edges of the graph where their derivatives arrive.
        originals: What the copies replace; outputs that still depend on it have another way to it.
    """
    if not _agree(before.detach(), after.detach()):
        return False
    weights = torch.linspace(1, 2, after[0].numel(), dtype=after.dtype, device=after.device)
    edges, own = list(copies), list(originals)

    def arriving(outputs: Tensor) -> list[Tensor | None]:
        summed = outputs.flatten(1).sum(0) @ weights
        return list(torch.autograd.grad(summed, [*edges, *own], retain_graph=True, allow_unused=True))  # type: ignore[list-item]

    of_first, of_others = arriving(after[:1]), arriving(after[1:])
    if any(value is None for value in of_first[: len(edges)]):
        return False
    stray = [value[1:] for value in of_first[: len(edges)] if value is not None]
    stray += [value[:1] for value in of_others[: len(edges)] if value is not None]
    stray += [value for value in (*of_first[len(edges) :], *of_others[len(edges) :]) if value is not None]
    return not any(bool(value.any()) for value in stray)


def _agree(before: Tensor, after: Tensor) -> bool:
    """Whether outputs agree up to the rounding of different kernels."""
    return after.shape == before.shape and bool((after - before).abs().max() <= 1e-4 * before.abs().max())
