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
from typing import Any

import torch
from torch import Tensor

from flatness.catalogue.measure import Measure, Surroundings, Valued
from flatness.catalogue.noise_scales import NoiseScales, matrix_scales, row_column_scales
from flatness.catalogue.options import NORMALIZED_LOSS, choice, count, declared, share
from flatness.catalogue.registry import register_measure
from flatness.catalogue.weight_matrices import WeightMatrices
from flatness.problem.progress import ProgressBar

HYPERPRIORS = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
PSI = {"paper": 2.0, "hoeffding": 8.0}
UNKNOWN = "(A) network without noise instead of with it"
_MANTISSA = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}
_EXPONENT = {torch.float16: 5, torch.bfloat16: 8, torch.float32: 8, torch.float64: 11}


def positive_numbers(precision: torch.dtype) -> int:
    """How many positive finite numbers a floating-point type has.

    >>> positive_numbers(torch.float32) == 255 * 2**23 - 1
    True
    """
    return (2 ** _EXPONENT[precision] - 1) * 2 ** _MANTISSA[precision] - 1


def grid_of(samples: int) -> list[float]:
    """The grid of λ: 8m, 4m, 2m, … down to 1. It depends on nothing but the number of samples."""
    return [8 * samples / 2**k for k in range(1 + math.floor(math.log2(8 * samples)))]


@dataclass(frozen=True)
class _Posterior:
    """Q for every λ, what it costs, and its error rate."""

    around: Surroundings
    weights: WeightMatrices
    scales: list[NoiseScales]
    precision: torch.dtype

    def deviations(self, strength: float) -> list[Tensor]:
        return [scale.deviations(strength, self.precision) for scale in self.scales]

    def divergence(self, strength: float) -> float:
        """KL of Q from the Gaussian around 0 with the same deviations: Σ W²/2s²."""
        pairs = zip(self.around.layers, self.deviations(strength), strict=True)
        return sum(float((view.W.square() / (2 * s.square())).sum()) for view, s in pairs)

    def expected_rise(self, strength: float) -> float:
        """½ Σ h s² of the surrogate loss, negative curvature clipped."""
        pairs = zip(self.around.layers, self.deviations(strength), strict=True)
        return sum(
            float((0.5 * view.statistics["diagonal"].clamp(min=0) * s.square()).sum()) for view, s in pairs
        )

    def error_rates(self, strength: float, count: int, seed: int) -> Tensor:
        """L_S of `count` networks drawn from Q."""
        generator = torch.Generator().manual_seed(seed)
        deviations, found = self.deviations(strength), []
        with ProgressBar("noise", count, self.around.space.problem.progress) as bar:
            for _ in range(count):
                noise = [s * torch.randn(s.shape, generator=generator, dtype=s.dtype) for s in deviations]
                found.append(self.around.space.error_rate(self.weights.place(noise)))
                bar.advance()
        return torch.tensor(found, dtype=torch.float64, device="cpu")

    @property
    def choices(self) -> float:
        """Logarithm of the number of ways to choose the scales."""
        return self.scale_count * math.log(positive_numbers(self.precision))

    @property
    def scale_count(self) -> int:
        return sum(scale.count for scale in self.scales)

    @property
    def fixed_count(self) -> int:
        """Parameters that get no noise."""
        return self.around.space.dimension - self.weights.count

    @property
    def fixed(self) -> float:
        """Logarithm of the number of values that these could have."""
        return self.fixed_count * math.log(2 * positive_numbers(self.around.space.problem.dtype) + 1)


def _bound(around: Surroundings) -> Mapping[str | None, Valued]:
    options, space = around.options, around.space
    error = space.error_rate()
    choose = row_column_scales if options["sigma"] == "rows_and_columns" else matrix_scales
    posterior = _Posterior(
        around,
        WeightMatrices(space, around.layers),
        [choose(view) for view in around.layers],
        HYPERPRIORS[options["hyperprior"]],
    )
    samples = int(space.problem.samples or 1)
    parts = {strength: _parts(posterior, strength, samples, options) for strength in grid_of(samples)}
    pilots = _pilots(posterior, parts, max(2, int(options["draws"]) // 5), around.seed)
    best = min(pilots, key=lambda strength: pilots[strength] + sum(parts[strength].values()))
    # Fresh draws: those that chose λ would make it look better than it is.
    rates = posterior.error_rates(best, int(options["draws"]), around.seed + 1)
    stderr = float(rates.std()) / math.sqrt(len(rates))
    terms = [
        ("training error of the network", error, 0.0),
        ("(C) its rise under the noise", float(rates.mean()) - error, stderr),
    ]
    terms += [(name, value, 0.0) for name, value in parts[best].items()]
    value = sum(size for _, size, _ in terms)
    story = _story(posterior, best, samples, options)
    story["terms"] = [{"term": name, "value": size, "stderr": noise} for name, size, noise in terms]
    story["grid"] = [
        {"lambda": strength, "error under noise": pilots.get(strength), "rest": sum(rest.values())}
        for strength, rest in parts.items()
    ]
    story |= {"value": value, "stderr": stderr}
    notes = _notes(around, story)
    summed = "terms: " + "; ".join(f"{name} {size:.4g}" for name, size, _ in terms)
    told = story | {"notes": list(notes)}
    return {None: Valued(value, (*notes, summed), True, stderr, "sampled", terms=told)}


def _parts(
    posterior: _Posterior, strength: float, samples: int, options: Mapping[str, Any]
) -> dict[str, float]:
    """Everything but the error rate, divided by λ."""
    count = len(grid_of(samples))
    logarithms = {
        "(B) weights over noise": posterior.divergence(strength),
        f"(B) choice of the scales ({posterior.scale_count})": posterior.choices,
        f"(B) parameters without noise ({posterior.fixed_count})": posterior.fixed,
        "confidence, ln(1/δ)": -math.log(options["delta"]),
        f"choice of λ (out of {count})": math.log(count),
        "Ψ": strength**2 / (PSI[options["psi"]] * samples),
    }
    return {name: value / strength for name, value in logarithms.items()}


def _pilots(
    posterior: _Posterior, parts: Mapping[float, Mapping[str, float]], draws: int, seed: int
) -> dict[float, float]:
    """Error rates under noise for every λ that can still be the best, with the same noise for all."""
    found: dict[float, float] = {}
    least = math.inf
    for strength in sorted(parts, key=lambda strength: sum(parts[strength].values())):
        rest = sum(parts[strength].values())
        if rest >= least:
            break
        found[strength] = float(posterior.error_rates(strength, draws, seed).mean())
        least = min(least, found[strength] + rest)
    return found


def _story(
    posterior: _Posterior, strength: float, samples: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    diagonals = [view.statistics["diagonal"] for view in posterior.around.layers]
    mass = sum(float(diagonal.abs().sum()) for diagonal in diagonals)
    negative = sum(float(diagonal.clamp(max=0).abs().sum()) for diagonal in diagonals)
    return {
        "lambda": strength,
        "delta": float(options["delta"]),
        "sigma": str(options["sigma"]),
        "hyperprior": str(options["hyperprior"]),
        "psi": str(options["psi"]),
        "samples": samples,
        "draws": int(options["draws"]),
        "loss": posterior.around.space.problem.loss.name,
        "expected rise": posterior.expected_rise(strength),
        "clipped": negative / mass if mass > 0 else 0.0,
        "unknown": UNKNOWN,
    }


def _notes(around: Surroundings, story: Mapping[str, Any]) -> tuple[str, ...]:
    notes = [
        f"λ = {story['lambda']:g}, δ = {story['delta']:g}, {story['samples']} samples; noise by "
        f"{story['sigma']} from the curvature of {story['loss']}, {story['clipped']:.1%} of whose mass is "
        "negative and clipped",
        f"not computable and left out: {UNKNOWN}; the number bounds the error of the network with noise",
        f"the surrogate was expected to rise by {story['expected rise']:.4g} under the noise (½ Σ h σ²)",
        f"the standard error is that of {story['draws']} draws of the noise; δ does not cover it",
    ]
    if not any(bool((view.statistics["diagonal"] > 0).any()) for view in around.layers):
        notes.append("no positive curvature anywhere: the noise was chosen as large as the weights, over √λ")
    if story["value"] >= 1:
        notes.append("vacuous: an error rate is never above 1")
    return tuple(notes)


pac_bayes_bound = register_measure(
    Measure(
        name="pac_bayes_bound",
        symbol="L_D(Q)",
        formula="L_S(Q) + (1/λ)(Σ W²/2σ² + ln(choices of σ and λ) + ln(1/δ) + λ²/2m), σ from eq. 17 or 11",
        source="tsuzuku2020, eq. 1–4",
        summary=(
            "An upper bound of the test error of the network with noise on its weights, every term counted; "
            "above 1 for most networks. `flatness.pac_bayes_bound` prints the terms."
        ),
        when=(
            "To see which part of a PAC-Bayes argument is large: the distance of the weights, the number of "
            "scales, the samples, or the error under noise."
        ),
        misleads=(
            "Above 1 it says nothing, and then a smaller value is no better. Below 1 it speaks about the "
            "network with noise: the term (A) that leads back to the network itself cannot be computed. "
            "Measure all layers, on all training data: every parameter outside them costs 22 nats (float32)."
        ),
        levels=("network",),
        invariances=frozenset({"layerwise", "neuronwise", "output"}),
        needs=frozenset({"diagonal"}),
        explore=_bound,
        cost="a few forward passes for each λ that can be the best, and 20 for the chosen one",
        flatness=False,
        **declared(
            {
                "sigma": choice("rows_and_columns", "matrices"),
                "delta": share(0.05, "a probability between 0 and 1"),
                "draws": count(20, 2),
                "hyperprior": choice(*HYPERPRIORS),
                "psi": choice(*PSI),
                **NORMALIZED_LOSS,
            }
        ),
        loss="normalized_cross_entropy",
    )
)
