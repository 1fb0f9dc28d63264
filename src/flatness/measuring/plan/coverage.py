"""What makes up the trace over all parameters of a network: layers, norm layers, and the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from flatness.catalogue.measure import Measure
from flatness.curvature.parameters.parameter_products import own_parameter
from flatness.errors import DifferentiabilityError, NotExactError, listed
from flatness.measuring.examine.examined import Examined
from flatness.measuring.plan.decision import check_twice, why_curved
from flatness.measuring.request import LARGEST_BRUTE_FORCE
from flatness.problem.guard import differentiable
from flatness.problem.problem import Problem


@dataclass
class Covered:
    """Everything that has a parameter, each once.

    Attributes:
        layers: Layers whose weight, and bias unless that is among the rest, their own statistics give.
        affine: Norm layers and PReLUs, likewise.
        rest: Number of entries of the parameters that take Hessian products: embeddings, raw parameters of
            parametrisations, biases and norms of modules used more than once, modules of unknown kinds.
    """

    layers: list[str]
    affine: list[str]
    rest: dict[str, int] = field(default_factory=dict)


def cover(
    problem: Problem,
    examined: Examined,
    measures: Iterable[Measure],
    names: list[str],
    curvature: str,
    most: int | None,
) -> Covered | None:
    """What the trace over all parameters needs; None, with a note, where it has gaps.

    Args:
        problem: The model, data and loss.
        examined: What a few samples showed.
        measures: The measures wanted.
        names: The layers that are measured.
        curvature: "hessian", "gauss_newton" or "finite_differences".
        most: Entries that the rest may have at most; None for any number.
    """
    if not any("traces" in measure.network_needs for measure in measures):
        return None
    layers = _one_each(examined, names)
    refused = [name for name in (*layers, *examined.affine) if name in examined.refused]
    hopeless = [name for name in refused if name not in examined.loose]
    affine = [name for name in examined.affine if name not in examined.refused]
    if curvature == "finite_differences":
        affine = [name for name in affine if why_curved(examined, name) is None]
    covered = Covered(layers, affine)
    covered.rest = _rest(problem.model, examined, covered, curvature == "finite_differences")
    gap = _gap(problem, examined, hopeless, covered, curvature, most)
    if gap:
        examined.notes.append(f"no trace over the whole network: {gap}")
        return None
    return covered


def _one_each(examined: Examined, names: list[str]) -> list[str]:
    """The layers that ran, one per weight: the measured one where several names have the same."""
    kept: list[str] = []
    for name in [*names, *(name for name in examined.called if name not in names)]:
        mine = examined.layers[name].weight
        others = (examined.layers[other].weight for other in kept)
        if not any(isinstance(mine, nn.Parameter) and mine is other for other in others):
            kept.append(name)
    return [name for name in examined.called if name in kept]


def _rest(model: nn.Module, examined: Examined, covered: Covered, differences: bool) -> dict[str, int]:
    """Parameters that neither layers nor norm layers account for, with their sizes."""
    aliases = dict(model.named_parameters(remove_duplicate=False))
    known: set[int] = set()
    for name in covered.layers:
        layer = examined.layers[name]
        parts = [layer.weight_name]
        # Signals at one call say nothing about a bias that others share.
        alone = name not in examined.shared and name not in examined.loose
        if alone and not (differences and why_curved(examined, name)):
            parts.append(layer.bias_name)
        known |= {id(aliases[part]) for part in parts if part in aliases}
    for owner in (*covered.affine, *examined.silent):
        known |= {id(value) for value in model.get_submodule(owner).parameters(recurse=False)}
    return {name: value.numel() for name, value in model.named_parameters() if id(value) not in known}


def _gap(
    problem: Problem,
    examined: Examined,
    hopeless: list[str],
    covered: Covered,
    curvature: str,
    most: int | None,
) -> str | None:
    """Why there is no trace over all parameters, in words; None when there is."""
    if hopeless:
        return "not for " + listed([f"{name} ({examined.refused[name]})" for name in hopeless], 6)
    size = sum(covered.rest.values())
    if most is not None and size > most:
        return (
            f"{listed(covered.rest, 6)} would take {size} products per batch, more than {LARGEST_BRUTE_FORCE}"
        )
    if covered.rest and curvature != "finite_differences":
        parameters = dict(problem.model.named_parameters())
        try:
            with differentiable(problem.model):
                check_twice(examined, [parameters[name] for name in covered.rest])
        except DifferentiabilityError as error:
            return str(error)
    return None


def refuse_made_weights(problem: Problem, examined: Examined, names: list[str]) -> None:
    """Refuse layers that finite differences cannot move: their weight is made from other parameters."""
    made = [
        name
        for name in names
        if why_curved(examined, name) is not None
        and own_parameter(problem.model, examined.layers[name]) is None
    ]
    if made:
        raise NotExactError(
            "Expected layers whose weight is a parameter, as finite differences move it, but the weight of "
            f"{listed(made)} is made from others. Remove the parametrisation, which leaves its weight in "
            "place (torch.nn.utils.parametrize.remove_parametrizations), and measure again."
        )


def first_names(model: nn.Module) -> dict[str, str]:
    """The first name of every parameter, by all of its names."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(value), name) for name, value in named}
