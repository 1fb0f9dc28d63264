"""Which sharpness sees through the symmetry of attention, and what does each take?

A small transformer on digits (eight rows of eight pixels as a sequence, two layers, four heads), trained in
under a minute, and equal networks whose heads are mixed by random matrices of condition number 2, 5 and 25:
adaptive sharpness moves with them, geodesic sharpness does not, in neither metric. Relative flatness, of the
Gauss-Newton part in closed form, does not notice in the layers of q, k and v; whitened, nowhere.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flatness
from flatness.data import load

ROTATED = (2.0, 5.0, 25.0)
STEPS = 40
# The default radius of adaptive sharpness, and one in which the loss is still nearly quadratic.
RADII = (0.5, 0.05)


class Transformer(nn.Module):
    """Rows of an image, embedded and averaged after two layers of attention."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(8, width), nn.Parameter(0.1 * torch.randn(8, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.embed(x.reshape(len(x), 8, 8)) + self.places
        return self.head(self.norm(self.encoder(rows)).mean(1))


def trained(x: Tensor, y: Tensor, epochs: int) -> tuple[nn.Module, float]:
    torch.manual_seed(0)
    model, started = Transformer(), time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model.double().eval(), time.perf_counter() - started


def sharpness(model: nn.Module, data: tuple[Tensor, Tensor], name: str, **options: Any) -> float:
    report = flatness.measure(model, data, measures=name, options={name: options}, progress=False)
    return report.value(name)


def relative(model: nn.Module, data: tuple[Tensor, Tensor], name: str, part: str) -> float:
    """Summed over the layers of some parts of attention."""
    layers = [
        f"encoder.layers.{number}.self_attn.{key}"
        for number in range(2)
        for key in (letter.replace("o", "out_proj") for letter in part)
    ]
    report = flatness.measure(
        model, data, measures=name, layers=layers, curvature="gauss_newton", progress=False
    )
    return sum(report.value(name, layer=layer) for layer in layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=30)
    asked = parser.parse_args()
    data_set = load("digits", standardize=True)
    x, y = data_set.inputs.flatten(1).float(), torch.as_tensor(data_set.targets)
    model, seconds = trained(x, y, asked.epochs)
    with torch.no_grad():
        risk = float(F.cross_entropy(model(x.double()), y))
    print(f"trained in {seconds:.0f} s to a loss of {risk:.4f}; {asked.samples} samples measured")
    x, y = x[: asked.samples].double(), y[: asked.samples]
    networks = [model] + [
        flatness.rescale(model, x[:8], kind="attention", seed=seed, condition=condition)
        for seed, condition in enumerate(ROTATED)
    ]
    lines: dict[str, Any] = {}
    for rho in RADII:
        of = {"rho": rho, "steps": STEPS}
        lines[f"adaptive sharpness, ρ = {rho:g}"] = (sharpness, "adaptive_sharpness", of)
        for metric in ("mixed", "own"):
            lines[f"geodesic, {metric} metric, ρ = {rho:g}"] = (
                sharpness,
                "geodesic_sharpness",
                of | {"metric": metric},
            )
    for name in ("relative_flatness", "relative_flatness_whitened"):
        for part in ("qkv", "o", "qkvo"):
            lines[f"{name}, {' '.join(part)}"] = (relative, name, {"part": part})
    print(f"\n| | as trained | {' | '.join(f'condition {c:g}' for c in ROTATED)} | drift | s |")
    print("|---|---|" + "---|" * (len(ROTATED) + 2))
    for label, (work, name, options) in lines.items():
        values, times = [], []
        for network in networks:
            started = time.process_time()
            values.append(work(network, (x, y), name, **options))
            times.append(time.process_time() - started)
        drift = max(abs(value / values[0] - 1) for value in values)
        cells = " | ".join(f"{value:.6g}" for value in values)
        print(f"| {label} | {cells} | {drift:.1e} | {min(times):.2f} |", flush=True)


if __name__ == "__main__":
    main()
