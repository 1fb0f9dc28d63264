"""A training step with a flatness penalty, beside the plain step and double backward by hand.

By hand, as one writes it without this library: with V random signs and L Lᵀ = W Wᵀ, v = L V has
E vᵀHv = Σ ⟨w_s, w_s'⟩ Tr H_ss', relative flatness. ⟨∇E, v⟩ is differentiated once more with its graph. One
draw of v serves the whole batch, and this is of the Hessian, where the penalty is of the Gauss-Newton part;
for ReLU networks in evaluation mode the two have the same mean. Peers (curvlinops, BackPACK) give these
numbers without a gradient. Beside the time stands the noise: the standard deviation of the penalty over 20
draws of its random signs, divided by its mean, on 16 samples in evaluation mode.

    OMP_NUM_THREADS=1 python benchmarks/penalty.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from harness import duration, machine, seconds, show
from small_transformers import GPT
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flatness
from flatness.models import lenet5, resnet18
from flatness.network.layers import find_layers

TOKENS, LENGTH = 1_000, 128


def gpt(seed: int) -> nn.Module:
    """Four blocks of width 256; its positions are looked up once for all samples."""
    torch.manual_seed(seed)
    return GPT(TOKENS, LENGTH, 256, 4, 4, tied=False)


NETWORKS = {"lenet5": (lenet5, 128), "resnet18": (resnet18, 64), "gpt": (gpt, 8)}
STRENGTH = 1e-3
DRAWS = 20

Penalty = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(model, x, y) → (penalty, output)."""


def risk(output: Tensor, y: Tensor) -> Tensor:
    """The mean over images, or over tokens."""
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


def inputs(network: str, n: int) -> tuple[Tensor, Tensor]:
    """Random ones of the right shape."""
    first, second = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
    if network == "gpt":
        x, y = (torch.randint(TOKENS, (n, LENGTH), generator=one) for one in (first, second))
        return x, y
    return torch.randn(n, 3, 32, 32, generator=first), torch.randint(10, (n,), generator=second)


def ours(layers: str | None) -> Penalty:
    """The library's."""

    def value(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return flatness.penalty(model, (x, y), layers=layers, return_output=True)

    return value


def by_hand(layers: slice) -> Penalty:
    """One random direction for all these layers together, two backward passes with a graph."""

    def value(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            output, views = model(x), list(find_layers(model).values())[layers]
        weights = [layer.weight for layer in views]
        gradients = torch.autograd.grad(risk(output, y), weights, create_graph=True)
        directions = []
        for layer in views:
            W = layer.arranged(layer.weight)[0]
            # W U with random signs U (m, m) has E vec(v) vec(v)ᵀ = W Wᵀ ⊗ 1, as L V has.
            signs = torch.randint(0, 2, (W.shape[1], W.shape[1]), device=W.device).to(W) * 2 - 1
            drawn = W @ signs
            directions.append(drawn.T if layer.chooses else drawn.reshape(layer.weight.shape))
        pushed = torch.autograd.grad(gradients, weights, directions, create_graph=True)
        return torch.stack([(h * v).sum() for h, v in zip(pushed, directions, strict=True)]).sum(), output

    return value


def step(model: nn.Module, x: Tensor, y: Tensor, penalty: Penalty | None) -> Callable[[], None]:
    """One step of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def run() -> None:
        optimizer.zero_grad()
        if penalty is None:
            risk(model(x), y).backward()
        else:
            value, output = penalty(model, x, y)
            (risk(output, y) + STRENGTH * value).backward()
        optimizer.step()

    return run


def in_turn(steps: dict[str, Callable[[], None]], device: torch.device, turns: int) -> dict[str, float]:
    """The median time of each; on a CPU the seconds of this process, whatever else runs there."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(turns + 1):
        for name, run in steps.items():
            started = time.process_time()
            passed = seconds(run, device)
            taken[name].append(passed if device.type == "cuda" else time.process_time() - started)
    return {name: statistics.median(durations[1:]) for name, durations in taken.items()}


def noise(model: nn.Module, x: Tensor, y: Tensor, penalty: Penalty) -> float:
    """Standard deviation over draws ÷ mean."""
    values = torch.tensor([penalty(model, x, y)[0].item() for _ in range(DRAWS)], dtype=torch.float64)
    return float(values.std() / values.mean().abs())


def run(network: str, device: torch.device, batch: int | None, turns: int) -> dict[str, float]:
    """Print one network's table; ratios to the plain step by name."""
    build, usual = NETWORKS[network]
    n = batch or usual
    x, y = (part.to(device) for part in inputs(network, n))
    model = build(seed=0).to(device)
    penalties: dict[str, Penalty | None] = {
        "plain step": None,
        "`flatness.penalty`, last layer": ours("last"),
        "by hand, last layer": by_hand(slice(-1, None)),
        "`flatness.penalty`, all layers": ours(None),
        "by hand, all layers": by_hand(slice(None)),
    }
    model.train()
    times = in_turn({name: step(model, x, y, one) for name, one in penalties.items()}, device, turns)
    model = build(seed=0).to(device).eval()
    plain = times["plain step"]
    rows = []
    for name, one in penalties.items():
        scatter = "" if one is None else f"{noise(model, x[:16], y[:16], one):.2g}"
        rows.append((name, duration(times[name]), f"{times[name] / plain:.2f}", scatter))
    show(f"{network}, batches of {n}, {machine(device)}", ("", "time", "÷ plain step", "noise"), rows)
    return {name: taken / plain for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--batch", type=int, help="samples per step, by default 128, 64 and 8")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), help=", ".join(NETWORKS))
    given = parser.parse_args()
    for network in given.networks:
        ratios = run(network, given.device, given.batch, given.turns)
        last, every = (ratios[f"`flatness.penalty`, {which}"] for which in ("last layer", "all layers"))
        print(f"{network}: {last:.2f} plain steps (bar 1.2), all layers {every:.2f} (bar 3)")


if __name__ == "__main__":
    main()
