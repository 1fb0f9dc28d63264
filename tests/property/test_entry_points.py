"""Every entry point leaves a random model, its data and the process as they were, and fails only in words."""

import warnings
from functools import partial

import flatness
from property.budget import count, for_examples
from property.recipes import build, drawn
from untouched import untouched

QUIET = {"progress": False}

ENTRY_POINTS = {
    "measure all": lambda m, d, loss, x: flatness.measure(
        m, d, loss, measures="all", max_passes=2, precision=0.5, **QUIET
    ),
    "measure sampled": lambda m, d, loss, x: flatness.measure(
        m, d, loss, method="sampled", max_passes=4, precision=0.5, **QUIET
    ),
    "measure exact": lambda m, d, loss, x: flatness.measure(m, d, loss, method="exact", **QUIET),
    "measure Gauss-Newton": lambda m, d, loss, x: flatness.measure(
        m, d, loss, curvature="gauss_newton", data_stderr=True, max_passes=2, **QUIET
    ),
    "measure differences": lambda m, d, loss, x: flatness.measure(
        m, d, loss, curvature="finite_differences", measures="hessian_trace", max_passes=2, **QUIET
    ),
    "measure last": lambda m, d, loss, x: flatness.measure(m, d, loss, layers="last", **QUIET),
    "plan": lambda m, d, loss, x: str(flatness.plan(m, d, loss)),
    "symmetries": lambda m, d, loss, x: str(flatness.symmetries(m, x)),
    "rescale": lambda m, d, loss, x: flatness.rescale(m, x),
    "check_invariance": lambda m, d, loss, x: flatness.check_invariance(
        m, d, loss, measures=["hessian_trace", "relative_flatness"], trials=1, **QUIET
    ),
    "feature_robustness": lambda m, d, loss, x: flatness.feature_robustness(m, d, loss, matrices=2, **QUIET),
    "representativeness": lambda m, d, loss, x: flatness.representativeness(
        m, d, loss, folds=2, draws=2, **QUIET
    ),
    "generalization_bound": lambda m, d, loss, x: flatness.generalization_bound(
        m, d, loss, folds=2, draws=2, **QUIET
    ),
    "locally_constant_labels": lambda m, d, loss, x: flatness.locally_constant_labels(
        m, d, loss, draws=2, **QUIET
    ),
    "network_spectrum": lambda m, d, loss, x: flatness.network_spectrum(m, d, loss, max_products=8, **QUIET),
    "pac_bayes_bound": lambda m, d, loss, x: flatness.pac_bayes_bound(m, d, draws=2, **QUIET),
    "line": lambda m, d, loss, x: flatness.landscape.line(m, d, loss, count=1, points=3, **QUIET),
    "line of eigenvectors": lambda m, d, loss, x: flatness.landscape.line(
        m, d, loss, directions="eigenvectors", count=1, points=3, **QUIET
    ),
    "surface": lambda m, d, loss, x: flatness.landscape.surface(m, d, loss, points=3, **QUIET),
    "density": lambda m, d, loss, x: flatness.landscape.density(m, d, loss, runs=1, steps=3, **QUIET),
}


def test_entry_points_change_nothing():
    for_examples("entry points", 25, partial(drawn, longest=3), hold_untouched)


def hold_untouched(recipe):
    """Call one entry point, which the recipe's seed chooses; half of the models are in train mode."""
    made = build(recipe)
    name = list(ENTRY_POINTS)[recipe.seed % len(ENTRY_POINTS)]
    made.model.train(recipe.seed // len(ENTRY_POINTS) % 2 == 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            with untouched(made.model, made.x, made.y):
                ENTRY_POINTS[name](made.model, made.data, made.loss, made.x)
        except flatness.FlatnessError:
            count(f"{name}, refused")
        else:
            count(f"{name}, answered")
