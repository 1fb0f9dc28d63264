"""From sums to rows of a report: views, finalisers, errors, provenance."""
