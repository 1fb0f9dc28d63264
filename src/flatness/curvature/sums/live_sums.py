"""A layer's statistics on one batch with their graphs: what can be differentiated and added to a loss.

All are of the Gauss-Newton part. At a layer whose output is the network's output up to layout they are closed
forms in W, the features and what the loss makes of the outputs (`output_curvature`, `closed_form_sums`). At
other layers they come from a random signal δ with its graph, as the sampled engine has them (`probed_sums`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flatness.curvature.sums.frame import Frame
from flatness.curvature.sums.kinds import statistics_of
from flatness.curvature.sums.softmax_rows import SoftmaxRows, SoftmaxWeight
from flatness.curvature.sums.statistic import BlockStatistic, SignalPair, SquaredSignals, Statistic
from flatness.losses import Items, Loss
from flatness.losses.base import promote
from flatness.losses.elementwise import Elementwise
from flatness.losses.signs import Signs
from flatness.network.graph import only_layout_between
from flatness.network.layers import Layer
from flatness.network.layers.shared import SharedLayer, Use
from flatness.network.live_calls import LiveCall

DIRECTIONS = 4
"""Columns of U in `probed_sums`."""


def output_curvature(loss: Loss, items: Items, layer: Layer, call: LiveCall) -> Tensor | None:
    """What the loss makes of every position of a layer that puts out what the network does; None for others.

    Under cross-entropy a (n·P,) with ∂²ℓ/∂z² = a·(diag p − ppᵀ), 0 where a position is not used; under other
    losses the second derivatives themselves (n·P, d), with their graph.
    """
    if layer.groups != 1 or call.edge is None or not only_layout_between(items.logits, call.edge):
        return None
    a = loss.softmax_weight(items)
    if a is None:
        assert isinstance(loss, Elementwise)
        sent = loss.curvature_roots(items).square()
    else:
        # What it sends back says which position each prediction comes from, and whether rows are the classes.
        # It sums to zero, so that a log-softmax lets it pass.
        sent = torch.zeros_like(items.logits)
        sent[..., 0], sent[..., 1] = a, -a
    (arrived,) = torch.autograd.grad(
        items.logits, [call.edge], sent, retain_graph=True, create_graph=sent.requires_grad
    )
    tolerance = torch.finfo(arrived.dtype).eps ** 0.5
    rows = promote(_predictions(layer.signals(arrived, len(items.logits))))
    if a is None:
        return rows
    same = rows.shape[1] == sent.shape[2] and not rows[:, 2:].any()
    return rows[:, 0] if same and torch.allclose(rows[:, 0].sum(), a.sum(), rtol=tolerance) else None


def has_closed_form(needs: frozenset[str], loss: Loss, items: Items, layer: Layer) -> bool:
    """Whether these statistics have one where the layer's output is that of the network."""
    softmax = loss.softmax_weight(items) is not None

    def known(one: Statistic) -> bool:
        # Closed forms see columns; where a channel has several, what goes channel by channel does without.
        by_column = layer.taps == 1 or isinstance(one, BlockStatistic)
        return by_column and (one.closed_form if softmax else one.from_squares)

    return all(known(one) for one in statistics_of(needs))


def closed_form_sums(
    needs: frozenset[str],
    loss: Loss,
    items: Items,
    layer: Layer,
    frame: Frame,
    call: LiveCall,
    curvature: Tensor,
) -> dict[str, Tensor]:
    """The sums over a batch of a layer whose positions are the predictions.

    Args:
        needs: The statistics.
        loss: The loss.
        items: The outputs as it sees them.
        layer: The layer.
        frame: Its `live_frame`.
        call: What it was given and returned.
        curvature: As `output_curvature` gives it.
    """
    n = len(items.logits)
    phi = _predictions(promote(layer.features(call.x, n)))
    if loss.softmax_weight(items) is None:
        squares = SquaredSignals(frame, phi, curvature, curvature @ frame.W[0].square())
        return {one.name: one.of_squares(squares) for one in statistics_of(needs)}
    logits = _predictions(promote(layer.signals(call.z, n)))
    rows = SoftmaxRows(SoftmaxWeight(frame), phi, logits, curvature)
    return {one.name: one.of_softmax(rows) for one in statistics_of(needs)}


def probed_sums(
    needs: frozenset[str],
    layer: Layer,
    frame: Frame,
    received: Sequence[tuple[Use, Tensor, Tensor]],
    signs: Signs,
    n: int,
) -> dict[str, Tensor]:
    """The sums over a batch from one random signal per sample.

    Where a sample meets the layer at many positions its derivative g costs as much as the layer itself.
    Statistics made of products of its rows, as relative flatness is, then take g U instead, with random signs
    U (m, 4) of the sample's own, scaled such that E U Uᵀ = 1.

    Args:
        needs: The statistics.
        layer: The layer.
        frame: Its `live_frame`.
        received: For every call of every use of its weight the input and the signal at the output.
        signs: Where U comes from.
        n: Number of samples.
    """
    if isinstance(layer, SharedLayer):
        each = [(use, _promoted(x), promote(dz)[None]) for use, x, dz in received]
        g = layer.gradient(each, n)
        assert g is not None
        return _of_gradients(needs, frame, g[0])
    ((_, x, dz),) = received
    x, dz, statistics = promote(x), promote(dz), statistics_of(needs)
    delta = layer.signals(dz, n)
    G, d, m = frame.W.shape
    if _projects(statistics, layer, d, delta.shape[-1]):
        U = signs.like(delta.new_empty(n, G, DIRECTIONS, m)) * DIRECTIONS**-0.5
        g = delta @ layer.along(x, U, n).mT
        return {one.name: one.of_product(frame, g, g).sum(0) for one in statistics}  # type: ignore[union-attr]
    if _forms_g(statistics, d, m, delta.shape[-1]):
        return _of_gradients(needs, frame, layer.gradients(x, dz, n))
    pair = SignalPair(frame, layer.seen(x, n), delta, delta)
    return {one.name: one.of_signals(pair).sum(0) for one in statistics}  # type: ignore[union-attr]


def live_frame(layer: Layer) -> Frame:
    """The layer's weight with its graph, as statistics see it."""
    return Frame(promote(layer.arranged(layer.weight)), layer.taps)


def _of_gradients(needs: frozenset[str], frame: Frame, g: Tensor) -> dict[str, Tensor]:
    """From derivatives g (n, G, d, m)."""
    return {one.name: one.of_pair(frame, g, g).sum(0) for one in statistics_of(needs)}


def _projects(statistics: Sequence[Statistic], layer: Layer, d: int, P: int) -> bool:
    """Whether g U replaces g."""
    blocks = all(isinstance(one, BlockStatistic) for one in statistics)
    return blocks and P > 1 and d > DIRECTIONS and not layer.chooses


def _forms_g(statistics: Sequence[Statistic], d: int, m: int, P: int) -> bool:
    """Whether g = δΦᵀ is formed: d·m·(P + d) operations per sample; Gram matrices take P²·(m + d) + d²·P."""
    if not all(one.from_signals and not one.large for one in statistics):
        return True
    return P > 1 and d * m * (P + d) <= P * (P * (m + d) + d * d)


def _predictions(values: Tensor) -> Tensor:
    """Values (n, 1, k, P) with every position a row of its own, (n·P, k)."""
    return values[:, 0].transpose(1, 2).flatten(0, 1)


def _promoted(x: Tensor) -> Tensor:
    """In the type of the sums; tokens stay whole numbers."""
    return promote(x) if x.is_floating_point() else x
