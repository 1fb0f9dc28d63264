"""petzka2021, Fig. 4: representativeness + flatness against the generalisation gap, over class separation.

n = 600 samples, 3 folds, δ = 0.1, ridge ψ. Beside the paper's formula stands what its published script
computes, which is another quantity (see `published_script_bound`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import joblib
import numpy as np
import torch
from torch import Tensor

from flatness.experiments.four_gaussians import FourGaussians
from flatness.experiments.reversed_network import reversed_network
from flatness.files import write_text
from flatness.generalization.decomposition import direct_representativeness
from flatness.generalization.fitting import Ridge
from flatness.generalization.kernels import kernel_of
from flatness.generalization.representativeness import cross_validated
from flatness.losses import resolve_loss
from flatness.measuring import measure
from flatness.progress import ProgressBar

if TYPE_CHECKING:
    import pandas

SEPARATIONS = (0.5, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0)
_TEST = 20_000
_AVERAGED = (
    "gap",
    "bound",
    "representativeness",
    "direct_representativeness",
    "flatness_term",
    "published_script",
)


@dataclass(frozen=True)
class BoundExperiment:
    """What the experiment found.

    Attributes:
        rows: One per data set: separation, dataset, gap (20,000 fresh samples), cross_validated_gap,
            representativeness, representativeness_stderr, direct_representativeness (Monte Carlo from the
            true distribution, ψ fitted to all samples), relative_flatness, flatness_term, bound, and
            published_script, the bound as the published script has it.
    """

    rows: tuple[dict[str, float], ...]

    def to_frame(self) -> pandas.DataFrame:
        """The rows as a table."""
        import pandas as pd

        return pd.DataFrame(list(self.rows))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rows as CSV."""
        write_text(path, self.to_frame().to_csv(index=False))

    def summary(self) -> list[dict[str, float]]:
        """Means over the data sets of each separation, standard errors, and how often the bound holds."""
        found = []
        for separation in sorted({row["separation"] for row in self.rows}):
            rows = [row for row in self.rows if row["separation"] == separation]
            entry = {"separation": separation}
            for name in _AVERAGED:
                values = np.array([row[name] for row in rows])
                entry[name] = float(values.mean())
                entry[f"{name}_stderr"] = float(values.std(ddof=1) / math.sqrt(len(rows)))
            entry["holds"] = float(np.mean([row["bound"] >= row["gap"] for row in rows]))
            entry["published_holds"] = float(np.mean([row["published_script"] >= row["gap"] for row in rows]))
            found.append(entry)
        return found


def petzka2021_bound(
    separations: Sequence[float] = SEPARATIONS,
    datasets: int = 20,
    *,
    samples: int = 600,
    folds: int = 3,
    delta: float = 0.1,
    draws: int = 100,
    kernel: str = "uniform",
    penalty: float = 1.0,
    seed: int = 0,
    jobs: int = 1,
    progress: bool = True,
) -> BoundExperiment:
    """Run the experiment.

    Args:
        separations: Class separations c.
        datasets: Data sets per separation.
        samples: n.
        folds: Folds of the cross-validation.
        delta: δ.
        draws: Draws per point.
        kernel: Of the local distributions.
        penalty: Of the ridge regression.
        seed: Seed of everything random.
        jobs: Processes, of one thread each.
        progress: Whether to show a bar.
    """
    options = {
        "samples": samples,
        "folds": folds,
        "delta": delta,
        "draws": draws,
        "kernel": kernel,
        "penalty": penalty,
        "seed": seed,
    }
    calls = [
        joblib.delayed(_one)(separation, number, **options)
        for separation in separations
        for number in range(datasets)
    ]
    rows: list[dict[str, float]] = []
    with ProgressBar("data sets", len(calls), progress) as bar:
        for row in joblib.Parallel(n_jobs=jobs, return_as="generator")(calls):
            rows.append(row)  # type: ignore[arg-type]
            bar.advance()
    return BoundExperiment(tuple(rows))


def _one(
    separation: float,
    number: int,
    samples: int,
    folds: int,
    delta: float,
    draws: int,
    kernel: str,
    penalty: float,
    seed: int,
) -> dict[str, Any]:
    place = int(np.random.SeedSequence([seed, round(1000 * separation), number]).generate_state(1)[0])
    distribution = FourGaussians.draw(separation, place)
    z, y = distribution.sample(samples, place)
    fit, loss = Ridge(penalty), resolve_loss("squared_error")
    predictor = fit(z, y)
    network = reversed_network(z, predictor, place)
    pair = torch.cat([y, -y], dim=1).float()
    report = measure(
        network.model,
        (network.inputs, pair),
        "mse",
        measures="relative_flatness",
        layers="fc5",
        progress=False,
    )
    flat, m = report.value("relative_flatness", layer="fc5"), z.shape[1]
    found = cross_validated(
        z, y, fit, loss, kernel=kernel_of(kernel), delta=delta, folds=folds, draws=draws, seed=place
    )
    fresh_z, fresh_y = distribution.sample(_TEST, place + 1)
    training = float((predictor(z) - y).square().mean())
    direct = direct_representativeness(
        predictor,
        z,
        y,
        distribution.sample,
        loss,
        kernel=kernel_of(kernel),
        delta=delta,
        fresh=_TEST,
        draws=draws,
        seed=place + 2,
    )
    term = delta**2 / (2 * m) * flat
    return {
        "separation": separation,
        "dataset": number,
        "gap": float((predictor(fresh_z) - fresh_y).square().mean()) - training,
        "cross_validated_gap": found.gap,
        "representativeness": found.value,
        "representativeness_stderr": found.stderr,
        "direct_representativeness": direct.value,
        "relative_flatness": flat,
        "flatness_term": term,
        "bound": found.value + term,
        "published_script": published_script_bound(z, y, flat, delta, penalty, seed=place),
    }


def published_script_bound(
    z: Tensor,
    y: Tensor,
    relative_flatness: float,
    delta: float = 0.1,
    penalty: float = 1.0,
    folds: int = 10,
    seed: int = 0,
) -> float:
    """The bound as the published script has it, for labels y = ±1.

    Bandwidths are passed as the *weights* w_i ∝ ‖z_i‖ of an estimate with fixed bandwidth 1, evaluated at
    the root of the distance; the loss is that of predicted classes; and the sum over kernel points is
    divided by their number once more: Σ_j [ℓ(ψ(z_j), y_j) − (1/n) Σ_i w_i K(√‖z_j − z_i‖) ℓ(ψ(z_i), y_j)] /
    n_T. The second sum is tiny, and what remains is the cross-validated error rate. The flatness term is
    (δ²/m)(κ_Tr/m).
    """
    order = torch.randperm(len(z), generator=torch.Generator().manual_seed(seed))
    total = 0.0
    for part in torch.tensor_split(order, folds):
        rest = order[~torch.isin(order, part)]
        predict = Ridge(penalty)(z[rest], y[rest])
        guess, own = predict(z[part]).sign(), predict(z[rest]).sign()
        weights = z[rest].norm(dim=1)
        kernel = torch.exp(-torch.cdist(z[part], z[rest]) / 2) / math.sqrt(2 * math.pi)
        wrong = (y[part] != own.T).double()
        smoothed = (kernel * (weights / weights.sum()) * wrong).sum(1) / len(rest)
        total += float(((guess != y[part]).double()[:, 0] - smoothed).mean()) / folds
    return total + delta**2 / z.shape[1] * relative_flatness / z.shape[1]
