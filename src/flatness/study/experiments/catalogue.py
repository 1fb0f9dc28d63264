"""The experiments that a study file can name."""

from __future__ import annotations

from flatness.errors import SpecError, check_known
from flatness.study.experiments.experiment import Experiment
from flatness.study.experiments.petzka2021_bound import BOUND
from flatness.study.experiments.petzka2021_labels import LABELS
from flatness.study.experiments.rangamani2019_invariance import INVARIANCE

EXPERIMENTS: dict[str, Experiment] = {one.name: one for one in (LABELS, BOUND, INVARIANCE)}


def experiment(name: object, where: str) -> Experiment:
    """The experiment of this name.

    Raises:
        SpecError: There is none.
    """
    check_known(name, EXPERIMENTS, "name in [experiment]", SpecError, f"{where} has")
    return EXPERIMENTS[str(name)]
