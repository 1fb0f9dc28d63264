"""Result and Report: numbers with their error, method and story; saved, loaded, tabulated."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from flatness.errors import ReportError, listed, nearest
from flatness.files import EVERY, NUMBER, TEXT, WHOLE, YES_NO, Optional, json_text, read_saved, write_text

if TYPE_CHECKING:
    import pandas

    from flatness.show.plots.themes import Picture

_FORMAT = "flatness report"
_VERSION = 1
_SHAPE = {
    "results": [
        {
            **dict.fromkeys(("measure", "level"), TEXT),
            "value": NUMBER,
            **{name: Optional(TEXT) for name in ("layer", "reduction", "method", "loss", "curvature")},
            **{name: Optional(NUMBER) for name in ("stderr", "residual", "data_stderr")},
            "unit": Optional(WHOLE),
            "converged": Optional(YES_NO),
            "notes": Optional([TEXT]),
            "terms": Optional({}),
        }
    ],
    "meta": {
        "risk": Optional(NUMBER),
        "options": Optional({EVERY: {}}),
        **{name: Optional(TEXT) for name in ("loss", "curvature", "alignment", "model_fingerprint")},
    },
    "notes": [TEXT],
}
_COLUMNS = (
    "measure",
    "level",
    "layer",
    "unit",
    "reduction",
    "value",
    "stderr",
    "method",
    "loss",
    "curvature",
)


@dataclass(frozen=True, slots=True)
class Result:
    """One number and how it was computed.

    Attributes:
        measure: Name of the measure.
        level: "unit", "layer" or "network".
        value: The number.
        layer: Name of the layer; None for the network.
        unit: Index of the unit; None for layers and the network.
        reduction: "max" or "sum" for an aggregate over units (with a layer) or over the measured layers
            (without), or None.
        stderr: Standard error of the estimator; 0 when the value is exact.
        method: "exact", "sampled" if noise is drawn, "ascent" if a maximum is searched for, "bisection" if a
            crossing is.
        loss: Name of the loss.
        curvature: "hessian" or "gauss_newton".
        converged: Whether the iteration behind it, if any, met its tolerance.
        residual: ‖Hv − λv‖ of the eigenvalue behind it, if any: an eigenvalue lies within this distance.
        notes: How it was computed, and caveats.
        terms: The parts of the value, if the measure gives them; otherwise None.
        data_stderr: Standard error of the value as an estimate for the distribution that the samples come
            from; None unless requested.
    """

    measure: str
    level: str
    value: float
    layer: str | None = None
    unit: int | None = None
    reduction: str | None = None
    stderr: float = 0.0
    method: str = "exact"
    loss: str = ""
    curvature: str = "hessian"
    converged: bool = True
    residual: float | None = None
    notes: tuple[str, ...] = ()
    terms: dict[str, Any] | None = field(default=None, hash=False)
    data_stderr: float | None = None

    def __float__(self) -> float:
        """The value."""
        return self.value

    @property
    def address(self) -> dict[str, str | int | None]:
        """What distinguishes the row from others of its measure: layer, unit, reduction."""
        return {"layer": self.layer, "unit": self.unit, "reduction": self.reduction}

    def where(self) -> str:
        """The row's address in words: ``layer='fc1', reduction='sum'``."""
        return _words(self.address) or "the whole network"

    def subject(self) -> str:
        """What the number is about, for sentences: ``fc1``, ``unit 3 of fc1``, ``the network (sum)``."""
        from flatness.report.tables import WHOLE_MODEL

        place = "the network" if self.layer is None else self.layer or WHOLE_MODEL
        place = place if self.unit is None else f"unit {self.unit} of {place}"
        return place if self.reduction is None else f"{place} ({self.reduction})"

    def __str__(self) -> str:
        """The number in a sentence, and its notes."""
        from flatness.report.tables import cell_of

        source = f"{self.method}, {self.curvature} of {self.loss}" if self.loss else self.method
        source += ", ± with that of the data" if self.data_stderr else ""
        lines = [f"{self.measure} of {self.subject()}: {cell_of(self)} ({source})", *self.notes]
        return "\n  ".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from flatness.report.notebook import result_html

        return result_html(self)


Address = tuple[str, str, str | None, str | None]
"""Measure, level, layer and reduction: what a row is about."""


def address(row: Result) -> Address:
    """What a row is about."""
    return row.measure, row.level, row.layer, row.reduction


class Drawn:
    """A result that has a picture, which the room above draws."""

    __slots__ = ()

    def plot(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        measures: str | Iterable[str] | None = None,
        dark: bool = False,
    ) -> Picture:
        """Its picture, a matplotlib figure that notebooks show as it is; see `flatness.plot`."""
        from flatness.show.plot import plot

        return plot(self, path, measures=measures, dark=dark)


@dataclass(frozen=True)
class Report(Drawn):
    """All results of one model.

    Attributes:
        results: One `Result` per row.
        meta: Fingerprints of model and data, sample count, training loss, versions and timings.
        notes: What the reader should know about the measurement.
    """

    results: tuple[Result, ...]
    meta: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_frame(self) -> pandas.DataFrame:
        """Tidy table, one row per number.

        Columns: measure, level, layer, unit, reduction, value, stderr, method, loss, curvature; after stderr
        also data_stderr if requested.
        """
        import pandas as pd

        names: list[str] = list(_COLUMNS)
        if any(row.data_stderr is not None for row in self.results):
            names.insert(names.index("stderr") + 1, "data_stderr")
        rows = [[getattr(row, name) for name in names] for row in self.results]
        frame = pd.DataFrame(rows, columns=names, dtype=object)
        return frame.astype({"value": float, "stderr": float, "unit": "Int64"})

    def result(
        self, measure: str, *, layer: str | None = None, unit: int | None = None, reduction: str | None = None
    ) -> Result:
        """The one matching row. Arguments left out must be empty in the row, unless it is the only match.

        Raises:
            ReportError: When no row or several match; the message lists the candidates.
        """
        rows = self._rows_of(measure)
        given = {"layer": layer, "unit": unit, "reduction": reduction}
        asked = {key: value for key, value in given.items() if value is not None}
        matching = [row for row in rows if asked.items() <= row.address.items()]
        whole = [row for row in matching if row.address == given]
        found = whole if len(whole) == 1 else matching
        if len(found) != 1:
            raise _ambiguous(measure, asked, len(matching), matching or rows)
        return found[0]

    def _rows_of(self, measure: str) -> list[Result]:
        rows = [row for row in self.results if row.measure == measure]
        if rows:
            return rows
        known = list(dict.fromkeys(row.measure for row in self.results))
        raise ReportError(
            f"Expected a measure of this report but got {measure!r}.{nearest(measure, known)} "
            f"It holds: {listed(known, 40) or 'nothing'}."
        )

    def value(
        self, measure: str, *, layer: str | None = None, unit: int | None = None, reduction: str | None = None
    ) -> float:
        """The value of the one row that matches; see `result`."""
        return self.result(measure, layer=layer, unit=unit, reduction=reduction).value

    def layers(self) -> list[str]:
        """Names of the measured layers, in network order."""
        return list(dict.fromkeys(row.layer for row in self.results if row.layer is not None))

    def __str__(self) -> str:
        """The table of layers, as wide as the terminal."""
        from flatness.report.tables import format_report, terminal_width

        return format_report(self, terminal_width())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from flatness.report.notebook import report_html

        return report_html(self)

    def to_json(self) -> str:
        """The report as versioned JSON."""
        rows = [
            {key: value for key, value in asdict(row).items() if value is not None} for row in self.results
        ]
        head = {"format": _FORMAT, "version": _VERSION, "meta": self.meta, "notes": list(self.notes)}
        return json_text({**head, "results": rows})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json` to a file, completely or not at all."""
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read a report written by `save`."""
        head = (_FORMAT, _VERSION)
        content = read_saved(path, "a report", head, _SHAPE, writer="report.save", again="Measure again.")
        return cls(tuple(map(_row, content["results"])), content["meta"], tuple(content["notes"]))

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write `to_frame` as CSV."""
        from flatness.report.sheets import csv_text

        write_text(path, csv_text(self.to_frame()))

    def to_latex(
        self, path: str | os.PathLike[str] | None = None, *, measures: str | Iterable[str] | None = None
    ) -> str:
        """The table of layers as a LaTeX tabular (booktabs), aligned at decimal points and at ±.

        Args:
            path: A file to also write it to.
            measures: A name or a list of names: the columns, in this order. None for all.
        """
        from flatness.report.latex import latex_report

        names = None if measures is None else [measures] if isinstance(measures, str) else list(measures)
        for name in names or ():
            self._rows_of(name)  # each of which the report holds
        text = latex_report(self, names)
        if path is not None:
            write_text(path, text)
        return text


def _ambiguous(measure: str, asked: dict[str, Any], count: int, rows: list[Result]) -> ReportError:
    """An address that names none or several of the rows of a measure; units are listed if asked for."""
    shown = [row.where() for row in rows if row.unit is None or "unit" in asked]
    return ReportError(
        f"Expected {measure!r} with {_words(asked) or 'no further choice'} to name one row but "
        f"{count} match. Choose one of: {listed(shown, separator='; ')}."
    )


def joined(reports: list[Report], order: Iterable[str] = ()) -> Report:
    """One report from parts on the same model and data, with different losses; `meta` is the first's.

    Args:
        reports: The parts.
        order: Names of measures: their rows come in this order.
    """
    if len(reports) == 1:
        return reports[0]
    places = {name: place for place, name in enumerate(order)}
    rows = [row for report in reports for row in report.results]
    rows.sort(key=lambda row: places.get(row.measure, len(places)))
    notes = tuple(dict.fromkeys(note for report in reports for note in report.notes))
    options = {name: own for report in reports for name, own in report.meta.get("options", {}).items()}
    meta = {**reports[0].meta, "options": options, "seconds": reports[-1].meta["seconds"]}
    return Report(tuple(rows), meta, notes)


def _row(entry: dict[str, Any]) -> Result:
    """A row as `Report.save` wrote it; what a later version may have added is left out."""
    names = {item.name for item in fields(Result)}
    known = {key: value for key, value in entry.items() if key in names and value is not None}
    return Result(**{**known, "notes": tuple(known.get("notes", ()))})


def _words(address: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in address.items() if value is not None)
