"""Print how the code is laid out: modules, rooms, lines, importers, and functions that branch too much.

make figures
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import grimp
from radon.complexity import cc_visit
from radon.raw import analyze

SOURCE = Path(__file__).parents[1] / "src" / "flatness"
# Members of families: each is one of many of its kind, and the module that lists the kind imports it.
FAMILIES = (
    "catalogue",
    "catalogue.engines",
    "cli",
    "curvature.sums.kinds",
    "network.second_derivatives",
    "study.experiments",
    "symmetry.flow.rules",
    "symmetry.rewriting.kinds",
    "zoo.data",
    "zoo.models",
)
LOADED = """
import sys, torch, flatness
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
flatness.measure(model, (torch.randn(50, 4), torch.randint(3, (50,))), progress=False)
print(sum(name.partition(".")[0] == "flatness" for name in sys.modules))
"""


def importers() -> Counter:
    """How many modules import each module; a package's own ``__init__`` counts like any other."""
    graph = grimp.build_graph("flatness")
    return Counter({module: len(graph.find_modules_that_directly_import(module)) for module in graph.modules})


def only_one(found: Counter) -> list[str]:
    """The modules with exactly one importer that are members of no family."""
    return sorted(
        name
        for name, count in found.items()
        if count == 1 and name.removeprefix("flatness.").rpartition(".")[0] not in FAMILIES
    )


def functions() -> list[tuple[int, str]]:
    """Every function and method with its cyclomatic number."""
    found = []
    for path in SOURCE.rglob("*.py"):
        for block in cc_visit(path.read_text(encoding="utf-8")):
            for one in (block, *getattr(block, "closures", ())):
                if one.letter in "FM":
                    found.append((one.complexity, f"{path.relative_to(SOURCE)}:{one.lineno} {one.name}"))
    return sorted(set(found), reverse=True)


def main() -> None:
    """Print the table; with --list, the modules and functions behind it."""
    files = list(SOURCE.rglob("*.py"))
    raw = [analyze(path.read_text(encoding="utf-8")) for path in files]
    complex_ones, single = functions(), only_one(importers())
    loaded = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, check=True
    ).stdout.strip()
    rooms = [path for path in SOURCE.iterdir() if (path / "__init__.py").exists()]
    rows = [
        ("modules at the top of src/flatness / rooms", f"{len(list(SOURCE.glob('*.py')))} / {len(rooms)}"),
        ("modules", f"{len(files):,}"),
        ("lines", f"{sum(one.loc for one in raw):,}"),
        ("source lines without docstrings, comments and blanks", f"{sum(one.sloc for one in raw):,}"),
        ("modules with exactly one importer, families aside", f"{len(single)}"),
        ("modules of the package that flatness.measure loads", loaded),
        (
            "functions with a cyclomatic number above 15 (above 10)",
            f"{sum(n > 15 for n, _ in complex_ones)} ({sum(n > 10 for n, _ in complex_ones)})",
        ),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}}  {value}")
    if "--list" in sys.argv:
        print("\nexactly one importer:", *single, sep="\n  ")
        print(
            "\ncyclomatic number above 10:",
            *(f"{n} {name}" for n, name in complex_ones if n > 10),
            sep="\n  ",
        )


if __name__ == "__main__":
    main()
