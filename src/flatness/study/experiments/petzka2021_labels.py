"""petzka2021, Fig. 3: does flatness follow the generalisation gap more closely where labels are constant?

For each class separation, many data sets of 500 training and 4,500 test points: the correlation of relative
flatness and generalisation gap over the data sets. See `FourGaussians` and `reversed_network` for what the
paper leaves open.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flatness.errors import OptionError
from flatness.generalization.fitting import Ridge
from flatness.generalization.kernels import UniformBall
from flatness.generalization.local_losses import moves
from flatness.measuring.measure import measure
from flatness.study.correlate import COEFFICIENTS, correlation
from flatness.study.experiments.data_sets import Rows, all_rows, options_of, rows_of, units_of
from flatness.study.experiments.experiment import Experiment, Row, trend
from flatness.study.experiments.four_gaussians import FourGaussians
from flatness.study.experiments.reversed_network import reversed_network

SEPARATIONS = (0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0)
_MEANS = ("gap", "relative_flatness", "flips")


@dataclass(frozen=True)
class LabelsExperiment(Rows):
    """What the experiment found.

    Attributes:
        rows: One per data set: separation, dataset, relative_flatness, gap, training_risk, test_risk, flips
            (share of moves by up to δ = 0.1 that change the true label), error (of the reverse propagation).
    """

    def correlations(self, kind: str = "pearson", resamples: int = 1000) -> list[dict[str, float]]:
        """Correlation of flatness and gap at each separation, with a 95 % bootstrap interval over data sets.

        Args:
            kind: "pearson", "spearman" or "kendall".
            resamples: Bootstrap samples.
        """
        if kind not in COEFFICIENTS:
            raise OptionError(
                f"Expected one of {', '.join(COEFFICIENTS)} but got {kind!r}. Use kind='pearson'."
            )
        found = []
        for separation, rows in self.by_separation():
            flat, gap, flips = (
                np.array([row[name] for row in rows]) for name in ("relative_flatness", "gap", "flips")
            )
            value = correlation(flat, gap, kind, resamples=resamples)
            found.append(
                {
                    "separation": separation,
                    "correlation": value.value,
                    "low": value.low,
                    "high": value.high,
                    "gap": float(gap.mean()),
                    "relative_flatness": float(flat.mean()),
                    "flips": float(np.mean(flips)),
                }
            )
        return found


def petzka2021_labels(
    separations: Sequence[float] = SEPARATIONS,
    datasets: int = 100,
    *,
    jobs: int = 1,
    progress: bool = True,
    **options: Any,
) -> LabelsExperiment:
    """Run the experiment.

    Args:
        separations: Class separations c.
        datasets: Data sets, each with its own distribution and network, per separation.
        jobs: Processes.
        progress: Whether to show a bar.
        options: Those of `labels_of_one`: ``training``, ``test``, ``penalty`` and ``seed``.
    """
    return LabelsExperiment(all_rows(labels_of_one, separations, datasets, jobs, progress, **options))


def labels_of_one(
    separation: float,
    number: int,
    *,
    training: int = 500,
    test: int = 4500,
    penalty: float = 1.0,
    seed: int = 0,
) -> Row:
    """One data set and its network; everything but what the row says is then forgotten.

    Args:
        separation: Class separation c.
        number: Of the data set.
        training: Training samples.
        test: Test samples.
        penalty: Of the ridge regression (scikit-learn's default is 1).
        seed: Seed of everything random.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        place = int(np.random.SeedSequence([seed, round(1000 * separation), number]).generate_state(1)[0])
        distribution = FourGaussians.draw(separation, place)
        z, y = distribution.sample(training + test, place)
        network = reversed_network(z, Ridge(penalty)(z[:training], y[:training]), place)
        pair = torch.cat([y, -y], dim=1).float()
        data = network.inputs[:training], pair[:training]
        report = measure(
            network.model, data, "mse", measures="relative_flatness", layers="fc5", progress=False
        )
        losses = (network.outputs - pair).square().mean(1).double()
        generator = torch.Generator().manual_seed(place)
        moved = (z[:training] + moves(z[:training], UniformBall(), 0.1, 10, generator)).flatten(0, 1)
        own = distribution.label(z[:training]).repeat(10, 1)
        return {
            "separation": separation,
            "dataset": number,
            "relative_flatness": report.value("relative_flatness", layer="fc5"),
            "gap": float(losses[training:].mean() - losses[:training].mean()),
            "training_risk": float(losses[:training].mean()),
            "test_risk": float(losses[training:].mean()),
            "flips": float((distribution.label(moved) != own).double().mean()),
            "error": network.error,
        }
    finally:
        torch.set_num_threads(threads)


def _summary(rows: Sequence[Row]) -> list[Row]:
    found = LabelsExperiment(tuple(rows))
    kinds = {kind: found.correlations(kind) for kind in COEFFICIENTS}
    table = []
    for place, (separation, own) in enumerate(found.by_separation()):
        entry: Row = {"separation": separation, "n": len(own)}
        for kind, values in kinds.items():
            entry |= {kind: values[place]["correlation"]}
            entry |= {f"{kind}_{end}": values[place][end] for end in ("low", "high")}
        table.append(entry | {name: kinds["pearson"][place][name] for name in _MEANS})
    return table


def _verdict(table: Sequence[Row]) -> str:
    separations, values = ([row[name] for row in table] for name in ("separation", "pearson"))
    return (
        "The paper: the correlation of flatness and gap rises with class separation. Here Pearson's r goes "
        f"from {values[0]:+.2f} to {values[-1]:+.2f}; over the separations it {trend(separations, values)}."
    )


LABELS = Experiment(
    name="petzka2021_labels",
    options={"separations": SEPARATIONS, "datasets": 100, **options_of(labels_of_one)},
    scales={"smoke": {"separations": [0.5, 1.0, 2.0, 5.0], "datasets": 10}, "small": {"datasets": 30}},
    counted="data sets",
    units=functools.partial(units_of, counted=("training", "test")),
    work=functools.partial(rows_of, labels_of_one),
    summary=_summary,
    verdict=_verdict,
)
"""Fig. 3 as a study."""
