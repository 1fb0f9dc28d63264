"""Reference pages: one per measure, written from what the catalogue declares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flatness.symmetry.rewriting.kinds import invariances


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
        "divided by the value of the original; a flat line at 1 is an invariance.",
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
    return (
        "```py\n"
        f'report = flatness.measure(model, loader, measures="{measure.name}")\n'
        f'report.value("{measure.name}"{address})\n'
        "```"
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."
