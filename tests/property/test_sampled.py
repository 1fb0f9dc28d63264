"""Sampled numbers of random networks, judged in their own standard errors."""

import math
import warnings
from functools import partial

import numpy as np

import flatness
from property.budget import count, for_examples
from property.recipes import build, drawn
from property.reference import Reference

# Linear in the sums, so that their standard errors are those of means of many differences.
LINEAR = [
    "hessian_trace",
    "layer_flatness_trace",
    "relative_flatness",
    "neuron_flatness",
    "neuron_flatness_incoming",
]
# Where probes leave no noise (a diagonal residual) only rounding is left.
ROUNDING = 1e-9
# Errors rest on 64 differences or more, some much larger than others: tails are heavier than normal ones.
FARTHEST = 6
# A row beyond that is measured with so many other seeds: one sample may carry most of the noise, and when all
# of its probes happen to agree, a single error says too little, though its square is right on average.
SEEDS = 60
# Student's t with three degrees of freedom is beyond this once in 40,000 times.
FARTHEST_OF_FOUR = 45


def test_sampled_values_scatter_as_their_errors_say():
    scores = []
    made = partial(drawn, samples=(20, 30), longest=3)
    for_examples("sampled", 20, made, lambda recipe: scores.extend(hold_sampled_values(recipe)))
    rms = math.sqrt(sum(z * z for z in scores) / max(len(scores), 1))
    count(f"sampled, rms z {rms:.3f} of {len(scores)}")
    assert len(scores) > 3
    # rms of N standard normals scatters by 1/√(2N): 0.13 at 30 networks
    assert rms < 1 + 4 / math.sqrt(2 * len(scores)) + 0.1, (rms, len(scores))


def sampled(made, seed):
    """A report of which every value rests on random probes."""
    return flatness.measure(
        made.model,
        made.data,
        made.loss,
        measures=LINEAR,
        method="sampled",
        precision=0.1,
        max_passes=20,
        seed=seed,
        progress=False,
    )


def calibrated(made, row, expected):
    """Whether a row's values of many seeds are right on average, and so are the squares of their errors."""
    found = [
        sampled(made, seed).result(row.measure, layer=row.layer, unit=row.unit, reduction=row.reduction)
        for seed in range(SEEDS)
    ]
    values, errors = (np.array([getattr(one, name) for one in found]) for name in ("value", "stderr"))
    count("sampled, of many seeds")
    # the spread itself is known to 1/√(2·60), 9 %, for normal values; these have heavier tails
    return abs(values.mean() - expected) < 4 * values.std(ddof=1) / math.sqrt(SEEDS) and np.square(
        errors
    ).mean() > 0.6 * values.var(ddof=1)


def hold_sampled_values(recipe):
    """The z-score of one value per network, its layers and measures taken in turn; none may be far off."""
    made = build(recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            report = sampled(made, recipe.seed)
        except flatness.FlatnessError:
            return []
    reference = Reference(made)
    if not reference.exists():
        return []
    found = []
    for row in report.results:
        expected = reference.row(row.measure, row.layer, row.unit, row.reduction)
        if row.method != "sampled" or expected is None or row.reduction == "max":
            continue
        error = row.value - expected.value
        if abs(error) <= ROUNDING * expected.scale:
            continue
        assert row.stderr > 0, (row, expected)
        # products with parameters may take four directions, of which other rows and the network's are a part
        few = row.level == "network" or any("random directions" in note for note in row.notes)
        farthest = FARTHEST_OF_FOUR if few else FARTHEST
        assert abs(error) < farthest * row.stderr or calibrated(made, row, expected.value), (row, expected)
        found += [] if few else [error / row.stderr]
    return found[recipe.seed % len(found) :][:1] if found else []
