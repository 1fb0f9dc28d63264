"""The demo's networks: trained in different ways to the same loss, and measured."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatness.measuring.measure import measure
from flatness.problem.progress import ProgressBar
from flatness.report.report import Report
from flatness.zoo.data import Dataset
from flatness.zoo.models import mlp

SIZES = (64, 64, 32, 10)
TARGET = 0.02
"""Training loss at which every network stops."""
_MOST_STEPS = 8000
_CHECK_EVERY = 10


@dataclass(frozen=True)
class Setting:
    """How a network is trained: plain SGD with momentum 0.9."""

    name: str
    batch: int
    learning_rate: float
    random_labels: float = 0.0


SETTINGS = (
    Setting("batch 8", 8, 0.02),
    Setting("batch 32", 32, 0.05),
    Setting("batch 128", 128, 0.1),
    Setting("batch 512", 512, 0.1),
    Setting("full batch", 1438, 0.1),
    Setting("10 % random labels", 64, 0.1, random_labels=0.1),
)


def train_and_measure(
    train: Dataset, test: Dataset, seeds: int
) -> tuple[dict[str, nn.Module], dict[str, Report]]:
    """Networks and their reports by name, for every setting and seed."""
    networks: dict[str, nn.Module] = {}
    reports: dict[str, Report] = {}
    runs = list(itertools.product(SETTINGS, range(seeds)))
    with one_thread(), ProgressBar("training and measuring", len(runs), enabled=True) as bar:
        for setting, seed in runs:
            name = f"{setting.name}, seed {seed}"
            labels = _labels(train.targets, setting, seed)
            networks[name] = _trained(train.inputs, labels, setting, seed)
            reports[name] = _measured(networks[name], (train.inputs, labels), test, setting, seed)
            bar.advance()
    return networks, reports


@contextmanager
def one_thread() -> Iterator[None]:
    """Networks this small train fastest on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _labels(labels: Tensor, setting: Setting, seed: int) -> Tensor:
    """The labels, a share of them replaced by random ones."""
    generator = torch.Generator().manual_seed(seed)
    count = int(setting.random_labels * len(labels))
    chosen = torch.randperm(len(labels), generator=generator)[:count]
    return labels.index_copy(0, chosen, torch.randint(10, (count,), generator=generator))


def _trained(inputs: Tensor, labels: Tensor, setting: Setting, seed: int) -> nn.Module:
    """A network trained until its loss on all training data is below `TARGET`."""
    model = mlp(SIZES, seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), setting.learning_rate, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    steps = 0
    while True:
        for batch in torch.randperm(len(inputs), generator=generator).split(setting.batch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
            steps += 1
            if steps % _CHECK_EVERY == 0:
                with torch.no_grad():
                    loss = float(F.cross_entropy(model(inputs), labels))
                if loss < TARGET or steps >= _MOST_STEPS:
                    return model.eval()


def _measured(
    model: nn.Module, data: tuple[Tensor, Tensor], test: Dataset, setting: Setting, seed: int
) -> Report:
    """The report of a network, with its test loss, accuracy and gap among its facts."""
    report = measure(model, data, progress=False)
    with torch.no_grad():
        outputs = model(test.inputs)
        test_risk = float(F.cross_entropy(outputs, test.targets))
        accuracy = float((outputs.argmax(1) == test.targets).float().mean())
    facts = {
        "model": f"mlp {'-'.join(map(str, SIZES))}",
        "data": "digits (train)",
        "setting": setting.name,
        "batch": setting.batch,
        "learning_rate": setting.learning_rate,
        "random_labels": setting.random_labels,
        "training_seed": seed,
        "test_risk": test_risk,
        "test_accuracy": accuracy,
        "gap": test_risk - report.meta["risk"],
    }
    return replace(report, meta={**report.meta, **facts})
