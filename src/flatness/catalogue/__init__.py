"""The measures of the papers, small functions of shared statistics; importing this fills the catalogue."""

# In the order in which tables show them: the papers' own, then what they are compared with.
from flatness.catalogue import (  # noqa: F401
    baselines,
    petzka2019,
    petzka2021,
    rangamani2019,
    tsuzuku2020,
    tsuzuku2020_bound,
    tsuzuku2020_direct,
)

# isort: split
from flatness.catalogue import (  # noqa: F401
    epsilon_sharpness,
    fisher_rao,
    minimum_sharpness,
    pac_bayes_flatness,
    path_norm,
    sam_sharpness,
    spectral_norm,
)

# isort: split
from flatness.catalogue import adaptive_sharpness  # noqa: F401
