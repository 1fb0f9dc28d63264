"""What a plan takes: how many gradients of all samples, how long that is here, and how much memory."""

from __future__ import annotations

import time

import torch

from flatness.measuring.plan.plan import Estimate, Plan
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
    least, most = _of_probes(plan) if plan.samples else (0.0, 0.0)
    return _with_products(plan, always + least, always + most)


def _of_probes(plan: Plan) -> tuple[float, float]:
    """The gradients that the sampled engine takes."""
    each = _PROBE if plan.sampling.curved else 0.0
    if plan.complete:
        directions = max((t.cost for t in plan.treatments.values() if t.sampled), default=0)
        taken = _FORWARD + _BACKWARD * plan.rank + each * directions
        return taken, taken
    few, many = _FEWEST_PROBES, max(_FEWEST_PROBES, plan.request.max_passes // 2)
    # A probe of the Gauss-Newton part is one backward pass, and its statistics as much again.
    return _FORWARD + (1 + _PILOT) * few * (1 + each), _FORWARD + (1 + _PILOT) * many * (1 + each)


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
