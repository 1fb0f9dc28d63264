"""The minimum over rescalings: against a general optimiser, closed forms, and its own certificate."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from flatness.catalogue.engines.balancing import _bounds, balance


def objective(z, a, b):
    u = z[: len(a), None] + z[len(a) :]
    up, down = a * np.exp(u), b * np.exp(-u)
    gradient = np.concatenate([(up - down).sum(1), (up - down).sum(0)])
    return (up + down).sum(), gradient


def by_descent(a, b):
    start = np.zeros(sum(a.shape))
    return minimize(
        objective,
        start,
        (a, b),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 10000, "ftol": 1e-15, "gtol": 1e-12},
    ).fun


def random_pair(seed, d, m):
    rng = np.random.default_rng(seed)
    skew = np.exp(rng.normal(size=(d, 1)) + 2 * rng.normal(size=(1, m)))
    return rng.exponential(size=(d, m)) ** 2 * skew, rng.normal(size=(d, m)) ** 2


@pytest.mark.parametrize(("d", "m"), [(1, 1), (1, 5), (4, 3), (7, 11), (30, 20)])
def test_agrees_with_a_general_optimiser(d, m):
    a, b = random_pair(d * 100 + m, d, m)
    solved = balance(a, b)
    assert solved.value == pytest.approx(by_descent(a, b), rel=1e-8)
    assert abs(solved.gap) < 1e-9


def test_one_entry_is_twice_the_geometric_mean():
    assert balance(np.array([[9.0]]), np.array([[4.0]])).value == pytest.approx(12.0, rel=1e-14)


def test_the_unattained_infimum_of_a_triangular_pattern():
    """Row 2 → column 1 is missing in a, row 1 → column 2 in b: 2√(1·4) + 2√(3·6) remain."""
    solved = balance(np.array([[1.0, 2.0], [0.0, 3.0]]), np.array([[4.0, 0.0], [5.0, 6.0]]))
    assert solved.value == pytest.approx(4 + 2 * np.sqrt(18), rel=1e-14)
    assert solved.lower == pytest.approx(solved.value, rel=1e-12)


@pytest.mark.parametrize("which", ["row of a", "column of a", "all of a", "all of b"])
def test_zero_rows_and_columns_drop_out(which):
    a, b = random_pair(5, 6, 4)
    rows, columns = np.arange(6), np.arange(4)
    if which == "row of a":
        a[2] = 0
        rows = np.delete(rows, 2)
    elif which == "column of a":
        a[:, 1] = 0
        columns = np.delete(columns, 1)
    elif which == "all of a":
        a[:] = 0
    else:
        b[:] = 0
    expected = 0.0 if "all" in which else by_descent(a[np.ix_(rows, columns)], b[np.ix_(rows, columns)])
    assert balance(a, b).value == pytest.approx(expected, rel=1e-8, abs=1e-300)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), d=st.integers(1, 8), m=st.integers(1, 8), share=st.floats(0.2, 1.0))
def test_certified_and_unchanged_by_rescaling(seed, d, m, share):
    rng = np.random.default_rng(seed)
    a, b = random_pair(seed, d, m)
    a *= rng.random(a.shape) < share
    b *= rng.random(b.shape) < share
    solved = balance(a, b)
    assert solved.lower <= solved.value * (1 + 1e-12)
    assert solved.gap < 1e-8
    factors = np.exp(rng.normal(size=(d, 1)) + rng.normal(size=(1, m)))
    assert balance(a * factors, b / factors).value == pytest.approx(solved.value, rel=1e-7, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_away_from_the_minimum_the_certificate_still_brackets_it(seed):
    """What it would say if the sweeps were stopped anywhere: the lower bound lies below the true minimum."""
    a, b = random_pair(seed, 6, 9)
    rng = np.random.default_rng(seed)
    smallest = balance(a, b, tolerance=1e-13)
    for distance in (1.0, 0.1, 0.01):
        r = np.exp(smallest.x + distance * rng.normal(size=6))
        c = np.exp(smallest.y + distance * rng.normal(size=9))
        value, lower = _bounds(a, b, r, c)
        assert value > smallest.value * (1 + 1e-6)
        assert lower < smallest.value
    # and close by it is tight: both distances are of second order
    assert smallest.value - lower < 10 * (value - smallest.value)


def test_numbers_hundreds_of_orders_apart():
    """e^x and e^y would overflow; the minimum is that of the same matrices without the factors."""
    a, b = random_pair(3, 4, 5)
    factors = np.array([1e150, 1e-150, 1.0, 1e100])[:, None] * np.array([1e140, 1.0, 1e-140, 1e-100, 1e50])
    scaled = balance(a * factors, b / factors)
    assert scaled.value == pytest.approx(balance(a, b).value, rel=1e-9)
    assert scaled.gap < 1e-8
