"""What do all one-pass statistics of all layers cost, beside the Hessian's diagonal alone with BackPACK?

LeNet-5 on images of CIFAR-10's shape, cross-entropy. "All statistics" are those behind every default
measure, biases included, and the diagonal of every weight. BackPACK's DiagGGNExact, summed over the same
data, gives that diagonal. The unit beside it is one gradient evaluation, forward and backward over the data.
Each runs in its best batch size, flatness also as it chooses by itself.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from harness import (
    arguments,
    batches_of,
    best_batch,
    close,
    duration,
    full_precision,
    image_problem,
    machine,
    peer,
    race,
    show,
)
from torch import Tensor, nn

import flatness

ONE_PASS = frozenset({"diagonal", "row_traces", "relative", "relative_normalized", "outgoing", "incoming"})
found: dict[str, Tensor] = {}


def keep_diagonal(view: flatness.LayerView) -> float:
    found[view.name] = view.statistics["diagonal"]
    return float(found[view.name].sum())


def register(name: str, needs: frozenset[str]) -> None:
    flatness.register_measure(
        flatness.Measure(
            name=name,
            symbol="diag H",
            formula="Σ_ij ∂²E/∂W_ij²",
            source="benchmark",
            summary="Keeps the diagonal it is computed from.",
            levels=("layer",),
            needs=needs,
            layer=keep_diagonal,
        ),
        replace=True,
    )


def all_statistics(model: nn.Module, x: Tensor, y: Tensor, size: int | None = None) -> dict[str, Tensor]:
    register("every_statistic", ONE_PASS)
    flatness.measure(model, (x, y), batch_size=size, progress=False)
    return dict(found)


def diagonal(model: nn.Module, x: Tensor, y: Tensor, size: int | None = None) -> dict[str, Tensor]:
    register("only_diagonal", frozenset({"diagonal"}))
    flatness.measure(model, (x, y), measures="only_diagonal", batch_size=size, progress=False)
    return dict(found)


def gradient(model: nn.Module, x: Tensor, y: Tensor, size: int) -> None:
    model.zero_grad()
    for inputs, targets in batches_of(x, y, size):
        (F.cross_entropy(model(inputs), targets, reduction="sum") / len(x)).backward()
    model.zero_grad()


class BackpackDiagonal:
    """The diagonal by BackPACK, on a copy of the model."""

    def __init__(self, backpack: Any, model: nn.Module) -> None:
        from backpack.extensions import DiagGGNExact

        self.backpack, self.extension = backpack, DiagGGNExact
        self.model = backpack.extend(copy.deepcopy(model))
        self.loss = backpack.extend(nn.CrossEntropyLoss(reduction="sum"))

    def __call__(self, x: Tensor, y: Tensor, size: int) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for inputs, targets in batches_of(x, y, size):
            with warnings.catch_warnings(), self.backpack.backpack(self.extension()):
                warnings.simplefilter("ignore")  # about hooks on a model whose input needs no gradient
                self.loss(self.model(inputs), targets).backward()
            for name, parameter in self.model.named_parameters():
                part = parameter.diag_ggn_exact / len(x)
                total[name] = total[name] + part if name in total else part
                del parameter.diag_ggn_exact
                parameter.grad = None
        return total


def run(device: torch.device, samples: int) -> dict[str, Any]:
    full_precision()
    model, x, y = image_problem(samples, device)
    own = best_batch(lambda size: all_statistics(model, x, y, size), samples, device, turns=2)
    step = best_batch(lambda size: gradient(model, x, y, size), samples, device)
    contenders = {
        "flatness, all statistics": lambda: all_statistics(model, x, y),
        f"flatness, all statistics, batches of {own:,}": lambda: all_statistics(model, x, y, own),
        "flatness, the diagonal alone": lambda: diagonal(model, x, y),
        f"one gradient evaluation, batches of {step:,}": lambda: gradient(model, x, y, step),
    }
    backpack, rival = peer("backpack"), None
    if backpack is not None:
        by_backpack = BackpackDiagonal(backpack, model)
        size = best_batch(lambda size: by_backpack(x, y, size), samples, device, turns=2)
        rival = f"BackPACK, the diagonal alone, batches of {size:,}"
        contenders[rival] = lambda: by_backpack(x, y, size)
        expected = by_backpack(x, y, size)
        for way in (all_statistics, diagonal):
            for name, value in way(model, x, y).items():
                weight = expected[f"{name}.weight"].flatten(1)
                close(f"diagonal of {name}", value.reshape(weight.shape), weight)
    times = race(contenders, device, turns=6, budget=12.0)
    seconds = {name: t.best for name, t in times.items()}
    everything, _, alone, unit = (seconds[name] for name in list(contenders)[:4])
    show(
        f"All layers of LeNet-5, n = {samples:,} ({machine(device)})",
        ("", "best", "median", "in gradient evaluations"),
        [(name, duration(t.best), duration(t.median), f"{t.best / unit:.2f}") for name, t in times.items()],
    )
    ratio = everything / seconds[rival] if rival else None
    against = f"{ratio:.2f} times BackPACK's diagonal (bar 1.2), " if ratio else ""
    diagonals = f"; diagonal alone {alone / seconds[rival]:.2f} times" if rival else ""
    absolute = f"; {everything:.2f} s (bar 1.0 s for n = 50,000)" if device.type == "cuda" else ""
    print(f"ratio: {against}{everything / unit:.1f} gradient evaluations (bar 12){diagonals}{absolute}")
    return {"seconds": seconds, "times BackPACK": ratio, "gradient evaluations": everything / unit}


if __name__ == "__main__":
    given = arguments(__doc__, cpu=2_000, cuda=50_000)
    run(given.device, given.samples)
