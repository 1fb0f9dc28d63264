"""The minimum over all rescalings of rows and columns, solved and certified.

For non-negative matrices a and b, normalized sharpness asks for the infimum over x and y of

    S(x, y) = Σ_ij a_ij e^{x_i + y_j} + b_ij e^{−x_i − y_j},

which is jointly convex. For fixed y the best x_i = ½ log(Σ_j b_ij e^{−y_j} / Σ_j a_ij e^{y_j}) is known, so
rows and columns are minimised in turn; Newton steps finish. Any p with vanishing row and column sums gives a
lower bound (the dual), so the result comes with a certificate, not with a count of iterations.

Zeros can make the infimum unattained. Draw an edge row i → column j where a_ij > 0 and column j → row i where
b_ij > 0: entries whose row and column lie in different strongly connected components can be scaled away and
contribute 0; inside a component the minimum is attained.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Balance:
    """The solution.

    Attributes:
        value: S at (x, y), entries that can be scaled away left out: an upper bound of the infimum.
        lower: A lower bound of the infimum, from the dual.
        x: Logarithms of the row factors (d,).
        y: Logarithms of the column factors (m,).
        iterations: Sweeps and Newton steps used, the most of any component.
    """

    value: float
    lower: float
    x: Array
    y: Array
    iterations: int

    @property
    def gap(self) -> float:
        """Certified relative distance from the infimum."""
        return (self.value - self.lower) / self.value if self.value > 0 else 0.0


def balance(a: Array, b: Array, *, tolerance: float = 1e-9, max_iterations: int = 1000) -> Balance:
    """Minimise S over x and y.

    Args:
        a: Non-negative (d, m).
        b: Non-negative (d, m).
        tolerance: Relative gap between value and lower bound to stop at.
        max_iterations: Limit of sweeps per component.

    Example:
        >>> import numpy as np
        >>> solved = balance(np.array([[1.0, 2.0], [0.0, 3.0]]), np.array([[4.0, 0.0], [5.0, 6.0]]))
        >>> round(solved.value, 5)
        12.48528
    """
    d, m = a.shape
    x, y = np.zeros(d), np.zeros(m)
    value = lower = 0.0
    iterations = 0
    labels = _components(a, b)
    for label in np.unique(labels):
        rows, columns = np.flatnonzero(labels[:d] == label), np.flatnonzero(labels[d:] == label)
        if not len(rows) or not len(columns):
            continue
        part = np.ix_(rows, columns)
        solved = _solve(a[part], b[part], tolerance, max_iterations)
        x[rows], y[columns] = solved.x, solved.y
        value, lower = value + solved.value, lower + solved.lower
        iterations = max(iterations, solved.iterations)
    return Balance(value, lower, x, y, iterations)


def _components(a: Array, b: Array) -> NDArray[np.int32]:
    """Strongly connected component of every row and column, rows first."""
    d, m = a.shape
    out_i, out_j = np.nonzero(a)
    in_i, in_j = np.nonzero(b)
    source, target = np.concatenate([out_i, d + in_j]), np.concatenate([d + out_j, in_i])
    graph = coo_array((np.ones(len(source), dtype=np.int8), (source, target)), shape=(d + m, d + m)).tocsr()
    return connected_components(graph, directed=True, connection="strong")[1]


def _solve(a: Array, b: Array, tolerance: float, max_iterations: int) -> Balance:
    """One strongly connected component: sweeps until the gradient is small, then Newton steps."""
    with np.errstate(divide="ignore"):
        log_a, log_b = np.log(a), np.log(b)
    x, y = np.zeros(len(a)), np.zeros(a.shape[1])
    iterations = 0
    while iterations < max_iterations:
        iterations += 1
        x = 0.5 * (_log_sum(log_b - y, 1) - _log_sum(log_a + y, 1))
        y = 0.5 * (_log_sum(log_b - x[:, None], 0) - _log_sum(log_a + x[:, None], 0))
        up, down = _terms(log_a, log_b, x, y)
        imbalance = np.abs((up - down).sum(1)).max() / (up + down).sum(1).max()
        if imbalance < 1e-4 or iterations % 25 == 0:
            x, y, steps = _newton(log_a, log_b, x, y)
            iterations += steps
            up, down = _terms(log_a, log_b, x, y)
            value, lower = float((up + down).sum()), _dual(a, b, up, down)
            if value - lower <= tolerance * value:
                return Balance(value, lower, x, y, iterations)
    up, down = _terms(log_a, log_b, x, y)
    return Balance(float((up + down).sum()), _dual(a, b, up, down), x, y, iterations)


def _log_sum(values: Array, axis: int) -> Array:
    """Log of the sum of exponentials."""
    largest = values.max(axis, keepdims=True)
    return (np.log(np.exp(values - largest).sum(axis, keepdims=True)) + largest).squeeze(axis)


def _terms(log_a: Array, log_b: Array, x: Array, y: Array) -> tuple[Array, Array]:
    """The two summands of S: a e^{x+y} and b e^{−x−y}."""
    u = x[:, None] + y
    return np.exp(log_a + u), np.exp(log_b - u)


def _newton(log_a: Array, log_b: Array, x: Array, y: Array, steps: int = 4) -> tuple[Array, Array, int]:
    """Newton steps with halving; each solves the (d + m) system of row and column sums."""
    up, down = _terms(log_a, log_b, x, y)
    taken = 0
    for _ in range(steps):
        alpha, beta = _potentials(up + down, (up - down).sum(1), (up - down).sum(0))
        size = 1.0
        while size > 1e-4:
            trial = x - size * alpha, y - size * beta
            new_up, new_down = _terms(log_a, log_b, *trial)
            if (new_up + new_down).sum() < (up + down).sum():
                break
            size /= 2
        else:
            break
        (x, y), (up, down) = trial, (new_up, new_down)
        taken += 1
        if np.abs((up - down).sum(1)).max() < 1e-10 * (up + down).sum(1).max():
            break
    return x, y, taken


def _potentials(w: Array, r: Array, c: Array) -> tuple[Array, Array]:
    """α, β with Σ_j w_ij (α_i + β_j) = r_i and Σ_i w_ij (α_i + β_j) = c_j (unique up to a constant).

    The longer side is eliminated first: the Schur complement on the other is a Laplacian, one of whose
    potentials is 0.
    """
    if w.shape[0] < w.shape[1]:
        beta, alpha = _potentials(w.T, c, r)
        return alpha, beta
    row_sums = w.sum(1)
    scaled = w / row_sums[:, None]
    laplacian = np.diag(w.sum(0)) - w.T @ scaled
    beta = np.zeros(w.shape[1])
    if len(beta) > 1:
        beta[1:] = solve(laplacian[1:, 1:], (c - scaled.T @ r)[1:], assume_a="sym")
    return (r - w @ beta) / row_sums, beta


def _dual(a: Array, b: Array, up: Array, down: Array) -> float:
    """A lower bound of the infimum: the dual at up − down, corrected to vanishing row and column sums."""
    flow = up - down
    for _ in range(2):
        alpha, beta = _potentials(up + down, flow.sum(1), flow.sum(0))
        flow = flow - (up + down) * (alpha[:, None] + beta)
    root = np.sqrt(flow**2 + 4 * a * b)
    with np.errstate(divide="ignore", invalid="ignore"):
        # e^u = (p + √(p² + 4ab)) / 2a, written so that neither sign of p cancels
        u = np.where(flow > 0, np.log((root + flow) / (2 * a)), np.log(2 * b / (root - flow)))
        terms = np.where((a == 0) & (b == 0), 0.0, root - flow * u)
    terms = np.where(flow == 0, root, terms)
    # A one-sided entry whose flow has the wrong sign makes the bound empty.
    wrong = ((b == 0) & (flow < 0) & (a > 0)) | ((a == 0) & (flow > 0) & (b > 0))
    return float("-inf") if wrong.any() else float(terms.sum())
