"""The PAC-Bayes bound of tsuzuku2020, eq. 1–4, evaluated term by term.

With probability 1 − δ over the m training samples, for all posteriors Q and all λ of a grid of k,

    L_D(Q) ≤ L_S(Q) + (1/λ) (KL[Q‖P] + ln(1/δ) + ln k + Ψ),     Ψ = λ²/2m   (eq. 3),

L the 0–1 loss. Q is a Gaussian around the weights, P one around 0 with the same standard deviations. These
are chosen after training, which costs the logarithm of the number of choices: a hyperprior puts the same
weight on every positive floating-point number, independently for every scale. Parameters that get no noise
are a point of a prior on the floating-point numbers of their type. Every term is counted, however large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from flatness.catalogue.engines.weight_noise import NoiseScales, WeightNoise, matrix_scales, row_column_scales
from flatness.catalogue.measure import Surroundings, Valued, averaged
from flatness.problem.progress import ProgressBar

UNKNOWN = "(A) network without noise instead of with it"


def positive_numbers(precision: torch.dtype) -> int:
    """How many positive finite numbers a floating-point type has.

    >>> positive_numbers(torch.float32) == 255 * 2**23 - 1
    True
    """
    facts = torch.finfo(precision)
    mantissa = round(-math.log2(facts.eps))
    exponent = facts.bits - 1 - mantissa
    return (2**exponent - 1) * 2**mantissa - 1


def grid_of(samples: int) -> list[float]:
    """The grid of λ: 8m, 4m, 2m, … down to 1. It depends on nothing but the number of samples."""
    return [8 * samples / 2**k for k in range(1 + math.floor(math.log2(8 * samples)))]


@dataclass(frozen=True)
class _Posterior:
    """Q for every λ, its distance from P, and its error rate."""

    noise: WeightNoise
    scales: list[NoiseScales]
    precision: torch.dtype

    @classmethod
    def of(cls, around: Surroundings) -> Self:
        """By the scales and in the precision that the options name."""
        choose = row_column_scales if around.options["sigma"] == "rows_and_columns" else matrix_scales
        scales = [choose(view) for view in around.layers]
        return cls(
            WeightNoise(around.space, around.layers), scales, getattr(torch, around.options["hyperprior"])
        )

    def deviations(self, strength: float) -> list[Tensor]:
        return [scale.deviations(strength, self.precision) for scale in self.scales]

    def divergence(self, strength: float) -> float:
        """KL of Q from the Gaussian around 0 with the same deviations: Σ W²/2s²."""
        return sum(float(part.sum()) for part in self.noise.penalty(self.deviations(strength)))

    def error_rate(self, strength: float, count: int, seed: int) -> tuple[float, float]:
        """L_S, from `count` networks drawn from Q, and its standard error."""
        generator = torch.Generator().manual_seed(seed)
        space, deviations, found = self.noise.space, self.deviations(strength), []
        with ProgressBar("noise", count, space.problem.progress) as bar:
            for _ in range(count):
                drawn = zip(deviations, self.noise.draw(generator), strict=True)
                found.append(space.error_rate(self.noise.place([s * epsilon for s, epsilon in drawn])))
                bar.advance()
        return averaged(found)


def pac_bayes_bound(around: Surroundings) -> Valued:
    """The bound at the best λ, with all its terms."""
    options, space = around.options, around.space
    error = space.error_rate()
    posterior = _Posterior.of(around)
    samples, draws = space.samples, int(options["draws"])
    parts = {strength: _parts(posterior, strength, samples, options) for strength in grid_of(samples)}
    rests = {strength: sum(rest.values()) for strength, rest in parts.items()}
    pilots = _pilots(posterior, rests, max(2, draws // 5), around.seed)
    best = min(pilots, key=lambda strength: pilots[strength] + rests[strength])
    # Fresh draws: those that chose λ would make it look better than it is.
    noisy, stderr = posterior.error_rate(best, draws, around.seed + 1)
    terms = [
        ("training error of the network", error, 0.0),
        ("(C) its rise under the noise", noisy - error, stderr),
        *((name, value, 0.0) for name, value in parts[best].items()),
    ]
    value = sum(size for _, size, _ in terms)
    story = {
        **_story(posterior, best, samples, options),
        "terms": [{"term": name, "value": size, "stderr": noise} for name, size, noise in terms],
        "grid": [
            {"lambda": strength, "error under noise": pilots.get(strength), "rest": rest}
            for strength, rest in rests.items()
        ],
        "value": value,
        "stderr": stderr,
    }
    notes = _notes(around, story)
    summed = "terms: " + "; ".join(f"{name} {size:.4g}" for name, size, _ in terms)
    return Valued(value, (*notes, summed), True, stderr, "sampled", terms={**story, "notes": notes})


def _parts(
    posterior: _Posterior, strength: float, samples: int, options: Mapping[str, Any]
) -> dict[str, float]:
    """Everything but the error rate, divided by λ."""
    noise, count = posterior.noise, len(grid_of(samples))
    # Logarithms of how many ways there are to choose the scales, and what gets no noise.
    chosen, fixed = sum(scale.count for scale in posterior.scales), noise.space.dimension - noise.count
    logarithms = {
        "(B) weights over noise": posterior.divergence(strength),
        f"(B) choice of the scales ({chosen})": chosen * math.log(positive_numbers(posterior.precision)),
        f"(B) parameters without noise ({fixed})": fixed
        * math.log(2 * positive_numbers(noise.space.problem.dtype) + 1),
        "confidence, ln(1/δ)": -math.log(options["delta"]),
        f"choice of λ (out of {count})": math.log(count),
        "Ψ": strength**2 / ((2.0 if options["psi"] == "paper" else 8.0) * samples),
    }
    return {name: value / strength for name, value in logarithms.items()}


def _pilots(posterior: _Posterior, rests: Mapping[float, float], draws: int, seed: int) -> dict[float, float]:
    """Error rates under noise for every λ that can still be the best, with the same noise for all."""
    found: dict[float, float] = {}
    least = math.inf
    for strength in sorted(rests, key=rests.__getitem__):
        if rests[strength] >= least:
            break
        found[strength] = posterior.error_rate(strength, draws, seed)[0]
        least = min(least, found[strength] + rests[strength])
    return found


def _story(
    posterior: _Posterior, strength: float, samples: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    """What there is to tell beside the terms."""
    diagonals = [view.statistics["diagonal"] for view in posterior.noise.layers]
    mass = sum(float(diagonal.abs().sum()) for diagonal in diagonals)
    negative = sum(float(diagonal.clamp(max=0).abs().sum()) for diagonal in diagonals)
    pairs = zip(diagonals, posterior.deviations(strength), strict=True)
    return {
        **options,
        "lambda": strength,
        "samples": samples,
        "loss": posterior.noise.space.problem.loss.name,
        # ½ Σ h s² of the surrogate loss, negative curvature clipped
        "expected rise": sum(float((0.5 * h.clamp(min=0) * s.square()).sum()) for h, s in pairs),
        "clipped": negative / mass if mass > 0 else 0.0,
        "unknown": UNKNOWN,
    }


def _notes(around: Surroundings, story: Mapping[str, Any]) -> list[str]:
    notes = [
        f"λ = {story['lambda']:g}, δ = {story['delta']:g}, {story['samples']} samples; noise by "
        f"{story['sigma']} from the curvature of {story['loss']}, {story['clipped']:.1%} of whose mass is "
        "negative and clipped",
        f"not computable and left out: {UNKNOWN}; the number bounds the error of the network with noise",
        f"the surrogate was expected to rise by {story['expected rise']:.4g} under the noise (½ Σ h σ²)",
        f"the standard error is that of {story['draws']} draws of the noise; δ does not cover it",
    ]
    if not any(bool((view.statistics["diagonal"] > 0).any()) for view in around.layers):
        notes.append("no positive curvature anywhere; the noise was set to the size of the weights over √λ")
    if story["value"] >= 1:
        notes.append("vacuous: an error rate is never above 1")
    return notes
