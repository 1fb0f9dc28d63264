"""The demo: small networks on digits, trained in different ways; is the flatter one the one that generalises?

Six settings (five batch sizes, and one with a tenth of the labels drawn at random), a few seeds each, every
network trained to the same loss. All layers are measured, and the network's relative flatness is held against
its gap between test and training loss. One of them is then rewritten into equal networks: which measures
notice?
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from flatness.cli.demo_folder import write_folder
from flatness.cli.demo_story import closing, opening, ranking, rewriting
from flatness.cli.demo_training import SETTINGS, one_thread, train_and_measure
from flatness.report.report import Report
from flatness.symmetry.check.invariance import check_invariance
from flatness.zoo.data import load

REWRITINGS = 10
"""Rewritten networks of each kind."""


def run(out: Path, *, seeds: int = 3, say: Callable[[str], object], width: int = 80) -> dict[str, Report]:
    """Train, measure, tell and write.

    Args:
        out: Folder for tables, pictures, reports and the page.
        seeds: Networks per setting.
        say: Gets the text, piece by piece.
        width: Columns of the terminal.

    Returns:
        The reports, by name.
    """
    started = time.perf_counter()
    train, test = load("digits"), load("digits", split="test")
    networks, reports = train_and_measure(train, test, seeds)
    say(opening(reports, width))
    say(ranking(reports))
    name = f"{SETTINGS[-2].name}, seed 0"
    with one_thread():
        check = check_invariance(networks[name], train.pair, trials=REWRITINGS)
    say(rewriting(name, check))
    files = write_folder(out, reports, name, check)
    say(closing(out, files, time.perf_counter() - started, width))
    return reports


__all__ = ["run"]
