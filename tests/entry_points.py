"""Every public function that runs a model, called on a classifier of four features and three classes."""

import flatness


def calls(x, y):
    """``call(model)`` by name."""
    given, quiet = (x, y), {"progress": False}

    def measured(measures, **options):
        return lambda model: flatness.measure(model, given, measures=measures, **options, **quiet)

    return {
        "measure": measured(["hessian_trace", "relative_flatness", "fisher_rao"]),
        "measure as a copy": measured("hessian_trace", dtype=x.float().dtype),
        "finite differences": measured("hessian_trace", curvature="finite_differences"),
        "pac_bayes_flatness": measured("pac_bayes_flatness"),
        "epsilon_sharpness": measured("epsilon_sharpness"),
        "plan": lambda model: flatness.plan(model, given, **quiet),
        "network_spectrum": lambda model: flatness.network_spectrum(model, given, **quiet),
        "pac_bayes_bound": lambda model: flatness.pac_bayes_bound(model, given, draws=2, **quiet),
        "feature_robustness": lambda model: flatness.feature_robustness(model, given, matrices=4, **quiet),
        "representativeness": lambda model: flatness.representativeness(model, given, draws=3, **quiet),
        "generalization_bound": lambda model: flatness.generalization_bound(model, given, draws=3, **quiet),
        "locally_constant_labels": lambda model: flatness.locally_constant_labels(
            model, given, draws=2, **quiet
        ),
        "line": lambda model: flatness.landscape.line(model, given, points=3, count=1, **quiet),
        "surface": lambda model: flatness.landscape.surface(model, given, points=2, **quiet),
        "density": lambda model: flatness.landscape.density(model, given, runs=1, **quiet),
        "symmetries": lambda model: flatness.symmetries(model, x[:2]),
        "rescale": lambda model: flatness.rescale(model, x[:2]),
        "vertical_directions": lambda model: flatness.vertical_directions(
            model, flatness.symmetries(model, x[:2])
        ),
        "check_invariance": lambda model: flatness.check_invariance(
            model, given, measures="hessian_trace", **quiet
        ),
        "Monitor": lambda model: flatness.Monitor(given, every=1).step(model),
    }
