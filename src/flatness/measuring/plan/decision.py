"""Which layers are exact, which are sampled, and which cannot be measured; with the reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flatness.errors import DifferentiabilityError, LossError, NotExactError, listed
from flatness.losses.custom import LARGEST_OUTPUT
from flatness.measuring.examine.examined import Examined
from flatness.measuring.request import LARGEST_BRUTE_FORCE, most_directions
from flatness.network.graph import once_differentiable
from flatness.network.memory import ran_out
from flatness.problem.problem import Problem

# Backward passes per batch up to which "auto" stays exact.
AFFORDABLE_PASSES = 256


@dataclass(frozen=True)
class Decision:
    """How each layer and norm layer gets its curvature.

    Attributes:
        curved: Those after which the network is not piecewise linear, if that matters for the curvature.
        sampled: Those that go through the sampled engine.
        complete: Whether that engine is given complete sets of directions, and so is exact.
        reasons: Why, for every layer.
        products: How many second backward passes per batch a complete set takes.
        by_parameters: Those that take Hessian products with their parameter.
        complete_by_parameters: Those of them that take all directions.
    """

    curved: frozenset[str]
    sampled: frozenset[str]
    complete: bool
    reasons: dict[str, str]
    products: int
    by_parameters: frozenset[str] = frozenset()
    complete_by_parameters: frozenset[str] = frozenset()

    def method(self, name: str) -> str:
        """The word in the results."""
        if name in self.by_parameters:
            return "exact" if name in self.complete_by_parameters else "sampled"
        return "sampled" if name in self.sampled and not self.complete else "exact"


def decide(
    problem: Problem,
    examined: Examined,
    names: list[str],
    closed: set[str],
    *,
    method: str,
    curvature: str,
    precision: float,
    max_passes: int = 100,
) -> Decision:
    """Decide for the named layers and norm layers.

    Args:
        problem: The model, data and loss.
        examined: What a few samples showed.
        names: The layers and norm layers.
        closed: Those whose exact statistics take no backward pass per output direction.
        method: "auto", "exact" or "sampled".
        curvature: "hessian", "gauss_newton" or "finite_differences".
        precision: The relative standard error that samples aim at.
        max_passes: The most probes.
    """
    items = examined.items
    passes = output_directions(problem, examined, method)
    curved = {name for name in names if curvature != "gauss_newton" and why_curved(examined, name)}
    by_parameters = {name for name in names if name in examined.loose}
    by_parameters |= curved if curvature == "finite_differences" else set()
    curved -= by_parameters
    products = sum(_directions(examined, name) for name in curved)
    complete = _by_brute_force(problem, method, passes, products, precision) if curved else False
    if method == "exact" and curved and not complete:
        raise _not_exact(examined, names, curved, products)
    all_directions = _complete(examined, by_parameters, names, method, max_passes)
    if curved:
        check_twice(examined, [examined.records[name].z_edge for name in sorted(curved)])
    sampled = set(curved)
    if method == "sampled":
        sampled = set(names) - examined.idle - by_parameters
    elif method == "auto" and passes > AFFORDABLE_PASSES:
        sampled |= set(names) - closed - examined.idle - by_parameters
    reasons = {}
    for name in names:
        reasons[name] = _exact_reason(examined, name, curvature)
        if name in by_parameters:
            reasons[name] = f"{why_curved(examined, name)}: products with the Hessian of its parameter"
        elif name in curved:
            after = str(why_curved(examined, name))
            reasons[name] = f"{after}: Hessian in all directions, {products} products" if complete else after
        elif name in sampled:
            reasons[name] = _sampled_reason(method, passes, items.logits.shape[1])
    through = frozenset(by_parameters)
    return Decision(
        frozenset(curved), frozenset(sampled), complete, reasons, products, through, all_directions
    )


def _complete(
    examined: Examined, by_parameters: set[str], names: list[str], method: str, max_passes: int
) -> frozenset[str]:
    """Those whose parameter's entries are taken one by one."""
    sizes = {name: examined.layers[name].matrix().numel() for name in by_parameters}
    found = {name for name, size in sizes.items() if size <= most_directions(method, max_passes)}
    if method == "exact" and found != by_parameters:
        raise _not_exact(examined, names, by_parameters - found, max(sizes.values()))
    return frozenset(found)


def why_curved(examined: Examined, name: str) -> str | None:
    """Why the Hessian of a layer or norm layer is more than its Gauss-Newton part; None when it is not."""
    if name in examined.loose:
        return examined.refused[name]
    if name in examined.shared:
        return f"its weight is used {examined.reused[name]} times"
    operators = examined.graph.curved.get(name)
    return f"{listed(operators, 4)} after it" if operators else None


def _directions(examined: Examined, name: str) -> int:
    """Directions that a sample's residual is probed in: preactivations, or weights used more than once."""
    if name in examined.shared:
        return examined.shared[name].matrix().numel()
    return examined.records[name].z_shape.numel() // examined.items.logits.shape[0]


def output_directions(problem: Problem, examined: Examined, method: str) -> int:
    """Backward passes per sample that take all directions of the output Hessian: rank × predictions."""
    items = examined.items
    try:
        return problem.loss.rank(items) * items.logits.shape[1]
    except LossError:
        # A loss of one's own refuses matrices for very many outputs; probes do without.
        if method == "exact" or items.logits.shape[2] <= LARGEST_OUTPUT:
            raise
        return items.logits[0].numel()


def check_twice(examined: Examined, edges: list[Any]) -> None:
    """Take one second derivative on the example, so that operators without one are known before any data.

    Args:
        examined: The example, with its graph.
        edges: Where derivatives are taken: edges of the graph, or parameters.

    Raises:
        DifferentiabilityError: With the operator's name.
    """
    output = examined.items.logits
    instead = (
        "or pass curvature='finite_differences', which takes first derivatives at two points, or "
        "curvature='gauss_newton' for that part of the Hessian."
    )
    # These do not always complain, and leave their share out in silence.
    without = once_differentiable(output)
    if without:
        raise DifferentiabilityError(
            f"Expected operators that can be differentiated twice but {listed(without)} is not one. Write "
            f"its backward with differentiable operations, {instead}"
        )
    try:
        slopes = torch.autograd.grad(
            output, edges, torch.ones_like(output), create_graph=True, allow_unused=True
        )
        live = [slope for slope in slopes if slope is not None and slope.requires_grad]
        if live:
            ones = [torch.ones_like(slope) for slope in live]
            torch.autograd.grad(live, edges, ones, retain_graph=True, allow_unused=True)
    except (RuntimeError, NotImplementedError) as error:
        if ran_out(error):
            raise
        reason = (str(error).splitlines() or [""])[0].split(". ")[0].rstrip(".")
        raise DifferentiabilityError(
            f"Expected operators that can be differentiated twice but torch says: {reason}. Replace the "
            f"operator, {instead}"
        ) from error


def _by_brute_force(problem: Problem, method: str, passes: int, products: int, precision: float) -> bool:
    """Whether all directions cost no more than the probes that the precision is likely to take.

    One probe of each of n samples leaves a relative error of about √(2/n).
    """
    if method == "sampled" or passes > AFFORDABLE_PASSES:
        return False
    if method == "exact":
        return products <= LARGEST_BRUTE_FORCE
    samples = problem.source.expected_samples()
    return products <= (64 if samples is None else max(16, 2 / (precision**2 * max(1, samples))))


def _exact_reason(examined: Examined, name: str, curvature: str) -> str:
    if name in examined.idle:
        return "the output does not depend on it: no curvature"
    if curvature == "gauss_newton":
        return "Gauss-Newton part, as asked"
    if name == examined.last:
        return "last layer: the output is linear in its weight"
    return "the network is piecewise linear after it"


def _sampled_reason(method: str, passes: int, predictions: int) -> str:
    if method == "sampled":
        return "sampled, as asked"
    what = f", {predictions} predictions per sample" if predictions > 1 else ""
    return f"exact would take {passes} backward passes per batch{what}"


_EXPECTED = (
    "Expected layers whose Hessian is exact, which needs a network that is piecewise linear after the "
    "layer and uses its weight once, but got "
)


def _not_exact(examined: Examined, names: list[str], curved: set[str], products: int) -> NotExactError:
    layers = [name for name in names if name in curved]
    reasons = [f"{name or 'the model itself'}: {why_curved(examined, name)}" for name in layers]
    fine = [
        name
        for name in examined.called
        if name not in examined.refused and why_curved(examined, name) is None
    ]
    advice = ["method='auto' for an estimate with its standard error", *_other_layers(examined, fine)]
    advice.append("curvature='gauss_newton' for that part of the Hessian")
    return NotExactError(
        f"{_EXPECTED}{listed(reasons, separator='; ')}. All directions would take {products} products per "
        f"batch, more than {LARGEST_BRUTE_FORCE}: pass {', or '.join(advice)}."
    )


def refuse(examined: Examined, names: list[str]) -> None:
    """Raise when one of these layers cannot be measured by any method.

    Raises:
        NotExactError: With all such layers and their reasons.
    """
    refused = {
        name: examined.refused[name]
        for name in names
        if name in examined.refused and name not in examined.loose
    }
    if not refused:
        return
    reasons = [f"{name or 'the model itself'}: {reason}" for name, reason in refused.items()]
    fine = [name for name in examined.called if name in examined.loose or name not in examined.refused]
    advice = _other_layers(examined, fine)
    instead = f": pass {', or '.join(advice)}." if advice else "."
    raise NotExactError(
        f"Expected layers whose curvature can be found but got {listed(reasons, separator='; ')}. No method "
        f"measures these{instead}"
    )


def _other_layers(examined: Examined, fine: list[str]) -> list[str]:
    if not fine:
        return []
    if len(fine) <= 4:
        return [f"layers={fine!r}"]
    return ["layers='last'" if examined.last in fine else "other layers"]
