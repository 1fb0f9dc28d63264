"""What one row about a whole network shows, in tables and on pages."""

from __future__ import annotations

from flatness.report.report import Report, Result
from flatness.report.tables import column_of, place_of


def overview_columns(report: Report) -> dict[str, Result]:
    """Values by column: the network's; a layer's where only one was measured, or where there is no other."""
    single = len(report.layers()) == 1
    found: dict[str, Result] = {}
    for measure in dict.fromkeys(row.measure for row in report.results):
        rows = [row for row in report.results if row.measure == measure]
        network = [row for row in rows if row.level == "network"]
        layers = [row for row in rows if row.level == "layer"]
        if single and layers:
            found |= {column_of(measure, row.reduction): row for row in layers}
        elif network:
            found |= {column_of(measure, row.reduction): row for row in network}
        else:
            found |= {f"{column_of(measure, row.reduction)} {place_of(row)}": row for row in layers}
    return found
