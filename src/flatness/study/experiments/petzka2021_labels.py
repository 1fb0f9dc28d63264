"""petzka2021, Fig. 3: does flatness follow the generalisation gap more closely where labels are constant?

For each class separation, many data sets of 500 training and 4,500 test points: the correlation of relative
flatness and generalisation gap over the data sets. See `FourGaussians` and `reversed_network` for what the
paper leaves open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from flatness.generalization.fitting import Ridge
from flatness.generalization.kernels import UniformBall
from flatness.generalization.local_losses import moves
from flatness.study.correlate import COEFFICIENTS, correlation
from flatness.study.experiments.data_sets import over_separations, seed_of
from flatness.study.experiments.experiment import Row, trend, whole
from flatness.study.experiments.four_gaussians import FourGaussians
from flatness.study.experiments.reversed_network import reversed_network

SEPARATIONS = (0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0)


def labels_of_one(
    separation: float,
    number: int,
    *,
    training: int = 500,
    test: int = 4500,
    penalty: float = 1.0,
    seed: int = 0,
) -> Row:
    """One data set with its own distribution and network; all but what the row says is then forgotten.

    Args:
        separation: Class separation c.
        number: Of the data set.
        training: Training samples.
        test: Test samples.
        penalty: Of the ridge regression (scikit-learn's default is 1).
        seed: Seed of everything random.

    Returns:
        separation, dataset, relative_flatness, gap, training_risk, test_risk, flips (share of moves by up to
        δ = 0.1 that change the true label), error (of the reverse propagation).
    """
    place = seed_of(separation, number, seed)
    distribution = FourGaussians.draw(separation, place)
    z, y = distribution.sample(training + test, place)
    network = reversed_network(z, Ridge(penalty)(z[:training], y[:training]), place)
    losses = (network.outputs - torch.cat([y, -y], dim=1).float()).square().mean(1).double()
    generator = torch.Generator().manual_seed(place)
    moved = (z[:training] + moves(z[:training], UniformBall(), 0.1, 10, generator)).flatten(0, 1)
    own = distribution.label(z[:training]).repeat(10, 1)
    return {
        "separation": separation,
        "dataset": number,
        "relative_flatness": network.relative_flatness(y[:training]),
        "gap": float(losses[training:].mean() - losses[:training].mean()),
        "training_risk": float(losses[:training].mean()),
        "test_risk": float(losses[training:].mean()),
        "flips": float((distribution.label(moved) != own).double().mean()),
        "error": network.error,
    }


def _check(options: Mapping[str, Any]) -> None:
    whole(options, "training", "test")


def _entry(rows: Sequence[Row]) -> Row:
    """Correlations of flatness and gap with 95 % bootstrap intervals over data sets, and means."""
    values = {name: np.array([row[name] for row in rows]) for name in ("gap", "relative_flatness", "flips")}
    entry: Row = {}
    for kind in COEFFICIENTS:
        found = correlation(values["relative_flatness"], values["gap"], kind, resamples=1000)
        entry |= {kind: found.value, f"{kind}_low": found.low, f"{kind}_high": found.high}
    return entry | {name: float(own.mean()) for name, own in values.items()}


def _verdict(table: Sequence[Row]) -> str:
    separations, values = ([row[name] for row in table] for name in ("separation", "pearson"))
    return (
        "The paper: the correlation of flatness and gap rises with class separation. Here Pearson's r goes "
        f"from {values[0]:+.2f} to {values[-1]:+.2f}; over the separations it {trend(separations, values)}."
    )


LABELS = over_separations(
    "petzka2021_labels",
    labels_of_one,
    SEPARATIONS,
    scales={"smoke": {"separations": [0.5, 1.0, 2.0, 5.0], "datasets": 10}, "small": {"datasets": 30}},
    check=_check,
    entry=_entry,
    verdict=_verdict,
)
"""Fig. 3 as a study."""
