"""What a plan takes: how many gradients of all samples, how long that is here, and how much memory."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from flatness.errors import listed
from flatness.measuring.plan.plan import Plan
from flatness.problem import batches
from flatness.problem.problem import Problem

# A gradient of the loss is a forward pass and a backward pass that takes twice as long.
_FORWARD, _BACKWARD = 1 / 3, 2 / 3
# Hessian products, in gradients: with the graph of first derivatives at hand, and from the beginning.
_PROBE, _PRODUCT = 3.0, 3.5
# The share of all probes that a pilot takes, and the fewest probes of each part and products of parameters.
_PILOT, _FEWEST_PROBES, _FEWEST_PRODUCTS = 1 / 8, 2, 2
# The most samples that a gradient is timed on.
_TIMED = 64


@dataclass(frozen=True)
class Estimate:
    """What running a plan takes, within a factor of about two.

    Attributes:
        fewest: Gradients of all samples, if few probes suffice.
        most: Gradients of all samples, if `max_passes` is used up; iterations may need fewer.
        samples: How many samples there are; None if the data does not say.
        seconds: What one gradient of all samples takes here; of one sample if their number is unknown.
        memory: Bytes that one micro-batch takes.
        apart: Measures whose iterations are not counted.
    """

    fewest: float
    most: float
    samples: int | None
    seconds: float
    memory: int
    apart: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The estimate in words."""
        times = [self.fewest * self.seconds, self.most * self.seconds]
        many = _between(_count(self.fewest), _count(self.most))
        whose = f"all {self.samples:,} samples" if self.samples else "all samples"
        each = "" if self.samples else " per sample"
        besides = f", {listed(self.apart, 4)} not counted" if self.apart else ""
        noun = "gradient" if many == "1" else "gradients"
        return (
            f"cost: about {many} {noun} of {whose}, {_between(*map(_span, times))}{each} here{besides}; "
            f"a micro-batch takes about {_size(self.memory)}"
        )


def estimate(problem: Problem, plan: Plan) -> Estimate:
    """Time a gradient of a few samples, and count how many of all samples the plan takes."""
    samples = problem.source.expected_samples()
    fewest, most = _gradients(plan)
    each = _timed_gradient(problem, min(_TIMED, plan.micro_batch))
    together = plan.micro_batch if samples is None else min(plan.micro_batch, samples)
    apart = tuple(measure.name for measure in plan.measures if measure.explore is not None)
    return Estimate(fewest, most, samples, each * (samples or 1), together * plan.sample_bytes, apart)


def _gradients(plan: Plan) -> tuple[float, float]:
    """The fewest and most gradients of all samples."""
    always = _FORWARD * bool(plan.needs_spread)
    if plan.streams or not (plan.samples or plan.by_parameters):
        always += _FORWARD + _BACKWARD * plan.routes.passes
    for part in plan.spectra.values():
        always += _PRODUCT * 10 * len(part) / max(1, len(plan.spectra))
    always += sum(_PRODUCT * 20 for _ in plan.request.network_spectra)
    least = most = always
    if plan.samples:
        each = _PROBE if plan.sampling.curved else 0.0
        if plan.complete:
            directions = max((t.cost for t in plan.treatments.values() if t.sampled), default=0)
            found = (_FORWARD + _BACKWARD * plan.rank + each * directions,) * 2
        else:
            # Probes of the Gauss-Newton part are one backward pass, and its statistics as much again.
            found = tuple(
                _FORWARD + (1 + _PILOT) * (count + each * count)
                for count in (_FEWEST_PROBES, max(_FEWEST_PROBES, plan.request.max_passes // 2))
            )
        least, most = least + found[0], most + found[1]
    return _with_products(plan, least, most)


def _with_products(plan: Plan, least: float, most: float) -> tuple[float, float]:
    """The same with products of parameters."""
    routes = plan.by_parameters
    for treatment in plan.treatments.values():
        if treatment.through_parameter:
            least += _PRODUCT * (treatment.cost if treatment.complete else _FEWEST_PRODUCTS)
            most += _PRODUCT * (treatment.cost if treatment.complete else plan.request.max_passes)
    if routes.rest:
        least += _PRODUCT * _FEWEST_PRODUCTS
        most += _PRODUCT * plan.request.max_passes
    return least, most


def _timed_gradient(problem: Problem, size: int) -> float:
    """Seconds that one gradient takes per sample: the second of two, of a few samples together."""
    example, taken = problem.example(size), 0.0
    parameters = [p for p in problem.model.parameters() if p.requires_grad]
    for _ in range(2):
        begun = time.perf_counter()
        with torch.enable_grad():
            items = problem.items(example)
            loss = problem.loss.values(items).sum()
        if parameters and loss.requires_grad:
            torch.autograd.grad(loss, parameters, allow_unused=True)
        if problem.device.type == "cuda":
            torch.cuda.synchronize(problem.device)
        taken = time.perf_counter() - begun
    return taken / batches.size_of(example)


def _count(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _between(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _span(seconds: float) -> str:
    """A time in words, to about a digit."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= 2 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{max(seconds, 0.01):.1g} s"


def _size(memory: int) -> str:
    """Bytes in words."""
    for size, unit in ((1e9, "GB"), (1e6, "MB")):
        if memory >= size:
            return f"{memory / size:.2g} {unit}"
    return f"{max(1, memory // 1000)} kB"
