"""Does training with a flatness penalty close the generalisation gap? Plain, penalised and SAM, five seeds.

A network is trained on a part of CIFAR-10 with SGD: as it is, with ``flatness.penalty`` of the last layer at
four strengths, and with sharpness-aware minimisation (Foret et al. 2021, ρ = 0.05). ResNet-18 trains in
bfloat16 with the penalty in float32; everything is measured in float32 and evaluation mode. Every finished
network is a row of a CSV file and is not trained again, so that the study goes on where it was stopped.

    python benchmarks/penalty_study.py penalty-lenet5.csv --data DIR
    python benchmarks/penalty_study.py penalty-resnet18.csv --data DIR --model resnet18 --device cuda --jobs 5
"""

from __future__ import annotations

import argparse
import csv
import functools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flatness
from flatness.data import load
from flatness.errors import NotFiniteError
from flatness.models import lenet5, resnet18
from flatness.study.training.augmentation import moved

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1)
ARMS = ("plain", *(f"penalty {strength:g}" for strength in STRENGTHS), "SAM")
RADIUS = 0.05  # SAM's ρ
FIGURES = {
    "relative_flatness": "{:.3g} ± {:.2g}",
    "all_layers": "{:,.0f} ± {:,.0f}",
    "hessian_trace": "{:.3g} ± {:.2g}",
    "gap": "{:.2f} ± {:.2f}",
    "train_loss": "{:.3f} ± {:.3f}",
    "test_loss": "{:.2f} ± {:.2f}",
    "train_accuracy": "{:.1f} ± {:.1f} %",
    "test_accuracy": "{:.1f} ± {:.1f} %",
}

Data = tuple[Tensor, Tensor]


class Recipe(NamedTuple):
    """How a network is trained by default."""

    build: Callable[..., nn.Module]
    samples: int
    batch: int
    rate: float
    mixed: bool


RECIPES = {
    "lenet5": Recipe(lenet5, 5_000, 64, 0.03, False),
    "resnet18": Recipe(resnet18, 10_000, 128, 0.05, True),
}


# Training


def gradient(model: nn.Module, x: Tensor, y: Tensor, arm: str, mixed: bool) -> None:
    """Leave the gradient of one training step in the parameters."""
    loss(model, x, y, arm, mixed).backward()
    if arm == "SAM":
        with climbed(model):
            model.zero_grad()
            loss(model, x, y, arm, mixed).backward()


def loss(model: nn.Module, x: Tensor, y: Tensor, arm: str, mixed: bool) -> Tensor:
    """What is made small, in an autocast of its own: one keeps its copies of weights, which SAM moves."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=mixed):
        if not arm.startswith("penalty"):
            return F.cross_entropy(model(x), y)
        value, output = flatness.penalty(model, (x, y), return_output=True)
        return F.cross_entropy(output, y) + float(arm.split()[1]) * value


@contextmanager
def climbed(model: nn.Module) -> Iterator[None]:
    """All parameters ρ along the normalised gradient; what runs there leaves the running statistics alone."""
    own = [(parameter, parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    length = torch.stack([slope.norm() for _, slope in own]).norm()
    steps = [(parameter, slope * (RADIUS / length)) for parameter, slope in own]
    with torch.no_grad():
        for parameter, step in steps:
            parameter.add_(step)
    for norm in norms:
        norm.momentum = 0.0
    yield
    for norm in norms:
        norm.momentum = 0.1
    with torch.no_grad():
        for parameter, step in steps:
            parameter.sub_(step)


def augmented(x: Tensor, random: torch.Generator) -> Tensor:
    """Every image shifted by up to four pixels and perhaps mirrored."""
    top, left, turn = (torch.randint(high, (len(x), 1), generator=random)[:, 0] for high in (9, 9, 2))
    return moved(x, ((9 * top + left) * 2 + turn).to(x.device))


def train(model: nn.Module, x: Tensor, y: Tensor, arm: str, seed: int, given: argparse.Namespace) -> None:
    """SGD with momentum, the rate falling along a cosine to zero."""
    optimizer = torch.optim.SGD(model.parameters(), lr=given.rate, momentum=0.9)
    random = torch.Generator().manual_seed(seed)
    steps = given.epochs * -(-len(x) // given.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(given.epochs):
        for rows in torch.randperm(len(x), generator=random).to(x.device).split(given.batch):
            optimizer.zero_grad()
            images = augmented(x[rows], random) if given.augment else x[rows]
            gradient(model, images, y[rows], arm, RECIPES[given.model].mixed)
            optimizer.step()
            schedule.step()


# Measuring


@torch.no_grad()
def risk(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Mean loss and accuracy in evaluation mode."""
    model.eval()
    outputs = torch.cat([model(part) for part in x.split(1000)])
    return F.cross_entropy(outputs, y).item(), (outputs.argmax(1) == y).double().mean().item()


def measured(model: nn.Module, data: Data, test: Data, few: int) -> dict[str, float]:
    """Flatness on the training images, all layers on the first few of them, and the gap to test images."""
    train_loss, train_accuracy = risk(model, *data)
    test_loss, test_accuracy = risk(model, *test)
    asked: dict[str, Any] = {"measures": ["relative_flatness", "hessian_trace"], "progress": False}
    last = flatness.measure(model, data, layers="last", **asked)
    (layer,) = last.layers()
    every = flatness.measure(model, tuple(part[:few] for part in data), batch_size=min(few, 128), **asked)
    return {
        "relative_flatness": last.value("relative_flatness", layer=layer),
        "all_layers": sum(every.value("relative_flatness", layer=name) for name in every.layers()),
        "hessian_trace": last.value("hessian_trace", layer=layer),
        "gap": test_loss - train_loss,
        "train_loss": train_loss,
        "test_loss": test_loss,
        "train_accuracy": train_accuracy,
        "test_accuracy": test_accuracy,
    }


@functools.cache
def images(split: str, limit: int | None, folder: Path | None, device: str) -> Data:
    """Standardised images and labels on the device."""
    found = load("cifar10", split=split, data_dir=folder, limit=limit, standardize=True)
    return found.inputs.to(device), found.targets.to(device)


def one_run(task: tuple[int, str, argparse.Namespace, float]) -> dict[str, Any] | None:
    """Train and measure one network; None when the time is up, or the GPU failed.

    The row of a network that diverges has no numbers.
    """
    seed, arm, given, until = task
    if time.time() > until:
        return None
    torch.set_num_threads(1)
    # In float32 convolutions are to be float32; those of training in bfloat16 pick their algorithm by trial.
    torch.backends.cudnn.allow_tf32 = False
    data = images("train", given.samples, given.data, given.device)
    test = images("test", given.test_samples, given.data, given.device)
    build, mixed = RECIPES[given.model].build, RECIPES[given.model].mixed
    model = build(seed=seed, **given.options).to(given.device).to(memory_format=torch.channels_last)
    started = time.perf_counter()
    try:
        torch.backends.cudnn.benchmark = mixed
        train(model, *data, arm, seed, given)
        torch.backends.cudnn.benchmark = False
        record = measured(model, data, test, given.few)
    except NotFiniteError:
        record = {}
    except RuntimeError as error:
        print(arm, seed, error, flush=True)
        return None
    return {"arm": arm, "seed": seed, **record, "seconds": round(time.perf_counter() - started, 1)}


# Reporting


def append(path: Path, record: dict[str, Any]) -> None:
    """One more row of a table that may not be there yet."""
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        rows = csv.DictWriter(file, ("arm", "seed", *FIGURES, "seconds"))
        if fresh:
            rows.writeheader()
        rows.writerow(record)


def table(found: pd.DataFrame) -> str:
    """Mean ± standard deviation over seeds, a row per arm, as Markdown.

    "Against plain" are points of test accuracy: the mean over pairs of one seed and its standard error.
    """
    shown = [name for name in FIGURES if name in found]
    lines = [f"| | networks | {' | '.join(name.replace('_', ' ') for name in shown)} | against plain |"]
    lines.append("|" + "---|" * (len(shown) + 3))
    rates = ["train_accuracy", "test_accuracy"]
    found = found.assign(**{name: 100 * found[name] for name in rates})
    plain = found[found["arm"] == "plain"].set_index("seed")["test_accuracy"]
    for arm in [arm for arm in ARMS if arm in set(found["arm"])]:
        own = found[found["arm"] == arm].set_index("seed")
        cells = [str(len(own)), *(spread(FIGURES[name], own[name].dropna()) for name in shown)]
        pairs = (own["test_accuracy"] - plain).dropna()
        cells.append("" if arm == "plain" else spread("{:+.1f} ± {:.1f}", pairs, pairs.sem()))
        lines.append(f"| {arm.replace('y ', 'y × ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(written: str, values: pd.Series, error: float | None = None) -> str:
    """Mean ± standard deviation, or another error; nothing to add to a single value."""
    if values.empty:
        return "diverged"
    text = written.format(values.mean(), values.std() if error is None else error)
    return text if len(values) > 1 else text.split(" ±")[0]


def draw(found: pd.DataFrame, path: Path, title: str) -> None:
    """The gap over relative flatness, a mark per network."""
    from flatness.show.charts import Chart, Mark
    from flatness.show.plots.charts import save_chart

    series: dict[str, list[Any]] = {}
    found = found.dropna()
    for arm in [arm for arm in ARMS if arm in set(found["arm"])]:
        own = found[found["arm"] == arm]
        series[arm] = [Mark(*mark) for mark in zip(own["relative_flatness"], own["gap"], strict=True)]
    chart = Chart(title, "relative flatness of the last layer", "test loss − training loss", series)
    save_chart(path, chart)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("csv", type=Path, help="a row per network")
    parser.add_argument("--data", type=Path, help="folder that holds cifar-10-batches-bin")
    parser.add_argument("--model", choices=RECIPES, default="lenet5")
    parser.add_argument("--width", type=int, help="channels of ResNet-18's first stage, by default 64")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="networks at the same time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which none is begun")
    parser.add_argument("--samples", type=int, help="training images, the first ones")
    parser.add_argument("--test-samples", type=int, help="test images; default: all")
    parser.add_argument("--few", type=int, default=500, help="training images to measure all layers on")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--augment", action="store_true", help="crop and mirror the training images")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=ARMS)
    parser.add_argument("--picture", type=Path, help="where to draw the gap over relative flatness")
    given = parser.parse_args()
    for name in ("samples", "batch", "rate"):
        if getattr(given, name) is None:
            setattr(given, name, getattr(RECIPES[given.model], name))
    given.options = {} if given.width is None else {"width": given.width}
    return given


def main() -> None:
    given = arguments()
    until = time.time() + 60 * given.minutes
    done = pd.read_csv(given.csv)[["seed", "arm"]].to_numpy().tolist() if given.csv.exists() else []
    runs = [(seed, arm) for seed in range(given.seeds) for arm in given.arms if [seed, arm] not in done]
    # A process per network: an error of the GPU ends with it.
    with multiprocessing.get_context("spawn").Pool(given.jobs, maxtasksperchild=1) as pool:
        for record in pool.imap_unordered(one_run, [(*run, given, until) for run in runs]):
            if record is not None:
                append(given.csv, record)
                print(*(f"{value:.4g}" if isinstance(value, float) else value for value in record.values()))
    found = pd.read_csv(given.csv)
    print(f"{len(found)} networks\n\n{table(found)}", flush=True)
    if given.picture:
        draw(found, given.picture, f"{given.model} on {given.samples:,} images of CIFAR-10")


if __name__ == "__main__":
    main()
