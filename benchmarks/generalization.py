"""How well does Theorem 5 hold, and what do representativeness and the grid of petzka2021's Fig. 3 cost?

Theorem 5 is about the ratio of feature robustness, averaged over orthogonal matrices, and δ²κ_Tr/(2m), at δ
= 0.01. Three networks on scikit-learn's digits, trained here: the ratio must be 1 on last layers and on
hidden layers of smooth networks; on hidden ReLU layers kinks add to it. The grid of Fig. 3 takes minutes: it
is timed on a part of it unless --full is given.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

import torch
from harness import duration, machine, race, show
from sklearn.datasets import load_digits
from torch import Tensor, nn

import flatness
from flatness.generalization.fitting import Ridge
from flatness.generalization.kernels import kernel_of
from flatness.generalization.representativeness import cross_validated
from flatness.losses import resolve_loss
from flatness.study.experiments.four_gaussians import FourGaussians
from flatness.study.experiments.petzka2021_labels import SEPARATIONS
from flatness.zoo.models import mlp

CPU = torch.device("cpu")


def trained(activation: str, sizes: tuple[int, ...], x: Tensor, y: Tensor) -> nn.Module:
    """SGD until the loss is about 0.05."""
    model = mlp(sizes, activation=activation, seed=0)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        for part in torch.randperm(len(x), generator=generator).split(32):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimiser.step()
        with torch.no_grad():
            if nn.functional.cross_entropy(model(x), y) < 0.05:
                break
    return model.eval().double()


def theorem_5(pairs: int) -> None:
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16).float()[:600], torch.tensor(digits.target)[:600]
    rows = []
    for activation, sizes in (("relu", (64, 32, 10)), ("tanh", (64, 32, 10)), ("relu", (64, 24, 16, 10))):
        model = trained(activation, sizes, x, y)
        names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        for name in names[::-1]:
            found = flatness.feature_robustness(
                model, (x.double(), y), layer=name, delta=0.01, matrices=pairs, steps=1, progress=False
            )
            label = f"{activation} {'-'.join(map(str, sizes))}, {name}"
            share = "–" if found.kink_share is None else f"{100 * found.kink_share:.1f} %"
            rows.append((label, f"{found.ratio:.3f} ± {found.ratio_stderr:.3f}", share))
    show(
        f"Theorem 5 at δ = 0.01, {pairs} pairs (bar 1.00 ± 0.02 on last and smooth hidden layers)",
        ("layer", "ratio", "kinks"),
        rows,
    )


def representativeness() -> None:
    z, y = FourGaussians.draw(1.0, 0).sample(600, 0)
    loss = resolve_loss("squared_error")

    def run(name: str) -> None:
        cross_validated(z, y, Ridge(), loss, kernel=kernel_of(name), delta=0.1, folds=3, draws=100)

    names = ("uniform", "epanechnikov", "truncated_normal")
    times = race({name: (lambda name=name: run(name)) for name in names}, CPU)
    rows = [(name, duration(timing.best), duration(timing.median)) for name, timing in times.items()]
    show(
        "Representativeness, n = 600, m = 8, 3 folds, 100 draws (bar 0.2 s)",
        ("kernel", "best", "median"),
        rows,
    )


def grid(full: bool, jobs: int) -> None:
    datasets = 100 if full else 4
    before, started = os.times(), time.perf_counter()
    spec = {"experiment": {"name": "petzka2021_labels", "datasets": datasets}}
    with tempfile.TemporaryDirectory() as folder:
        flatness.study.run(spec, folder, jobs=jobs, progress=False)
    taken = time.perf_counter() - started
    after = os.times()
    cpu = sum(after[i] - before[i] for i in range(4))
    scale = 100 / datasets
    cells = (f"{len(SEPARATIONS)} × {datasets}", duration(taken), duration(cpu), duration(scale * cpu / 2))
    # CPU time counts this process only; with several, the wall clock is what there is.
    title = f"Fig. 3, {jobs} process{'es' * (jobs > 1)} (bar 600 s on two cores)"
    show(title, ("data sets", "wall", "CPU", "whole grid on two idle cores"), [cells])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="the whole grid of Fig. 3")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=4000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(machine(CPU))
    representativeness()
    grid(given.full, given.jobs)
    theorem_5(given.pairs)


if __name__ == "__main__":
    main()
