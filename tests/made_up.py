"""Studies and checks with made-up numbers: what pages show, without training anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from flatness.study.analysis.results import Study
from flatness.study.spec.grid import label
from flatness.study.spec.spec import make_spec

REDUCTIONS: dict[str, tuple[str | None, ...]] = {"hessian_trace": (None,), "neuron_flatness": ("max", "sum")}


def made_up_study(
    grid: dict[str, Any],
    layers: int,
    measures: dict[str, tuple[str | None, ...]] = REDUCTIONS,
    **content: Any,
) -> Study:
    """A study of `grid` whose quantities follow the gap with more or less noise.

    Every tenth network diverged, every eleventh was not measured after it missed its target.
    """
    spec = make_spec(
        "made-up",
        "paper",
        {
            "title": "Made up",
            "data": {"name": "digits"},
            "model": {"name": "mlp", "options": {"sizes": [64, 8, 10]}},
            "grid": grid,
            "stop": {"loss": 0.1, "epochs": 80},
            "analysis": {"resamples": 20, "permutations": 20},
            **content,
        },
        "a test",
    )
    generator = np.random.default_rng(0)
    places = [*(f"fc{number + 1}" for number in range(layers)), None]
    networks, records = [], {}
    for number, one in enumerate(spec.configurations):
        networks.append({"key": one.key, "part": one.part, "axes": dict(one.axes), "label": label(one)})
        status = "diverged" if number % 10 == 9 else "not_converged" if number % 11 == 10 else "converged"
        record: dict[str, Any] = {"key": one.key, "part": one.part, "status": status, "reason": ""}
        record["configuration"] = {"axes": dict(one.axes), "model": dict(one.model), "stop": dict(one.stop)}
        record["training"] = {"losses": [2.0 / (1 + epoch) for epoch in range(80)], "epochs": 80}
        if status == "converged":
            gap = float(generator.gamma(2.0, 0.1))
            record["evaluation"] = _evaluation(gap, generator)
            record["measuring"] = {
                "results": _results(gap, places, measures, generator, number),
                "notes": ["a note"],
                "seconds": 0.5,
            }
        records[one.key] = record
    return Study(spec, networks, records, Path("made-up"))


def _evaluation(gap: float, generator: np.random.Generator) -> dict[str, float]:
    train, accuracy = float(generator.uniform(0.01, 0.1)), float(generator.uniform(0.7, 0.95))
    return {
        "train_loss": train,
        "test_loss": train + gap,
        "train_accuracy": 0.99,
        "test_accuracy": accuracy,
        "train_samples": 100,
        "test_samples": 50,
    }


def _results(
    gap: float,
    places: list[str | None],
    measures: dict[str, tuple[str | None, ...]],
    generator: np.random.Generator,
    number: int,
) -> list[dict[str, Any]]:
    rows = []
    for measure, reductions in measures.items():
        for place in places:
            for reduction in reductions:
                noise = float(generator.normal(0, 0.3))
                # Every seventh pair of networks shares its values: ties.
                value = 100.0 if number % 14 < 2 else float(100 * gap * np.exp(noise))
                rows.append(
                    {
                        "measure": measure,
                        "layer": place,
                        "reduction": reduction,
                        "value": value,
                        "stderr": 0.01 * value if reduction == "max" else 0.0,
                        "method": "sampled" if reduction == "max" else "exact",
                        "converged": number % 5 != 0,
                    }
                )
    return rows
