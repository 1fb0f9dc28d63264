"""The measures of the papers, small functions of shared statistics; importing this fills the catalogue."""

from flatness.measures import baselines, petzka2019, petzka2021, rangamani2019, tsuzuku2020  # noqa: F401
