"""Write docs/reference from the catalogue: a page and a drift plot for every measure, and an index.

Run it after a measure was added or changed: ``make reference``, or with names of measures for these alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import flatness
from flatness.show.charts import Chart, rewritten_chart
from flatness.show.plots.charts import save_chart
from flatness.symmetry.check.verdicts import InvarianceReport
from flatness.symmetry.rewriting.kinds import invariances

REFERENCE = Path(__file__).parent / "reference"


def trained_network() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """A small convolutional network on four noisy patterns, trained for a moment."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    y = torch.randint(4, (96,), generator=generator)
    patterns = torch.randn(4, 1, 8, 8, generator=generator)
    x = patterns[y] + 0.7 * torch.randn(96, 1, 8, 8, generator=generator)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 12),
        nn.ReLU(),
        nn.Linear(12, 4),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval(), (x, y)


# What needs an optimizer gets one of its own for every copy: Adam after a few steps at rate 0, which leave
# the weights and fill its state with the copy's gradients.
NEEDS_OPTIMIZER = {"preconditioned_sharpness"}


def optimizer_chart(model: nn.Module, data: Any, measure: str, trials: int = 10) -> Chart:
    """What `drift_chart` shows, of a measure that needs an optimizer."""

    def value(network: nn.Module) -> float:
        optimizer = torch.optim.Adam(network.parameters(), lr=0.0)
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(data[0]), data[1]).backward()
            optimizer.step()
        options = {measure: {"optimizer": optimizer}}
        return flatness.measure(network, data, measures=measure, options=options, progress=False).value(
            measure
        )

    before = value(model)
    ratios = {}
    for kind in ("layerwise", "neuronwise"):
        copies = (flatness.rescale(model, data[0], kind=kind, seed=seed) for seed in range(trials))
        ratios[kind] = [1.0, *(value(copy) / before for copy in copies)]
    return rewritten_chart(measure, ratios)


def drift_chart(report: InvarianceReport, measure: str, title: str) -> Chart:
    """How one measure moves over rewritings of one network, a line for every kind of rewriting.

    Its value for the network is drawn, or its largest drift over layers if it has none.
    """
    own = [row for row in report.rows if row.measure == measure and row.level != "unit"]
    whole = [row for row in own if row.level == "network"] or own
    ratios = {}
    for kind in dict.fromkeys(row.kind for row in whole):
        lines = [
            [value / row.value for value in row.values] for row in whole if row.kind == kind and row.value
        ]
        ratios[kind] = [1.0, *(max(trial, key=lambda r: abs(r - 1)) for trial in zip(*lines, strict=True))]
    return rewritten_chart(title, ratios)


def reference_page(measure: Any) -> str:
    """The page of one measure, as Markdown."""
    options = "\n".join(f"| `{name}` | `{value!r}` |" for name, value in measure.options.items())
    unchanged = [word.when for word in invariances() if word.name in measure.invariances]
    kept = "; ".join([*unchanged, "neurons change places"])
    rows = " and ".join(f"`reduction={name!r}`" for name in measure.reductions)
    parts = [
        f"# `{measure.name}`",
        measure.summary,
        f"**Definition.** {measure.symbol} = {measure.formula}"
        if measure.symbol != measure.formula
        else f"**Definition.** {measure.formula}",
        f"**Source.** {measure.source}. **Reading.** "
        + ("Smaller is flatter." if measure.flatness else "It is no flatness itself."),
        f"**Values for** {', '.join(measure.levels)}" + (f"; over layers with {rows}." if rows else "."),
        f"**Unchanged when** {kept}. The plot shows its value on ten rewritings of one small network, "
        "divided by the value of the original; a flat line at 1 is an invariance."
        + (
            " Each has an Adam of its own, after five steps at rate 0."
            if measure.name in NEEDS_OPTIMIZER
            else ""
        ),
        f"![drift of {measure.name}](pictures/{measure.name}.png)",
        f"**Cost.** {_sentence(measure.price)}",
        f"**When to use it.** {measure.when}" if measure.when else "",
        f"**When it misleads.** {measure.misleads}" if measure.misleads else "",
        f"| option | default |\n|---|---|\n{options}" if options else "",
        _example(measure),
        "[All measures](README.md)",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def reference_index(measures: Sequence[Any]) -> str:
    """The table of all measures, with links to their pages."""
    head = (
        "# Measures\n\nOne page a measure, written from the catalogue (`flatness.measures()`) by "
        "`make reference`. *L*: unchanged when whole layers are rescaled; *N*: single neurons; *S*: scale "
        "and shift of the logits; in brackets: in part.\n\n"
        "| measure | what it is | source | unchanged by |\n|---|---|---|---|\n"
    )
    lines = []
    for measure in measures:
        marks = ", ".join(word.mark for word in invariances() if word.name in measure.invariances)
        name = f"[`{measure.name}`]({measure.name}.md)"
        lines.append(f"| {name} | {measure.summary} | {measure.source} | {marks or '–'} |")
    return head + "\n".join(lines) + "\n"


def _example(measure: Any) -> str:
    address = ""
    if "network" not in measure.levels:
        address = ', layer="fc3"'
    elif measure.reductions:
        address = f', reduction="{measure.reductions[-1]}"'
    call = f'report = flatness.measure(model, loader, measures="{measure.name}")\n'
    if "optimizer" in measure.options:
        call = (
            "report = flatness.measure(\n    model,\n    loader,\n"
            f'    measures="{measure.name}",\n'
            f'    options={{"{measure.name}": {{"optimizer": optimizer}}}},\n)\n'
        )
    return f'```py\n{call}report.value("{measure.name}"{address})\n```'


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def main() -> None:
    """Measure once, draw and write everything; with names of measures, the pages of these and the index."""
    (REFERENCE / "pictures").mkdir(parents=True, exist_ok=True)
    model, data = trained_network()
    known = flatness.measures()
    asked = [measure for measure in known if not sys.argv[1:] or measure.name in sys.argv[1:]]
    names = [measure.name for measure in asked if measure.name not in NEEDS_OPTIMIZER]
    checked = flatness.check_invariance(model, data, measures=names, trials=10, progress=False)
    for measure in asked:
        picture = REFERENCE / "pictures" / f"{measure.name}.png"
        if measure.name in NEEDS_OPTIMIZER:
            chart = optimizer_chart(model, data, measure.name)
        else:
            chart = drift_chart(checked, measure.name, measure.name)
        save_chart(picture, chart, height=2.0)
        (REFERENCE / f"{measure.name}.md").write_text(reference_page(measure), encoding="utf-8")
    (REFERENCE / "README.md").write_text(reference_index(known), encoding="utf-8")


if __name__ == "__main__":
    main()
