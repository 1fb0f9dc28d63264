"""Does training with a flatness penalty close the generalisation gap? Plain, penalised and SAM, five seeds.

A network is trained on a part of CIFAR-10 with SGD: as it is, with ``flatness.penalty`` of the last layer at
four strengths, and with sharpness-aware minimisation (Foret et al. 2021, ρ = 0.05). Every run writes one file
into --out and is skipped when that is there, so that the study goes on where it was stopped.

    python benchmarks/penalty_study.py --data DIR --out penalty-lenet5
    python benchmarks/penalty_study.py --data DIR --out penalty-resnet18 --model resnet18 --device cuda
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flatness
from flatness.data import load
from flatness.files import json_text, write_text
from flatness.models import lenet5, resnet18

MODELS = {"lenet5": lenet5, "resnet18": resnet18}
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1)
ARMS = ("plain", *(f"penalty {strength:g}" for strength in STRENGTHS), "SAM")
RADIUS = 0.05  # SAM's ρ
FIGURES = ("relative_flatness", "gap", "test_accuracy", "train_accuracy", "test_loss")


def gradient(model: nn.Module, x: Tensor, y: Tensor, arm: str) -> None:
    """Leave the gradient of one training step in the parameters."""
    if arm.startswith("penalty"):
        value, output = flatness.penalty(model, (x, y), return_output=True)
        (F.cross_entropy(output, y) + float(arm.split()[1]) * value).backward()
        return
    F.cross_entropy(model(x), y).backward()
    if arm == "SAM":
        climbed = climb(model)
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for parameter, step in climbed:
                parameter.sub_(step)


@torch.no_grad()
def climb(model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """Move every parameter by ρ along the normalised gradient; what was added to each."""
    own = [(parameter, parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    length = torch.stack([slope.norm() for _, slope in own]).norm()
    steps = [(parameter, slope * (RADIUS / length)) for parameter, slope in own]
    for parameter, step in steps:
        parameter.add_(step)
    return steps


def train(model: nn.Module, x: Tensor, y: Tensor, arm: str, given: argparse.Namespace, seed: int) -> None:
    """SGD with momentum, the rate falling along a cosine to zero."""
    optimizer = torch.optim.SGD(model.parameters(), lr=given.rate, momentum=0.9)
    order = torch.Generator().manual_seed(seed)
    steps = given.epochs * -(-len(x) // given.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(given.epochs):
        model.train()
        for rows in torch.randperm(len(x), generator=order).split(given.batch):
            optimizer.zero_grad()
            gradient(model, x[rows], y[rows], arm)
            optimizer.step()
            schedule.step()


@torch.no_grad()
def risk(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Mean loss and accuracy in evaluation mode."""
    model.eval()
    outputs = torch.cat([model(part) for part in x.split(1000)])
    return F.cross_entropy(outputs, y).item(), (outputs.argmax(1) == y).double().mean().item()


def one_run(arm: str, seed: int, given: argparse.Namespace, data: dict[str, tuple[Tensor, Tensor]]) -> Any:
    """Train and measure one network."""
    model = MODELS[given.model](seed=seed).to(given.device)
    started = time.perf_counter()
    train(model, *data["train"], arm, given, seed)
    seconds = time.perf_counter() - started
    train_loss, train_accuracy = risk(model, *data["train"])
    test_loss, test_accuracy = risk(model, *data["test"])
    asked = {"measures": ["relative_flatness", "hessian_trace"], "layers": "last", "progress": False}
    report = flatness.measure(model, data["train"], **asked)
    (layer,) = report.layers()
    return {
        "arm": arm,
        "seed": seed,
        "relative_flatness": report.value("relative_flatness", layer=layer),
        "hessian_trace": report.value("hessian_trace", layer=layer),
        "gap": test_loss - train_loss,
        "train_loss": train_loss,
        "test_loss": test_loss,
        "train_accuracy": train_accuracy,
        "test_accuracy": test_accuracy,
        "seconds": seconds,
    }


def records(out: Path) -> list[dict[str, Any]]:
    """What was recorded so far."""
    return [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]


def table(found: Iterable[dict[str, Any]]) -> str:
    """Mean and standard deviation over seeds, a row per arm, as Markdown."""
    found = list(found)
    lines = [f"| | seeds | {' | '.join(FIGURES)} |", "|---|---|" + "---|" * len(FIGURES)]
    for arm in ARMS:
        own = [record for record in found if record["arm"] == arm]
        if own:
            cells = [spread([record[key] for record in own]) for key in FIGURES]
            lines.append(f"| {arm} | {len(own)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """Mean ± standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.4g} ± {deviation:.2g}"


def draw(found: Iterable[dict[str, Any]], path: Path, title: str) -> None:
    """The gap over relative flatness, a mark per network."""
    from flatness.show.charts import Chart, Mark
    from flatness.show.plots.charts import save_chart

    series: dict[str, list[Any]] = {}
    for record in sorted(found, key=lambda record: ARMS.index(record["arm"])):
        mark = (record["relative_flatness"], record["gap"])
        series.setdefault(record["arm"], []).append(Mark(*mark))
    chart = Chart(title, "relative flatness of the last layer", "test loss − training loss", series)
    save_chart(path, chart)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder that holds cifar-10-batches-bin")
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--model", choices=MODELS, default="lenet5")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=5_000, help="training images, the first ones")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0.03)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=ARMS)
    parser.add_argument("--picture", type=Path, help="where to draw the gap over relative flatness")
    parser.add_argument("--csv", type=Path, help="where to write a row per network")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    data = {}
    for split, limit in (("train", given.samples), ("test", None)):
        found = load("cifar10", split=split, data_dir=given.data, limit=limit, standardize=True)
        data[split] = (found.inputs.to(given.device), found.targets.to(given.device))
    for seed in range(given.seeds):
        for arm in given.arms:
            path = given.out / f"{arm.replace(' ', '-')}-{seed}.json"
            if not path.exists():
                record = one_run(arm, seed, given, data)
                write_text(path, json_text(record, indent=1))
                print(arm, seed, {key: round(record[key], 4) for key in FIGURES}, flush=True)
    print(table(records(given.out)))
    if given.csv:
        pd.DataFrame(records(given.out)).drop(columns="seconds").to_csv(given.csv, index=False)
    if given.picture:
        draw(records(given.out), given.picture, f"{given.model} on {given.samples:,} images of CIFAR-10")


if __name__ == "__main__":
    main()
