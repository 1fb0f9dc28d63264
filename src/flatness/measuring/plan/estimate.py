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
    fewest = _gradients(plan, _FEWEST_PROBES, _FEWEST_PRODUCTS)
    most = _gradients(plan, max(_FEWEST_PROBES, plan.request.max_passes // 2), plan.request.max_passes)
    each = _timed_gradient(problem, min(_TIMED, plan.micro_batch))
    together = plan.micro_batch if samples is None else min(plan.micro_batch, samples)
    apart = tuple(measure.name for measure in plan.measures if measure.explore is not None)
    return Estimate(fewest, most, samples, each * (samples or 1), together * plan.sample_bytes, apart)


def _gradients(plan: Plan, probes: int, products: int) -> float:
    """Gradients of all samples, given the probes of each part and the products of each parameter."""
    taken = _FORWARD * bool(plan.needs_spread)
    if plan.routes or not (plan.sampling or plan.by_parameters):
        taken += _FORWARD + _BACKWARD * plan.routes.passes
    for part in plan.spectra.values():
        taken += _PRODUCT * 10 * len(part) / max(1, len(plan.spectra))
    taken += _PRODUCT * 20 * len(plan.request.network_spectra)
    if plan.sampling:
        taken += _FORWARD + _of_probes(plan, probes)
    through = [treatment for treatment in plan.treatments.values() if treatment.through_parameter]
    taken += _PRODUCT * sum(t.cost if t.complete else products for t in through)
    return taken + _PRODUCT * products * bool(plan.by_parameters.rest)


def _of_probes(plan: Plan, probes: int) -> float:
    """The gradients that the sampled engine takes."""
    each = _PROBE if plan.sampling.curved else 0.0
    if plan.complete:
        directions = max((t.cost for t in plan.treatments.values() if t.sampled), default=0)
        return _BACKWARD * plan.rank + each * directions
    # A probe of the Gauss-Newton part is one backward pass, and its statistics as much again.
    return (1 + _PILOT) * probes * (1 + each)


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
