"""A layer's statistics on one batch with their graphs: what can be differentiated and added to a loss.

All are of the Gauss-Newton part. At a layer whose output is the network's output up to layout they are closed
forms in W, the features and what the loss makes of the outputs (`closed_form_sums`). At
other layers they come from a random signal δ with its graph, as the sampled engine has them (`probed_sums`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from flatness.curvature.sums.frame import Frame
from flatness.curvature.sums.kinds import statistics_of
from flatness.curvature.sums.statistic import BlockStatistic, SignalPair, SquaredSignals, Statistic
from flatness.losses import Items, Loss
from flatness.losses.base import promote
from flatness.losses.elementwise import Elementwise
from flatness.network.graph import only_layout_between
from flatness.network.layers import Layer
from flatness.network.layers.linear import LinearLayer
from flatness.network.layers.shared import SharedLayer, Use
from flatness.network.live_calls import LiveCall

Received = Sequence[tuple[Use, Tensor, Tensor]]
"""For every call of every use of a layer's weight its input and the signal at its output."""

DIRECTIONS = 4
"""Columns of U in `probed_sums`."""


def closed_form_sums(
    needs: frozenset[str], loss: Loss, items: Items, C: Tensor, layer: Layer, frame: Frame, call: LiveCall
) -> dict[str, Tensor] | None:
    """The sums over a batch, divided by C, of a layer whose positions are the predictions; None for others.

    Args:
        needs: The statistics.
        loss: The loss.
        items: The outputs as it sees them.
        C: What the sums are divided by.
        layer: The layer.
        frame: Its `live_frame`.
        call: What it was given and returned.
    """
    if layer.groups != 1 or call.edge is None or not only_layout_between(items.logits, call.edge):
        return None
    statistics, n = statistics_of(needs), len(items.logits)
    squares = isinstance(loss, Elementwise)
    if not all(_is_closed(one, layer, squares=squares) for one in statistics):
        return None
    curvature = _output_curvature(loss, items, layer, call)
    if curvature is None:
        return None
    curvature, phi = curvature / C, promote(_rows(layer, "features", call.x, n))
    if squares:
        squared = SquaredSignals(frame, phi, curvature, curvature @ frame.W[0].square())
        return {one.name: one.of_squares(squared) for one in statistics}
    logits = promote(_rows(layer, "signals", call.z, n))
    return {one.name: one.of_live_softmax(frame, phi, logits, curvature) for one in statistics}


def _is_closed(statistic: Statistic, layer: Layer, *, squares: bool) -> bool:
    """Whether a statistic of a last layer has a closed form, in squared signals or under cross-entropy.

    Closed forms see columns; where a channel has several, what goes channel by channel does without.
    """
    by_column = layer.taps == 1 or isinstance(statistic, BlockStatistic)
    return by_column and (statistic.from_squares if squares else statistic.closed_form)


def _output_curvature(loss: Loss, items: Items, layer: Layer, call: LiveCall) -> Tensor | None:
    """What the loss makes of every position of a layer that puts out what the network does.

    Under cross-entropy a (n·P,) with ∂²ℓ/∂z² = a·(diag p − ppᵀ), 0 where a position is not used, and None if
    its rows are not the classes of a prediction; under other losses the second derivatives themselves
    (n·P, d), with their graph.
    """
    assert call.edge is not None
    a = loss.softmax_weight(items)
    n, f = len(items.logits), items.logits.flatten(0, 1)
    z = _rows(layer, "signals", call.z, n)
    if a is not None and (z.data_ptr(), z.shape, z.stride()) == (f.data_ptr(), f.shape, f.stride()):
        return a.flatten()  # the predictions are the positions, in their order
    if a is None:
        assert isinstance(loss, Elementwise)
        sent = loss.curvature_roots(items).square()
    else:
        # What it sends back says which position each prediction comes from, and whether rows are the classes.
        # It sums to zero, so that a log-softmax lets it pass.
        sent = torch.zeros_like(items.logits, dtype=a.dtype)
        sent[..., 0], sent[..., 1] = a, -a
    (arrived,) = torch.autograd.grad(
        items.logits,
        [call.edge],
        sent.to(items.logits.dtype),
        retain_graph=True,
        create_graph=sent.requires_grad,
    )
    rows = promote(_rows(layer, "signals", arrived, n))
    if a is None:
        return rows
    if rows.shape[1] != sent.shape[2]:
        return None
    # One question for the device: are only classes 0 and 1 reached, and by all that was sent?
    total, tolerance = a.sum(), torch.finfo(arrived.dtype).eps ** 0.5
    same = ~rows[:, 2:].any() & ((rows[:, 0].sum() - total).abs() <= tolerance * total)
    return rows[:, 0] if same else None


def probed_sums(
    needs: frozenset[str],
    layer: Layer,
    frame: Frame,
    received: Received,
    U: Tensor,
    n: int,
) -> dict[str, Tensor]:
    """The sums over a batch from one random signal per sample.

    Where a sample meets the layer at many positions its derivative g costs as much as the layer itself.
    Statistics made of products of its rows, as relative flatness is, then take g U instead, with random signs
    U (m, 4) of the sample's own, scaled such that E U Uᵀ = 1. Columns of all samples add up as those of one.

    Args:
        needs: The statistics.
        layer: The layer.
        frame: Its `live_frame`.
        received: What its calls were given and what came back to them.
        U: Random numbers as `drawn` has asked for, (n, its number).
        n: Number of samples.
    """
    if isinstance(layer, SharedLayer):
        each = [(use, _promoted(x), promote(dz)[None]) for use, x, dz in received]
        g = layer.gradient(each, n)
        assert g is not None
        return _of_gradients(needs, frame, g[0])
    ((_, x, dz),) = received
    x, dz, statistics = promote(x), promote(dz), statistics_of(needs)
    G, d, m = frame.W.shape
    if U.shape[1]:
        g = layer.sketch(x, dz, U.reshape(n, G, -1, m).to(x), n).mT[None]
        return {one.name: one.of_product(frame, g, g).squeeze(0) for one in statistics}  # type: ignore[union-attr]
    delta = layer.signals(dz, n)
    if _forms_g(statistics, d, m, delta.shape[-1]):
        return _of_gradients(needs, frame, layer.gradients(x, dz, n))
    pair = SignalPair(frame, layer.seen(x, n), delta, delta)
    return {one.name: one.of_signals(pair).sum(0) for one in statistics}  # type: ignore[union-attr]


def drawn(needs: frozenset[str], layer: Layer, frame: Frame, received: Received, n: int) -> int:
    """How many random numbers per sample `probed_sums` takes: entries of U where g U replaces g."""
    if isinstance(layer, SharedLayer) or layer.chooses:
        return 0
    G, d, m = frame.W.shape
    blocks = all(isinstance(one, BlockStatistic) for one in statistics_of(needs))
    several = received[0][2].numel() > n * G * d
    return G * DIRECTIONS * m if blocks and several and d > DIRECTIONS else 0


def live_frame(layer: Layer) -> Frame:
    """The layer's weight with its graph, as statistics see it."""
    return Frame(promote(layer.arranged(layer.weight)), layer.taps)


def _of_gradients(needs: frozenset[str], frame: Frame, g: Tensor) -> dict[str, Tensor]:
    """From derivatives g (n, G, d, m)."""
    return {one.name: one.of_pair(frame, g, g).sum(0) for one in statistics_of(needs)}


def _forms_g(statistics: Sequence[Statistic], d: int, m: int, P: int) -> bool:
    """Whether g = δΦᵀ is formed: d·m·(P + d) operations per sample; Gram matrices take P²·(m + d) + d²·P."""
    if not all(one.from_signals and not one.large for one in statistics):
        return True
    return P > 1 and d * m * (P + d) <= P * (P * (m + d) + d * d)


def _rows(layer: Layer, laid_out: Literal["features", "signals"], values: Tensor, n: int) -> Tensor:
    """The features or signals of a layer with one group, every position a row of its own, (n·P, k)."""
    method = getattr(layer, laid_out)
    if method.__func__ is getattr(LinearLayer, laid_out):
        return values.flatten(0, -2)  # what the other comes to, without six operators on the way and back
    return method(values, n).squeeze(1).transpose(1, 2).flatten(0, 1)


def _promoted(x: Tensor) -> Tensor:
    """In the type of the sums; tokens stay whole numbers."""
    return promote(x) if x.is_floating_point() else x
