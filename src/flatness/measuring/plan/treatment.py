"""How each layer gets its curvature: exactly, from probes, through its parameter, or not at all; and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from flatness.curvature.sums.routes import LayerRoute
from flatness.errors import LossError, NotExactError, listed
from flatness.losses.base import LARGEST_OUTPUT
from flatness.measuring.examine.examined import Examined
from flatness.measuring.request import LARGEST_BRUTE_FORCE, MeasureRequest
from flatness.network.affine import AffineModule
from flatness.network.layers import own_parameter
from flatness.problem.problem import Problem

Way = Literal["closed form", "exact passes", "all directions", "probes", "parameter products"]

# Backward passes per batch up to which "auto" stays exact.
AFFORDABLE_PASSES = 256


@dataclass(frozen=True)
class Treatment:
    """How one layer or norm layer gets its curvature.

    Attributes:
        name: Its name in the model.
        way: "closed form": on the forward pass alone. "exact passes": a backward pass per output direction.
            "probes": random directions for every sample. "all directions": the same engine, given all of
            them. "parameter products": products with the Hessian of its parameter.
        reason: Why, in words.
        cost: Backward passes per batch that all its directions take.
        complete: Whether a way that can take random directions takes all of them, and is exact.
        residual: Whether its Hessian is more than its Gauss-Newton part, which one backward pass gives.
        linear: Whether it relies on a network that is piecewise linear after it.
        route: What the engine is to compute of a layer; None for a norm layer.
        module: The norm layer; None for a layer.
        parameter: The parameter that a layer with products is, or is a part of.
        shape: (G, d, m) of a layer, so that a plan is printed without a look at the model.
    """

    name: str
    way: Way
    reason: str
    cost: int = 0
    complete: bool = True
    residual: bool = False
    linear: bool = False
    route: LayerRoute | None = None
    module: AffineModule | None = None
    parameter: str = ""
    shape: tuple[int, ...] = ()

    @property
    def method(self) -> str:
        """The word in the results."""
        return "exact" if self.complete else "sampled"

    @property
    def sampled(self) -> bool:
        """Whether it goes through the sampled engine, be it with all directions."""
        return self.way in ("probes", "all directions")

    @property
    def through_parameter(self) -> bool:
        """Whether it takes products with the Hessian of its parameter."""
        return self.way == "parameter products"

    @property
    def differentiates_twice(self) -> bool:
        """Whether its Hessian is more than signals of first derivatives say."""
        return self.residual or self.through_parameter

    def __str__(self) -> str:
        """The way in words."""
        if self.through_parameter:
            return "exact, every entry" if self.complete else "sampled, through its parameter"
        if self.sampled:
            return "exact, all directions" if self.complete else "sampled"
        return f"exact, {self.route.kind}" if self.route is not None else "exact"


class Decision:
    """What is decided for layers and norm layers together: which differentiate twice, and what that costs.

    Args:
        problem: The model, data and loss.
        examined: What a few samples showed.
        request: What is asked for.
        names: The layers and norm layers.

    Raises:
        NotExactError: If exact values are asked for and not to be had.
    """

    def __init__(
        self, problem: Problem, examined: Examined, request: MeasureRequest, names: Collection[str]
    ) -> None:
        self.model, self.examined, self.request, self.names = problem.model, examined, request, names
        self.passes = output_directions(problem, examined, request.method)
        records = [examined.records[name] for name in names]
        smooth = {r.name for r in records if request.curvature != "gauss_newton" and r.curved is not None}
        loose = {record.name for record in records if record.via_parameter}
        through = loose | smooth if request.differences else loose
        self.entries = {name: examined.layers[name].matrix().numel() for name in through}
        self.curved = smooth - through
        self.products = sum(_directions(examined, name) for name in self.curved)
        self.complete = bool(self.curved) and self._by_brute_force(problem)
        if request.method == "exact":
            self._check_exact()
        if self.curved:
            from flatness.measuring.examine.second_derivatives import check_twice

            check_twice(examined, [examined.calls[name].z_edge for name in sorted(self.curved)])

    def treatments(self, routes: Mapping[str, LayerRoute], *, traced: bool = False) -> dict[str, Treatment]:
        """How each of them is treated.

        Args:
            routes: How signals at the layers' calls would give their statistics.
            traced: Whether the trace of every one of them is wanted.
        """
        return {name: self._treatment(name, routes.get(name), traced) for name in self.names}

    def _treatment(self, name: str, route: LayerRoute | None, traced: bool) -> Treatment:
        """How one of them is treated."""
        exact, record, request = self._exact(name, route, traced), self.examined.records[name], self.request
        if name in self.entries:
            entries, layer = self.entries[name], self.examined.layers[name]
            return replace(
                exact,
                way="parameter products",
                reason=f"{record.curved}: products with the Hessian of its parameter",
                cost=entries,
                complete=entries <= request.enumeration_limit,
                parameter=own_parameter(self.model, record.shared or layer) or "",
            )
        if name in self.curved:
            how = f": Hessian in all directions, {self.products} products" if self.complete else ""
            return replace(
                exact,
                way="all directions" if self.complete else "probes",
                reason=f"{record.curved}{how}",
                cost=self.products,
                residual=True,
                complete=self.complete,
            )
        many = request.method == "auto" and exact.cost > AFFORDABLE_PASSES
        if (request.method == "sampled" or many) and not record.idle:
            return replace(exact, way="probes", reason=self._sampled_reason(), complete=False)
        return exact

    def _exact(self, name: str, route: LayerRoute | None, traced: bool) -> Treatment:
        """How it would be treated if signals of first derivatives said all."""
        record, twice = self.examined.records[name], name in self.curved or name in self.entries
        common: dict[str, Any] = {
            "reason": _exact_reason(self.examined, name, self.request.curvature),
            "linear": self.request.curvature != "gauss_newton" and not record.idle and not twice,
        }
        if route is None:
            return Treatment(
                name, "exact passes", cost=self.passes, module=self.examined.affine[name], **common
            )
        # What Gauss-Newton leaves out is said as a share of the trace.
        needs = route.needs | {"row_traces"} if traced or twice else route.needs
        closed = route.kind != "passes"
        return Treatment(
            name,
            way="closed form" if closed else "exact passes",
            cost=0 if closed else self.passes,
            route=replace(route, needs=needs),
            shape=tuple(route.layer.matrix().shape),
            **common,
        )

    def _by_brute_force(self, problem: Problem) -> bool:
        """Whether all directions cost no more than the probes that the precision is likely to take.

        One probe of each of n samples leaves a relative error of about √(2/n).
        """
        if self.request.method == "sampled" or self.passes > AFFORDABLE_PASSES:
            return False
        if self.request.method == "exact":
            return self.products <= LARGEST_BRUTE_FORCE
        samples = problem.source.expected_samples()
        most = 64 if samples is None else max(16, 2 / (self.request.precision**2 * max(1, samples)))
        return self.products <= most

    def _check_exact(self) -> None:
        if self.curved and not self.complete:
            raise _not_exact(self.examined, [n for n in self.names if n in self.curved], self.products)
        most = self.request.enumeration_limit
        long = [name for name in self.names if self.entries.get(name, 0) > most]
        if long:
            raise _not_exact(self.examined, long, max(self.entries.values()))

    def _sampled_reason(self) -> str:
        if self.request.method == "sampled":
            return "sampled, as asked"
        predictions = self.examined.items.logits.shape[1]
        what = f", {predictions} predictions per sample" if predictions > 1 else ""
        return f"exact would take {self.passes} backward passes per batch{what}"


def _directions(examined: Examined, name: str) -> int:
    """Directions that a sample's residual is probed in: preactivations, or weights used more than once."""
    shared = examined.records[name].shared
    if shared is not None:
        return shared.matrix().numel()
    return examined.calls[name].z_shape.numel() // examined.items.logits.shape[0]


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


def _exact_reason(examined: Examined, name: str, curvature: str) -> str:
    if examined.records[name].idle:
        return "the output does not depend on it, so it has no curvature"
    if curvature == "gauss_newton":
        return "Gauss-Newton part, as asked"
    if name == examined.last:
        return "last layer: the output is linear in its weight"
    return "the network is piecewise linear after it"


def _not_exact(examined: Examined, layers: list[str], products: int) -> NotExactError:
    reasons = [f"{name or 'the model itself'}: {examined.records[name].curved}" for name in layers]
    records = [examined.records[name] for name in examined.called]
    fine = [record.name for record in records if record.refused is None and record.curved is None]
    advice = ["method='auto' for an estimate with its standard error", *_other_layers(examined, fine)]
    advice.append("curvature='gauss_newton' for that part of the Hessian")
    return NotExactError(
        "Expected layers whose Hessian is exact, which needs a network that is piecewise linear after the "
        f"layer and uses its weight once, but got {listed(reasons, separator='; ')}. All directions would "
        f"take {products} products per batch, more than {LARGEST_BRUTE_FORCE}: pass {', or '.join(advice)}."
    )


def refuse(examined: Examined, names: list[str]) -> None:
    """Raise when one of these layers cannot be measured by any method.

    Raises:
        NotExactError: With all such layers and their reasons.
    """
    refused = [examined.records[name] for name in names if examined.records[name].hopeless]
    if not refused:
        return
    reasons = [f"{record.name or 'the model itself'}: {record.refused}" for record in refused]
    fine = [name for name in examined.called if not examined.records[name].hopeless]
    advice = _other_layers(examined, fine)
    instead = f": pass {', or '.join(advice)}." if advice else "."
    raise NotExactError(
        f"Expected layers whose curvature can be found but got {listed(reasons, separator='; ')}. No method "
        f"can measure these{instead}"
    )


def _other_layers(examined: Examined, fine: list[str]) -> list[str]:
    if not fine:
        return []
    if len(fine) <= 4:
        return [f"layers={fine!r}"]
    return ["layers='last'" if examined.last in fine else "other layers"]
