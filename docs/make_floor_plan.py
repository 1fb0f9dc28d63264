"""Draw docs/pictures/floor-plan.png: the rooms of src/flatness, from the imports that are really there.

Run it with ``make plan``. A room stands above every room that it imports. Arrows are imports, and their width
says how many; those that can also be gone by way of another room are left out.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import grimp
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from radon.raw import analyze

SOURCE = Path(__file__).parents[1] / "src" / "flatness"
PICTURE = Path(__file__).parent / "pictures" / "floor-plan.png"
ABOUT = {
    "losses": "one loss per sample,\nfactors of its Hessian",
    "network": "a model as layers\nand as a graph",
    "problem": "model + data + loss,\nmade safe",
    "curvature": "sums over the data;\nHessian products",
    "catalogue": "measures:\ndeclared, finalised",
    "report": "results, tables,\ncomparison, saving",
    "measuring": "request → examine\n→ plan → run → rows",
    "symmetry": "what may be rewritten;\ncheck of invariance",
    "generalization": "robustness, bounds,\nPAC-Bayes",
    "landscape": "lines, planes,\ndensities",
    "integrations": "flatness during\ntraining: callbacks",
    "zoo": "names to objects: data,\nmodels, checkpoints",
    "study": "many networks trained,\nmeasured, correlated",
    "show": "plots and pages",
    "cli": "a file a command",
}
# Only from left to right: how high a room stands, and all arrows, come from the imports. Rooms of one storey
# that share a column stand beside each other.
COLUMNS = {"symmetry": -1, "zoo": 1.2, "integrations": 2, "losses": -0.5, "network": 0.5}
# The imports that go up (see pyproject.toml): the metric of geodesic sharpness is that of heads, and .plot()
# methods draw, inside the function.
_UP = (("flatness.catalogue.engines.geodesic", "symmetry"), ("flatness.report.report", "show"))
_INK, _PAPER, _LINE = "#1d3557", "#eef3f8", "#5b7ea3"
_WIDTH, _HEIGHT = 2.2, 1.15  # of a room
_STEP_X, _STEP_Y = 2.8, 1.75  # from one room to the next


def imports() -> Counter[tuple[str, str]]:
    """How many imports lead from one room to another: pairs of a room and one that it imports."""
    graph = grimp.build_graph("flatness")
    found: Counter[tuple[str, str]] = Counter()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            pair = _room(module), _room(imported)
            if set(pair) <= set(ABOUT) and pair[0] != pair[1] and (module, pair[1]) not in _UP:
                found[pair] += 1
    return found


def _room(module: str) -> str:
    return [*module.split("."), ""][1]


def levels(below: Mapping[str, set[str]]) -> dict[str, int]:
    """The storey of every room: one more than that of the highest room it imports."""

    @functools.cache
    def level(room: str) -> int:
        return 1 + max((level(other) for other in below[room]), default=-1)

    return {room: level(room) for room in ABOUT}


def essential(below: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """Imports that are not also made through another room."""

    @functools.cache
    def reached(room: str) -> frozenset[str]:
        return frozenset(below[room]).union(*(reached(other) for other in below[room]))

    return [
        (room, other)
        for room in ABOUT
        for other in sorted(below[room])
        if not any(other in reached(between) for between in below[room] - {other})
    ]


def size(room: str) -> tuple[int, int]:
    """Modules of a room and their source lines, without docstrings, comments and blanks."""
    files = list((SOURCE / room).rglob("*.py"))
    return len(files), sum(analyze(file.read_text(encoding="utf-8")).sloc for file in files)


def draw(path: Path) -> None:
    """Draw the picture."""
    counts = imports()
    below = {room: {other for one, other in counts if one == room} for room in ABOUT}
    storeys = levels(below)
    middle = {room: (_STEP_X * COLUMNS.get(room, 0), _STEP_Y * storeys[room]) for room in ABOUT}
    for first, second in itertools.combinations(ABOUT, 2):
        if middle[first] == middle[second]:
            middle[second] = (middle[second][0] + _STEP_X, middle[second][1])
    columns, heights = zip(*middle.values(), strict=True)
    left, right, top = min(columns) - _WIDTH, max(columns) + _WIDTH, max(heights) + _HEIGHT
    figure, axes = plt.subplots(figsize=(right - left, top + _HEIGHT))
    for one, other in essential(below):
        (x, y), (to_x, to_y) = middle[one], middle[other]
        aside = max(-0.42, min(0.42, 0.3 * (to_x - x))) * _WIDTH  # so that no arrow runs through a room
        axes.add_patch(
            FancyArrowPatch((x + aside, y - _HEIGHT / 2), (to_x - aside / 2, to_y + _HEIGHT / 2), color=_LINE,
                            arrowstyle="-|>", mutation_scale=12, lw=0.8 + 0.5 * counts[one, other] ** 0.5,
                            shrinkA=0, shrinkB=2, zorder=1)
        )  # fmt: skip
    for room, (x, y) in middle.items():
        corner = x - _WIDTH / 2, y - _HEIGHT / 2
        axes.add_patch(
            FancyBboxPatch(corner, _WIDTH, _HEIGHT, boxstyle="round,pad=0,rounding_size=0.08", fc=_PAPER,
                           ec=_INK, lw=1.2, zorder=2)
        )  # fmt: skip
        modules, lines = size(room)
        plural = "" if modules == 1 else "s"
        axes.text(
            x, y + 0.37, room, ha="center", va="center", weight="bold", color=_INK, fontsize=12, zorder=3
        )
        axes.text(x, y + 0.01, ABOUT[room], ha="center", va="center", fontsize=9, color="#222222", zorder=3)
        told = f"{modules} module{plural}, {lines:,} lines"
        axes.text(x, y - 0.42, told, ha="center", va="center", fontsize=8, color="#555555", zorder=3)
    axes.set_xlim(left, right)
    axes.set_ylim(-_HEIGHT, top)
    axes.set_aspect("equal")
    axes.axis("off")
    figure.savefig(path, dpi=110, bbox_inches="tight", pad_inches=0.1, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    draw(PICTURE)
