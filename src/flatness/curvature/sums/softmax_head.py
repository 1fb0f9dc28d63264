"""The last layer under cross-entropy: all statistics from one forward pass, for any number of classes.

For logits f = Wφ + b and p = softmax(f), the Hessian with respect to f is a·(diag p − ppᵀ), so every
statistic is a
*variance under p* times squares of features; with w_k the rows of W,

    κ_Tr = mean a ‖φ‖² (Σ_k p_k ‖w_k‖² − ‖Σ_k p_k w_k‖²).

That difference cancels in float32 for confident samples. It is taken around the most likely class j instead:
with q = p without j, r = Σ q and v = Σ_k q_k (w_k − w_j), the variance is Σ_k q_k (w_k − w_j)² − v², in which
every term is O(r).
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatness.network.layers import Layer

# Numbers that blocks of rows × classes held at once may come to: rows are taken in chunks that fit.
_CHUNK = 64_000_000
# Statistics of single classes: they hold three such blocks at once, the others one.
_PER_CLASS = frozenset({"row_traces", "incoming", "diagonal", "bias", "block_traces"})
# Statistics in which features count by the length of their rows alone.
_OF_ROWS = frozenset({"relative"})
# Entries of W above which it is not copied without need.
_LARGE = 4_000_000


class SoftmaxHead:
    """The closed form for one layer, applied to one micro-batch after another.

    Args:
        layer: The last layer, W (1, K, m).
        needs: The statistics to compute; "bias" for the diagonal of the bias.
        spread: V per input unit, for `relative_normalized`.
    """

    def __init__(self, layer: Layer, needs: frozenset[str], spread: Tensor | None) -> None:
        self._needs = needs
        self._W = layer.matrix()[0]
        self._blocks = 3 if needs & _PER_CLASS else 1
        centred = _centred(self._W)
        self._V = layer.spread_per_column(spread)[0].to(centred) if spread is not None else None
        self._plain = self._scaled = self._columns = None
        if "outgoing" in needs:
            self._columns = _PerColumnVariance(centred)
        else:
            self._plain = _TotalVariance(centred) if "relative" in needs else None
            self._scaled = _TotalVariance(centred * self._V) if self._V is not None else None

    def sums(
        self, phi: Tensor, logits: Tensor, a: Tensor, tops: list[Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The statistics of one micro-batch, taken in chunks of rows.

        Args:
            phi: Features (N, m), one row per prediction.
            logits: Outputs (N, K), up to a constant per row.
            a: Weights (N,), such that the output Hessian is a·(diag p − ppᵀ).
            tops: Gets the largest output and the logarithm of its probability, (rows, 2) for every chunk.
        """
        total: dict[str, Tensor] = {}
        rows = max(1, _CHUNK // (self._blocks * logits.shape[1]))
        for start in range(0, logits.shape[0], rows):
            part = slice(start, start + rows)
            p = _Probabilities(logits[part], tops)
            for name, value in self._chunk(phi[part], p, a[part].to(phi.dtype)).items():
                total[name] = total[name] + value if name in total else value
        return total

    def _chunk(self, phi: Tensor, p: _Probabilities, a: Tensor) -> dict[str, Tensor]:
        V = self._V
        sums: dict[str, Tensor] = {}
        if self._plain is not None:
            sums["relative"] = torch.linalg.vector_norm(phi, dim=1).square() @ (a * self._plain(p))
        if self._needs <= _OF_ROWS:
            return sums
        phi2 = phi.square()
        if self._columns is not None:
            variance = self._columns(p) * a[:, None]
            sums["outgoing"] = (phi2 * variance).sum(0)
            if "relative" in self._needs:
                sums["relative"] = phi2.sum(1) @ variance.sum(1)
            if V is not None:
                sums["relative_normalized"] = (phi2 @ _inverse(V).square()) @ (variance @ V.square())
        if self._scaled is not None and V is not None:
            sums["relative_normalized"] = (phi2 @ _inverse(V).square()) @ (a * self._scaled(p))
        if self._needs & _PER_CLASS:
            sums |= _row_sums(self._needs, self._W, phi, phi2, p.of_classes(), p.top, p.r, a)
        return sums


def holds_one_block(needs: frozenset[str]) -> bool:
    """Whether these statistics take one block of rows × classes beside the logits, not several."""
    return not needs & _PER_CLASS


def _centred(W: Tensor) -> Tensor:
    """W (K, m) without the mean of its rows, which changes no variance but makes the terms that cancel small.

    A large W whose mean is small beside its rows is used as it is.
    """
    mean = W.mean(0)
    if W.numel() > _LARGE and bool(
        mean.square().sum() <= 0.01 * torch.linalg.vector_norm(W).square() / len(W)
    ):
        return W
    return W - mean


class _Probabilities:
    """The softmax of logits (N, K), the most likely class j apart.

    Torch divides by a sum that loses digits over many classes, in float32 one at 10⁵. What is computed from
    its probabilities is divided by their own sum, which is taken pair by pair.

    Args:
        logits: The logits.
        tops: Gets the largest logit and the logarithm of its probability, (N, 2).

    Attributes:
        top: j (N, 1).
        r: Σ q = 1 − p_j (N, 1), which does not cancel.
    """

    def __init__(self, logits: Tensor, tops: list[Tensor] | None) -> None:
        largest, self.top = logits.max(1, keepdim=True)
        self._others = logits.softmax(1)
        likely = self._others.gather(1, self.top)
        self._others.scatter_(1, self.top, 0.0)
        self.r = self._others.sum(1, keepdim=True)
        # Half precision is summed in float32, and has no digits for the rest.
        self._total = self.r + likely if logits.element_size() > 2 else torch.ones_like(self.r)
        self.r = self.r / self._total
        if tops is not None:
            # Near 1 a probability has no digits left for its logarithm; r has.
            log = torch.where(self.r < 0.5, torch.log1p(-self.r), (likely / self._total).log())
            tops.append(torch.cat([largest, log], dim=1))

    def mean(self, values: Tensor) -> Tensor:
        """Σ q v for values v of the classes, (K,) or (K, m)."""
        return (self._others @ values).div_(self._total if values.dim() == 2 else self._total[:, 0])

    def of_classes(self) -> Tensor:
        """The probabilities q, with that of j set to 0 (N, K)."""
        self._others.div_(self._total)
        self._total = torch.ones_like(self._total)
        return self._others


class _PerColumnVariance:
    """Var_p(W_·t) for every sample and column t: (N, m)."""

    def __init__(self, W: Tensor) -> None:
        self._W, self._squares = W, W.square()

    def __call__(self, p: _Probabilities) -> Tensor:
        w_top, r = self._W[p.top[:, 0]], p.r
        first = p.mean(self._W)
        second = p.mean(self._squares) - 2 * first * w_top + r * w_top.square()
        return (second - (first - r * w_top).square()).clamp_(min=0)


class _TotalVariance:
    """Σ_t Var_p(W_·t) for every sample, with one product of (N, K) and (K, m): (N,)."""

    def __init__(self, W: Tensor) -> None:
        self._W, self._norms = W, torch.linalg.vector_norm(W, dim=1).square()

    def __call__(self, p: _Probabilities) -> Tensor:
        top, r = p.top[:, 0], p.r
        w_top, first = self._W[top], p.mean(self._W)
        # ‖v‖² and what is mixed in Σ q ‖w − w_j‖², gathered: every term is O(r).
        mixed = (torch.addcmul(first, w_top, 1 - r, value=2) * first).sum(1)
        second = torch.addcmul(p.mean(self._norms), (r * (1 - r))[:, 0], self._norms[top])
        return second.sub_(mixed).clamp_(min=0)


def _row_sums(
    needs: frozenset[str], W: Tensor, phi: Tensor, phi2: Tensor, q: Tensor, top: Tensor, r: Tensor, a: Tensor
) -> dict[str, Tensor]:
    """What is known per class; q is softmax with the largest entry set to 0 and r = Σ q."""
    sums: dict[str, Tensor] = {}
    if "block_traces" in needs:
        sums["block_traces"] = _block_traces(q, top, r, a * phi2.sum(1))[None]
    variance = _bernoulli_variance(q, top, r).mul_(a[:, None])
    sums["bias"] = variance.sum(0)
    if "row_traces" in needs:
        sums["row_traces"] = phi2.sum(1) @ variance
    if "incoming" in needs:
        sums["incoming"] = ((phi @ W.T).square_().mul_(variance)).sum(0)
    if "diagonal" in needs:
        sums["diagonal"] = (variance.T @ phi2)[None]
    return sums


def _bernoulli_variance(q: Tensor, top: Tensor, r: Tensor) -> Tensor:
    """p_s (1 − p_s) for every class; for the most likely one 1 − p is r, which does not cancel: (N, K)."""
    return (q * (1 - q)).scatter_(1, top, (1 - r) * r)


def _block_traces(q: Tensor, top: Tensor, r: Tensor, weight: Tensor) -> Tensor:
    """Σ weight (diag p − ppᵀ): (K, K)."""
    p = q.scatter(1, top, 1 - r)
    blocks = -(p * weight[:, None]).T @ p
    blocks.diagonal().copy_(weight @ _bernoulli_variance(q, top, r))
    return blocks


def _inverse(V: Tensor) -> Tensor:
    return torch.where(V > 0, 1 / V, 0)
