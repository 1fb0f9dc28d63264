"""Hessians of layers on micro-batches, from signals of all output directions.

For each sample and output direction k, a product with a matrix V shaped like W (G, d, m) says how far V lies
along g_k row by row, and adds that much of g_k: along_s = ⟨g_ks, V_s⟩, result_s = Σ_k c_k along_s g_ks. With
`rows` each row keeps its own number, which gives the row blocks H_ss; otherwise the numbers of all rows are
added first, which gives the whole Hessian.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flatness.curvature.operators.spectrum import HessianSlice
from flatness.curvature.sums.exact import Signal, input_of, rows_of_features, signals
from flatness.curvature.sums.routes import Routes
from flatness.losses import Items
from flatness.network.recording import Recording
from flatness.problem.problem import Problem


@contextmanager
def signal_slices(problem: Problem, routes: Routes) -> Iterator[Callable[[Any], dict[str, HessianSlice]]]:
    """A pass over the data that sends all output directions back to the layers.

    Args:
        problem: The model, data and loss.
        routes: The layers.
    """
    with Recording(routes.modules(), edges=routes.backward, copy_inputs=routes.copy_inputs) as recording:

        def slices_of(batch: Any) -> dict[str, HessianSlice]:
            recording.clear()
            with torch.set_grad_enabled(routes.backward):
                items = problem.items(batch)
            slices = dict(_slices(problem, routes, recording, items))
            recording.clear()
            return slices

        yield slices_of


@dataclass
class SignalSlice:
    """From signals δ (G, d, n, R, P) at features Φ (G, m, n·P); or derivatives g (G, d, n, R, m) alone.

    Attributes:
        delta: δ, or g where that is smaller than δ and Φ.
        Phi: Φ; None for g.
        c: Weights (n, R), or None for +1.
    """

    delta: Tensor
    Phi: Tensor | None
    c: Tensor | None

    @classmethod
    def of(cls, Phi: Tensor, arrived: list[Signal], rows: int) -> SignalSlice:
        """From Φ (n, G, m, P) and all that arrived at a layer, which has so many rows in each group."""
        n, G, m, P = Phi.shape
        # Nothing arrives where the output does not depend on the layer.
        delta = torch.cat([one.value for one in arrived], 2) if arrived else Phi.new_zeros(n, G, 1, rows, P)
        weights = [one.c for one in arrived if one.c is not None]
        c = torch.cat(weights, 1) if weights else None
        if _keeps_g(m, P):
            g = (delta.flatten(2, 3) @ Phi.mT).unflatten(2, delta.shape[2:4])
            return cls(g.permute(1, 3, 0, 2, 4).contiguous(), None, c)
        features = Phi.permute(1, 2, 0, 3).reshape(G, m, n * P)
        return cls(delta.permute(1, 3, 0, 2, 4).contiguous(), features, c)

    def __call__(self, V: Tensor, rows: bool) -> Tensor:
        """Y = VΦ, then the Hessian with respect to the preactivations, then Φᵀ."""
        G, d, n, _, P = self.delta.shape
        if self.Phi is None:
            along = (self.delta.flatten(2, 3) @ V[..., None]).view(self.delta.shape[:4])
        else:
            along = torch.einsum("gdnrp,gdnp->gdnr", self.delta, (V @ self.Phi).reshape(G, d, n, P))
        along = along if rows else along.sum((0, 1), keepdim=True).expand_as(along)
        along = along if self.c is None else along * self.c
        if self.Phi is None:
            return (along.reshape(G, d, 1, -1) @ self.delta.flatten(2, 3))[:, :, 0]
        back = torch.einsum("gdnrp,gdnr->gdnp", self.delta, along)
        return back.reshape(G, d, n * P) @ self.Phi.mT


@dataclass
class SoftmaxSlice:
    """The last layer under cross-entropy: features φ (N, m), probabilities p (N, K) and weights a (N,).

    The Hessian a(diag p − ppᵀ) is applied around the most likely class, which does not cancel at p → 1.
    """

    phi: Tensor
    p: Tensor
    a: Tensor

    def __call__(self, V: Tensor, rows: bool) -> Tensor:
        """φᵀ-weighted products with the output Hessian."""
        y = self.phi @ V[0].T
        top = self.p.argmax(1, keepdim=True)
        q = self.p.scatter(1, top, 0.0)
        if rows:
            r = q.sum(1, keepdim=True)
            out = y * (q * (1 - q)).scatter(1, top, (1 - r) * r)
        else:
            y = y - y.gather(1, top)
            out = q * (y - (q * y).sum(1, keepdim=True))
            out = out.scatter(1, top, -out.sum(1, keepdim=True))
        return ((out * self.a[:, None]).T @ self.phi)[None]


def _slices(
    problem: Problem, routes: Routes, recording: Recording, items: Items
) -> Iterator[tuple[str, HessianSlice]]:
    n = items.logits.shape[0]
    # Of the layers' inputs no derivatives are needed: there are no statistics to compute.
    bare = [replace(route, needs=frozenset()) for route in routes.layers]
    arrived: dict[str, list[Signal]] = {route.name: [] for route in bare}
    for signal in signals(problem, items, recording, Routes(bare)):
        arrived[signal.to.name].append(signal)
    for route in bare:
        if route.kind == "softmax head":
            a = problem.loss.softmax_weight(items)
            assert a is not None  # or this would be no such route
            p = items.logits.detach().flatten(0, 1).softmax(1)
            yield route.name, SoftmaxSlice(rows_of_features(route, recording, n), p, a.flatten().to(p.dtype))
            continue
        if route.kind == "separable":
            Phi = rows_of_features(route, recording, n)[:, None, :, None]
        else:
            Phi = route.layer.features(input_of(route, recording), n)
        yield route.name, SignalSlice.of(Phi, arrived[route.name], route.layer.matrix().shape[1])


def _keeps_g(features: int, positions: int) -> bool:
    """Whether g (d×m) is kept rather than δ (d×P) and Φ (m×P): the smaller one."""
    return positions >= features


def kept_bytes_per_sample(routes: Routes, directions: int, itemsize: int) -> int:
    """Memory per sample when the slices are kept between products.

    Args:
        routes: The layers.
        directions: Signals per sample, R·T.
        itemsize: Bytes of a number.
    """
    total = 0
    for route in routes.layers:
        G, d, m = route.layer.matrix().shape
        P = route.positions
        if route.kind == "softmax head":
            total += P * (m + d)
        elif route.kind == "passes" and _keeps_g(m, P):
            total += directions * G * d * m
        else:
            total += P * G * (m + d * directions)
    return total * itemsize
