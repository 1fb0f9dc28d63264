"""The minimum over all rescalings of rows and columns, solved and certified.

For non-negative matrices a and b, normalized sharpness asks for the infimum over x and y of

    S(x, y) = Σ_ij a_ij e^{x_i + y_j} + b_ij e^{−x_i − y_j},

which is jointly convex. For fixed y the best x_i = ½ log(Σ_j b_ij e^{−y_j} / Σ_j a_ij e^{y_j}) is known, so
rows and columns are minimised in turn: with r = e^x and c = e^y a sweep is four products of a matrix and a
vector. Newton steps help where sweeps are slow. Any p with vanishing row and column sums gives a lower bound
(the dual), so the result comes with a certificate, not with a count of iterations.

Zeros can make the infimum unattained. Draw an edge row i → column j where a_ij > 0 and column j → row i where
b_ij > 0: entries whose row and column lie in different strongly connected components can be scaled away and
contribute 0; inside a component the minimum is attained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

Array = NDArray[np.float64]
# Turns of rows and columns after which a linear system is solved directly.
_TURNS = 40
# Sweeps and Newton steps of one component.
_MOST_ITERATIONS = 1000


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


def balance(a: Array, b: Array, *, tolerance: float = 1e-9) -> Balance:
    """Minimise S over x and y.

    Args:
        a: Non-negative (d, m).
        b: Non-negative (d, m).
        tolerance: Relative gap between value and lower bound to stop at.

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
    for rows, columns in _components(a, b):
        parts = _part(a, rows, columns), _part(b, rows, columns)
        solved = _solve(*parts, tolerance)
        x[rows], y[columns] = solved.x, solved.y
        value, lower = value + solved.value, lower + solved.lower
        iterations = max(iterations, solved.iterations)
    return Balance(value, lower, x, y, iterations)


def _components(a: Array, b: Array) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Rows and columns of every strongly connected component that has both."""
    d, m = a.shape
    # Rows and columns without edges in both directions are components of their own.
    rows, columns = np.flatnonzero(a.any(1) & b.any(1)), np.flatnonzero(a.any(0) & b.any(0))
    if not len(rows) or not len(columns):
        return
    if _connected(_part(a, rows, columns), _part(b, rows, columns)):
        yield rows, columns
        return
    out_i, out_j = np.nonzero(a)
    in_i, in_j = np.nonzero(b)
    source, target = np.concatenate([out_i, d + in_j]), np.concatenate([d + out_j, in_i])
    graph = coo_array((np.ones(len(source), dtype=np.int8), (source, target)), shape=(d + m, d + m)).tocsr()
    labels = connected_components(graph, directed=True, connection="strong")[1]
    for label in np.unique(labels):
        rows, columns = np.flatnonzero(labels[:d] == label), np.flatnonzero(labels[d:] == label)
        if len(rows) and len(columns):
            yield rows, columns


def _part(matrix: Array, rows: NDArray[np.intp], columns: NDArray[np.intp]) -> Array:
    """Some rows and columns; nothing is copied where these are all."""
    return matrix if matrix.shape == (len(rows), len(columns)) else matrix[np.ix_(rows, columns)]


def _connected(a: Array, b: Array) -> bool:
    """Whether all rows and columns are one component: all reach row 0, and row 0 reaches all."""
    for out, back in ((a, b.T), (b, a.T)):
        rows = np.zeros(len(a))
        rows[0] = 1
        columns = np.zeros(a.shape[1])
        count = 0
        while (found := int(rows.sum() + columns.sum())) > count:
            count = found
            columns = ((rows @ out > 0) | (columns > 0)).astype(float)
            rows = ((columns @ back > 0) | (rows > 0)).astype(float)
        if count < sum(a.shape):
            return False
    return True


def _solve(a: Array, b: Array, tolerance: float) -> Balance:
    """One strongly connected component."""
    x, y = np.zeros(len(a)), np.zeros(a.shape[1])
    try:
        return _descend(a, b, x, y, tolerance)
    except FloatingPointError:
        # Numbers too far apart for e^x and e^y: one sweep in logarithms brings them together.
        with np.errstate(divide="ignore"):
            log_a, log_b = np.log(a), np.log(b)
        x = 0.5 * (_log_sum(log_b, 1) - _log_sum(log_a, 1))
        y = 0.5 * (_log_sum(log_b - x[:, None], 0) - _log_sum(log_a + x[:, None], 0))
        u = x[:, None] + y
        return _descend(np.exp(log_a + u), np.exp(log_b - u), x, y, tolerance)


def _descend(a: Array, b: Array, x: Array, y: Array, tolerance: float) -> Balance:
    """Sweeps until the gradient is small, Newton steps where the gap is not; a and b are those at (x, y)."""
    r, c = np.ones(len(a)), np.ones(a.shape[1])
    # The gap is of the order of the squared imbalance.
    small = min(1e-4, 0.3 * tolerance**0.5)
    iterations = 0
    value, lower = np.inf, -np.inf
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        up, down = a.sum(1), b.sum(1)
        while iterations < _MOST_ITERATIONS:
            iterations += 1
            r = np.sqrt(down / up)
            c = np.sqrt(((1 / r) @ b) / (r @ a))
            up, down = a @ c, b @ (1 / c)
            imbalance = np.abs(r * up - down / r).max() / (r * up + down / r).max()
            if imbalance < small or iterations % 25 == 0 or iterations == _MOST_ITERATIONS:
                value, lower = _bounds(a, b, r, c)
                if value - lower <= tolerance * value:
                    break
                r, c, steps = _newton(a, b, r, c)
                iterations += steps
                value, lower = _bounds(a, b, r, c)
                if value - lower <= tolerance * value:
                    break
                up, down = a @ c, b @ (1 / c)
    return Balance(value, lower, x + np.log(r), y + np.log(c), iterations)


def _log_sum(values: Array, axis: int) -> Array:
    """Log of the sum of exponentials."""
    largest = values.max(axis, keepdims=True)
    return (np.log(np.exp(values - largest).sum(axis, keepdims=True)) + largest).squeeze(axis)


def _terms(a: Array, b: Array, r: Array, c: Array) -> tuple[Array, Array]:
    """The two summands of S: a e^{x+y} and b e^{−x−y}."""
    scale = r[:, None] * c
    return a * scale, b / scale


def _newton(a: Array, b: Array, r: Array, c: Array) -> tuple[Array, Array, int]:
    """Newton steps with halving; each solves the (d + m) system of row and column sums."""
    up, down = _terms(a, b, r, c)
    taken = 0
    for _ in range(4):
        flow, weights = up - down, up + down
        alpha, beta = _potentials(weights, flow.sum(1), flow.sum(0))
        size = 1.0
        while size > 1e-4:
            trial = r * np.exp(-size * alpha), c * np.exp(-size * beta)
            new_up, new_down = _terms(a, b, *trial)
            if (new_up + new_down).sum() < weights.sum():
                break
            size /= 2
        else:
            break
        (r, c), (up, down) = trial, (new_up, new_down)
        taken += 1
        if np.abs((up - down).sum(1)).max() < 1e-10 * (up + down).sum(1).max():
            break
    return r, c, taken


def _potentials(w: Array, r: Array, c: Array) -> tuple[Array, Array]:
    """α, β with Σ_j w_ij (α_i + β_j) = r_i and Σ_i w_ij (α_i + β_j) = c_j (unique up to a constant).

    Rows and columns in turn; a direct solution where that is slow.
    """
    row_sums, column_sums = w.sum(1), w.sum(0)
    beta = np.zeros(len(c))
    for _ in range(_TURNS):
        alpha = (r - w @ beta) / row_sums
        change = (c - alpha @ w) / column_sums - beta
        beta = beta + change
        # 1e-16: corrections of x and y below rounding, when only noise is left to correct
        if np.abs(change).max() <= 1e-9 * (np.abs(alpha).max() + np.abs(beta).max()) + 1e-16:
            return alpha, beta
    return _solved_potentials(w, r, c)


def _solved_potentials(w: Array, r: Array, c: Array) -> tuple[Array, Array]:
    """The same by elimination.

    The longer side is eliminated first: the Schur complement on the other is a Laplacian, one of whose
    potentials is 0.
    """
    if w.shape[0] < w.shape[1]:
        beta, alpha = _solved_potentials(w.T, c, r)
        return alpha, beta
    row_sums = w.sum(1)
    scaled = w / row_sums[:, None]
    laplacian = np.diag(w.sum(0)) - w.T @ scaled
    beta = np.zeros(w.shape[1])
    if len(beta) > 1:
        beta[1:] = solve(laplacian[1:, 1:], (c - scaled.T @ r)[1:], assume_a="sym")
    return (r - w @ beta) / row_sums, beta


def _bounds(a: Array, b: Array, r: Array, c: Array) -> tuple[float, float]:
    """S at (r, c), and a lower bound: the dual at up − down, corrected to vanishing row and column sums."""
    up, down = _terms(a, b, r, c)
    weights, flow = up + down, up - down
    value = float(weights.sum())
    for _ in range(2):
        alpha, beta = _potentials(weights, flow.sum(1), flow.sum(0))
        flow = flow - weights * (alpha[:, None] + beta)
    return value, _dual(up, down, flow)


def _dual(a: Array, b: Array, flow: Array) -> float:
    """Σ_ij min_u (a e^u + b e^{−u} − flow·u): a lower bound where the flow's row and column sums vanish."""
    root = np.sqrt(flow * flow + 4 * a * b)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # e^u = (p + √(p² + 4ab)) / 2a, written so that neither sign of p cancels
        positive = flow > 0
        u = np.log((root + np.abs(flow)) / (2 * np.where(positive, a, b)))
        terms = root - np.abs(flow) * u
    terms[flow == 0] = root[flow == 0]
    # A one-sided entry whose flow has the wrong sign makes the bound empty.
    wrong = ((b == 0) & (flow < 0) & (a > 0)) | ((a == 0) & (flow > 0) & (b > 0))
    terms[(a == 0) & (b == 0)] = 0.0
    return float("-inf") if wrong.any() else float(terms.sum())
