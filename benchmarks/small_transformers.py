"""How many gradients does it take to know relative flatness and traces of small transformers to 5 %?

A GPT of two blocks (tied head, learned positions, GELU, layer norm), trained for a minute on the bytes of
Python's own standard library, and a vision transformer of two blocks, trained on scikit-learn's digits. The
unit is one gradient of all samples, at its best batch size. Beside it stands Hutchinson's method with one
product for all layers, which gives traces but no relative flatness. Times are CPU times.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/small_transformers.py [--samples 192 --precision 0.05]
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from harness import machine, show
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flatness

MEASURES = ["relative_flatness", "hessian_trace"]


class Block(nn.Module):
    """Attention and a GELU network, each behind a layer norm."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        n, T, width = h.shape
        q, k, v = (
            part.view(n, T, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(h)).chunk(3, -1)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        h = h + self.out(a.transpose(1, 2).reshape(n, T, width))
        return h + self.narrow(F.gelu(self.wide(self.norm2(h))))


class GPT(nn.Module):
    """A causal language model; its head is the table of its tokens if tied."""

    def __init__(
        self, tokens: int, length: int, width: int, blocks: int, heads: int, *, tied: bool = True
    ) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, True) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)
        nn.init.normal_(self.table.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.table(x) + self.places(places))))


class ViT(nn.Module):
    """Patches, a class token, learned positions, and the blocks of a transformer."""

    def __init__(
        self, side: int, patch: int, width: int, blocks: int, heads: int, classes: int, channels: int = 1
    ):
        super().__init__()
        self.embed = nn.Conv2d(channels, width, patch, patch)
        self.first = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.places = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, False) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).flatten(2).mT
        h = torch.cat([self.first.expand(len(h), -1, -1), h], 1) + self.places
        return self.head(self.norm(self.blocks(h))[:, 0])


def text(length: int, samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Pieces of Python's standard library, as bytes, with the bytes that follow."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    joined = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:60])
    stream = torch.frombuffer(bytearray(joined), dtype=torch.uint8).long().clamp(max=127)
    starts = torch.randint(
        len(stream) - length - 1, (samples,), generator=torch.Generator().manual_seed(seed)
    )
    rows = stream[starts[:, None] + torch.arange(length + 1)]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int, size: int = 64) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(1)
    loss = torch.tensor(float("nan"))
    for _ in range(steps):
        rows = torch.randint(len(x), (size,), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[rows]).flatten(0, -2), y[rows].flatten())
        loss.backward()
        optimizer.step()
    model.zero_grad()
    return float(loss.detach())


def problems(samples: int, steps: int) -> dict[str, tuple[nn.Module, Tensor, Tensor, str]]:
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    found = {}
    for name, tied in (("GPT, tied", True), ("GPT, untied", False)):
        gpt = GPT(128, 24, 48, 2, 4, tied=tied)
        x, y = text(24, 20_000)
        loss = train(gpt, x, y, steps)
        found[name] = (gpt.eval(), x[:samples], y[:samples], f"loss {loss:.2f}")
    digits = load_digits()
    x = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
    y = torch.tensor(digits.target)
    vit = ViT(8, 2, 48, 2, 4, 10)
    loss = train(vit, x, y, steps)
    found["ViT"] = (vit.eval(), x[:samples], y[:samples], f"loss {loss:.2f}")
    return found


def gradient_seconds(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """CPU time of one gradient of all samples, at its best batch size."""
    best = float("inf")
    for size in (16, 32, 64, 192):
        for _ in range(3):
            begun = time.process_time()
            for rows in torch.arange(len(x)).split(size):
                F.cross_entropy(model(x[rows]).flatten(0, -2), y[rows].flatten()).backward()
            best = min(best, time.process_time() - begun)
            model.zero_grad()
    return best


def hutchinson_seconds(
    model: nn.Module, x: Tensor, y: Tensor, traces: dict[str, float], precision: float, probes: int = 24
) -> float:
    """CPU time of Hutchinson's method to the same precision: v ∘ Hv of all weights from one product.

    Its error is seen over some products and carried on as 1/√k, to that of the worst layer.
    """
    weights = {name: model.get_submodule(name).weight for name in traces}
    loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
    generator = torch.Generator().manual_seed(0)
    seen = []
    begun = time.process_time()
    slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    for _ in range(probes):
        v = [
            torch.randint(0, 2, w.shape, generator=generator).to(w).mul_(2).sub_(1) for w in weights.values()
        ]
        products = torch.autograd.grad(slopes, list(weights.values()), v, retain_graph=True)
        seen.append([float((one * other).sum()) for one, other in zip(v, products, strict=True)])
    each = (time.process_time() - begun) / probes
    spread = torch.tensor(seen).std(0) / torch.tensor(list(traces.values()))
    return each * float((spread.max() / precision).square())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=192)
    parser.add_argument("--precision", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    rows = []
    for name, (model, x, y, state) in problems(given.samples, given.steps).items():
        asked = {"precision": given.precision, "progress": False}
        unit = gradient_seconds(model, x, y)
        begun = time.process_time()
        report = flatness.measure(model, (x, y), measures=MEASURES, **asked)
        spent = time.process_time() - begun
        part = flatness.measure(model, (x, y), measures=MEASURES, curvature="gauss_newton", **asked)
        layers = [row for row in report.results if row.level == "layer"]
        sizes = {
            (row.measure, row.layer): max(abs(row.value), part.value(row.measure, layer=row.layer))
            for row in layers
        }
        worst = max(row.stderr / sizes[row.measure, row.layer] for row in layers)
        traces = {layer: size for (measure, layer), size in sizes.items() if measure == "hessian_trace"}
        with sdpa_kernel(SDPBackend.MATH):
            plain = hutchinson_seconds(model, x, y, traces, given.precision)
        rows += [
            (f"{name}: {state}", f"{unit * 1e3:.0f} ms a gradient"),
            ("flatness, relative flatness and traces", f"{spent:.1f} s, worst layer {worst:.1%}"),
            ("Hutchinson, traces alone, extrapolated", f"{plain:.1f} s"),
            ("**gradients** (bar 60)", f"**{spent / unit:.0f}**"),
            ("**times faster than Hutchinson**", f"**{plain / spent:.1f}**"),
        ]
    show(f"{machine(torch.device('cpu'))}, n = {given.samples}", ["", "to 5 %"], rows)


if __name__ == "__main__":
    main()
