"""The benchmarks on a GPU, in one visit of about six minutes: a table, and JSON in $OUT if set."""

from __future__ import annotations

import argparse
import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import all_layers
import eigenvalues
import last_layer
import memory
import torch
import vocabulary
from harness import machine, show

import landscape

BENCHMARKS: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    "last_layer": lambda device: last_layer.run(device, 50_000),
    "all_layers": lambda device: all_layers.run(device, 50_000),
    "vocabulary": lambda device: vocabulary.run(device, 10_000),
    "eigenvalues": lambda device: eigenvalues.run(device, 5_000),
    "memory": memory.run,
    "landscape": lambda device: landscape.run(device, 10_000),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("only", nargs="*", help=f"out of {', '.join(BENCHMARKS)}; default: all")
    given = parser.parse_args()
    if unknown := set(given.only) - set(BENCHMARKS):
        parser.error(f"no benchmark called {', '.join(sorted(unknown))}")
    device = torch.device(given.device)
    outcome: dict[str, Any] = {"machine": machine(device)}
    rows = []
    for name in given.only or BENCHMARKS:
        started = time.perf_counter()
        try:
            outcome[name] = BENCHMARKS[name](device)
        except (Exception, SystemExit) as error:  # the others are still worth their time
            traceback.print_exc()
            outcome[name] = {"failed": repr(error)}
        torch.cuda.empty_cache()
        outcome[name]["wall"] = time.perf_counter() - started
        rows += [(name, key, text) for key, text in _flat(outcome[name])]
        if "OUT" in os.environ:
            Path(os.environ["OUT"], "benchmarks.json").write_text(json.dumps(outcome, indent=1))
    show(outcome["machine"], ("benchmark", "figure", "value"), rows)


def _flat(values: dict[str, Any]) -> list[tuple[str, str]]:
    flat = []
    for key, value in values.items():
        if isinstance(value, dict):
            flat += [(f"{key}: {inner}", text) for inner, text in _flat(value)]
        else:
            flat.append((key, f"{value:.4g}" if isinstance(value, float) else str(value)))
    return flat


if __name__ == "__main__":
    main()
