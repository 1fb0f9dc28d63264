"""Small studies on scikit-learn's digits."""

from __future__ import annotations

from flatness.study.spec.grid import expanded

SMALL = {
    "title": "digits",
    "data": {"name": "digits", "limit": 120, "test_limit": 60},
    "model": {"name": "mlp", "options": {"sizes": [64, 8, 10]}},
    "grid": {"learning_rate": [0.1, 0.4], "batch_size": 32, "seed": 3},
    "stop": {"epochs": 3},
    "measure": {"measures": ["relative_flatness", "hessian_trace"]},
    "analysis": {"resamples": 50, "permutations": 50},
}


def study(**changes):
    """`SMALL` with tables changed key by key."""
    return {**SMALL, **{name: {**SMALL.get(name, {}), **table} for name, table in changes.items()}}


def configurations(**changes):
    return expanded("", study(**changes), "a test")
