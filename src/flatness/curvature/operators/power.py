"""The power method of rangamani2019, with its stopping rule; driven like `TopEigenvalues`."""

from __future__ import annotations

from torch import Tensor


class PowerMethod:
    """The eigenvalue of largest size of one symmetric operator on R^N.

    Algorithm 1 of the paper, in coordinates in which the metric is the identity: multiply, normalise, stop
    when the vector changes by less than the tolerance. It finds |λ|_max; Lanczos needs fewer products.

    Args:
        start: The first vector (N,).
        tolerance: Accepted ‖v_{t+1} − v_t‖, up to sign.
        max_products: Give up after this many products.

    Attributes:
        value: vᵀAv of the last vector multiplied.
        history: Its course, one entry per product.
        vector: v, of unit length.
        residual: ‖Av − θv‖ of the last vector multiplied.
    """

    def __init__(self, start: Tensor, *, tolerance: float, max_products: int) -> None:
        self.vector = start / start.norm()
        self.value, self.residual = float("nan"), float("inf")
        self.converged = False
        self.products = 0
        self.history: list[float] = []
        self._tolerance, self._max_products = tolerance, max_products

    @property
    def done(self) -> bool:
        """Whether the vector stands still or the products are used up."""
        return self.converged or self.products >= self._max_products

    def query(self) -> Tensor:
        """The vector whose product is wanted next."""
        return self.vector

    def tell(self, product: Tensor) -> None:
        """Take the product A v of the last `query`."""
        self.products += 1
        v = self.vector
        self.value = float(v @ product)
        self.residual = float((product - self.value * v).norm())
        self.history.append(self.value)
        length = product.norm()
        if float(length) == 0:
            self.converged = True
            return
        # A negative eigenvalue turns the vector around at every product; that is no change.
        following = product / (length if self.value >= 0 else -length)
        self.converged = bool((following - v).norm() < self._tolerance)
        self.vector = following
