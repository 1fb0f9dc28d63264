"""The measures of the papers, each a small function of the shared statistics. Importing this package fills the catalogue."""

from flatness.measures import baselines, petzka2019, petzka2021  # noqa: F401
