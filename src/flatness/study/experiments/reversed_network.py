"""A random feature extractor with given features: inputs by reverse propagation (petzka2021, App. C.1).

Features z in feature space are given, φ = tanh∘W₄∘…∘tanh∘W₁ is random, and inputs x with φ(x) = z are
wanted. From the last layer back: z′ = artanh(z), then the shortest x with W x + b = z′. What leaves (−1, 1)
on the way has no artanh and is clipped, "a small error"; features are therefore scaled down first (`SCALE`),
and the weights of ψ up by the same factor, which changes neither ψ∘φ nor its relative flatness.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatness.generalization.fitting import LinearPredictor
from flatness.measuring.measure import measure
from flatness.zoo.models import initialize, petzka2021_synthetic

SCALE = 0.25
"""The largest feature, in absolute value, after scaling."""

_INSIDE = 1 - 1e-6


@dataclass(frozen=True)
class ReversedNetwork:
    """f = ψ∘φ and inputs whose features are the given ones.

    Attributes:
        model: The network 784-512-128-16-8-2, in float32.
        inputs: x, (n, 784).
        outputs: f(x), (n, 2).
        error: The largest |φ(x) − z|, relative to the largest |z|.
    """

    model: nn.Sequential
    inputs: Tensor
    outputs: Tensor
    error: float

    def relative_flatness(self, y: Tensor) -> float:
        """Of ψ at the first inputs, which have the labels y = ±1 (n, 1), as `flatness.measure` has it."""
        data = (self.inputs[: len(y)], torch.cat([y, -y], dim=1).float())
        report = measure(self.model, data, "mse", measures="relative_flatness", layers="fc5", progress=False)
        return report.value("relative_flatness", layer="fc5")


def reversed_network(z: Tensor, predictor: LinearPredictor, seed: int) -> ReversedNetwork:
    """Build f = ψ∘φ with a random φ, and inputs with φ(x) = z up to scaling.

    The layer 8 → 2 has the rows ±w of ψ, so that torch's mean squared error of its two outputs against (y,
    −y) is the squared error of ψ against y = ±1.
    """
    factor = SCALE / float(z.abs().max())
    model = petzka2021_synthetic(classes=2)
    initialize(model, "xavier_normal", seed)
    layers = [module for module in model if isinstance(module, nn.Linear)]
    scaled = (z * factor).float()
    with torch.no_grad():
        head = layers.pop()
        rows = torch.cat([predictor.weight, -predictor.weight]) / factor
        head.weight.copy_(rows)
        head.bias.copy_(torch.cat([predictor.bias, -predictor.bias]))
        x = scaled
        for layer in reversed(layers):
            x = _shortest_solution(layer.weight, torch.atanh(x.clamp(-_INSIDE, _INSIDE)) - layer.bias)
        features = model[:-1](x)
        outputs = head(features)
    error = float((features - scaled).abs().max()) / SCALE
    return ReversedNetwork(model.eval(), x, outputs, error)


def _shortest_solution(W: Tensor, right: Tensor) -> Tensor:
    """The shortest rows x with W x = right: Wᵀ(WWᵀ)⁻¹ right; W has fewer rows than columns."""
    W64 = W.double()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(W64 @ W64.T))
    return right @ (inverse @ W64).float()
