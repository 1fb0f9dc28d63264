"""How each layer is measured, decided once from a recorded example before any data is streamed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatness.curvature.sums.frame import Units
from flatness.curvature.sums.kinds import statistics_of
from flatness.curvature.sums.kinds.relative import Relative
from flatness.curvature.sums.statistic import BlockStatistic
from flatness.losses import Items, Loss
from flatness.network.affine import AffineModule
from flatness.network.graph import only_layout_between
from flatness.network.layers import Layer
from flatness.network.layers.shared import SharedLayer
from flatness.network.recording import Record

Kind = Literal["softmax head", "separable", "passes"]
# A usual number of signals per sample, to choose between forms by their cost.
_SIGNALS = 10


@dataclass
class LayerRoute:
    """How one layer's statistics are computed.

    Attributes:
        kind: "softmax head" is a closed form on the forward pass; "separable" a last layer whose positions
            are the predictions; "passes" one backward pass per output direction.
        needs: The statistics wanted of this layer.
        positions: P, how often a sample meets W.
        input_size: Numbers in one sample of the layer's input.
        skipped: How many positions of a last layer come before the first prediction and after the last.
    """

    name: str
    layer: Layer
    kind: Kind
    needs: frozenset[str]
    positions: int
    input_size: int
    skipped: tuple[int, int] = (0, 0)

    def predictions(self, positions: int, count: int) -> slice:
        """Which positions of a last layer are the predictions of a batch.

        Sequences of another length are cut as the first samples were: at the same places, or, where
        nothing is left out at one end, at the other end. `Watch` holds the result against the output.

        Args:
            positions: How many positions the layer has on this batch.
            count: How many predictions there are.
        """
        before, after = self.skipped
        left_out = positions - count
        start = left_out if before and not after else min(before, left_out)
        return slice(start, start + count)

    @property
    def needs_input_signal(self) -> bool:
        """Whether the derivative at the layer's input is used."""
        if self.layer.chooses:
            return False
        statistics = statistics_of(self.needs)
        if self.plain and self.from_squares:
            return any(statistic.uses_u for statistic in statistics)
        return any(statistic.uses_dx for statistic in statistics) and not self.forms_g

    @property
    def plain(self) -> bool:
        """Whether each sample meets W once, and all statistics follow from signals then."""
        statistics = statistics_of(self.needs)
        once = self.layer.plain and self.positions == 1
        return once and all(one.from_signals or one.from_squares for one in statistics)

    @property
    def from_squares(self) -> bool:
        """Whether all statistics follow from squared signals, if each sample meets W once."""
        return self.layer.taps == 1 and all(one.from_squares for one in statistics_of(self.needs))

    @property
    def units(self) -> set[Units]:
        """What the layer's features are measured in."""
        return {statistic.units for statistic in statistics_of(self.needs)}

    @property
    def forms_g(self) -> bool:
        """Whether sums are taken from the per-sample derivatives g (d×m)."""
        _, d, m = self.layer.matrix().shape
        return forms_g(self.needs, d, m, self.positions)

    @property
    def fitted(self) -> list[BlockStatistic]:
        """What has probes of its own: relative flatness of weights used several times, tall as tables are.

        One kind of probe serves all statistics elsewhere: it has 1.1 to 2.4 times the variance for relative
        flatness, but the other kind has up to 30 times for traces.
        """
        _, d, m = self.layer.matrix().shape
        if not isinstance(self.layer, SharedLayer) or d <= 4 * m:
            return []
        return [one for one in statistics_of(self.needs) if isinstance(one, Relative)]

    def numbers_per_sample(self, block: int) -> int:
        """Rough count of numbers that the signals of one sample take in this layer, if there are any.

        Args:
            block: Output directions whose signals are held at once.
        """
        G, d, _ = self.layer.matrix().shape
        each = G * d * self.positions + self.input_size * self.needs_input_signal
        return block * each * (self.kind != "softmax head")


@dataclass
class Routes:
    """The routes of all layers, and what else the pass records.

    Attributes:
        layers: One route per layer.
        affine: Norm layers and PReLUs whose diagonals complete the network's trace.
        network: Whether all parameters of the network are being traced.
        passes: Backward passes per micro-batch.
        copy_inputs: Whether inputs must be copied because the network overwrites them.
        repeated: Parameters with a copy for every sample, of this shape, whose trace is wanted. For the
            sampled engine.
        curved: Names of layers, norm layers and such parameters after which the network is not piecewise
            linear, where the Hessian is more than its Gauss-Newton part. For the sampled engine.
    """

    layers: list[LayerRoute]
    affine: list[AffineModule] = field(default_factory=list)
    network: bool = False
    passes: int = 0
    copy_inputs: bool = False
    curved: frozenset[str] = frozenset()
    repeated: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there is anything to compute beyond the risk."""
        return bool(self.affine) or any(route.needs for route in self.layers)

    @property
    def backward(self) -> bool:
        """Whether any derivative is taken at all."""
        return bool(self.affine) or any(route.kind != "softmax head" for route in self.layers)

    def kind(self, kind: Kind) -> list[LayerRoute]:
        """The routes of one kind."""
        return [route for route in self.layers if route.kind == kind]

    @property
    def shared(self) -> dict[str, SharedLayer]:
        """The layers whose weight is used more than once, by name."""
        return {route.name: route.layer for route in self.layers if isinstance(route.layer, SharedLayer)}

    def modules(self) -> dict[str, nn.Module]:
        """The modules to record."""
        modules = {module.name: module.module for module in self.affine}
        return modules | dict(chain.from_iterable(route.layer.modules.items() for route in self.layers))


@dataclass
class ParameterRoutes:
    """What is measured through parameters.

    Attributes:
        layers: Layers, each with its own directions.
        parameters: The parameter that each layer's weight is, or is a part of, by layer.
        rest: Parameters of which the trace is wanted only, probed together.
        curvature: "hessian", "gauss_newton" or "finite_differences".
        complete: Which of the layers take all directions; with None, the rest does.
    """

    layers: list[LayerRoute] = field(default_factory=list)
    parameters: dict[str, str] = field(default_factory=dict)
    rest: list[str] = field(default_factory=list)
    curvature: str = "hessian"
    complete: frozenset[str | None] = frozenset()

    def only(self, *, complete: bool) -> ParameterRoutes:
        """Those that take all directions, or the others."""
        layers = [route for route in self.layers if (route.name in self.complete) == complete]
        rest = self.rest if (None in self.complete) == complete else []
        return replace(self, layers=layers, rest=rest)

    def __bool__(self) -> bool:
        """Whether there is anything to measure."""
        return bool(self.rest) or any(route.needs for route in self.layers)

    @property
    def random(self) -> bool:
        """Whether anything takes random directions."""
        sampled = any(route.name not in self.complete for route in self.layers if route.needs)
        return sampled or bool(self.rest and None not in self.complete)


def forms_g(needs: frozenset[str], d: int, m: int, P: int) -> bool:
    """Whether a layer with many positions takes its sums from g (d×m per sample) or P×P Gram matrices.

    Block traces cost d·P·(P + d) operations per sample and signal as δKδᵀ, beside P²·m for K, and d·m·(P + d)
    as g = δΦᵀ and g gᵀ. Normalised features have a K of their own but the same g. The diagonal exists only in
    g: where it is wanted, δΦᵀ costs nothing more.

    Args:
        needs: The statistics wanted.
        d: Output units per group.
        m: Columns of W.
        P: Positions.
    """
    statistics = statistics_of(needs)
    products = len({one.units for one in statistics if isinstance(one, BlockStatistic)}) or 1
    forming = 0 if any(not one.from_signals for one in statistics) else _SIGNALS * d * m * P
    through_g = forming + products * _SIGNALS * d * d * m
    return through_g <= products * (P * P * m + _SIGNALS * d * P * (P + d))


def last_layer_kind(layer: Layer, items: Items, loss: Loss, needs: frozenset[str]) -> Kind:
    """The cheapest exact way to the statistics of a last layer."""
    # The closed form sees columns, not input channels: kernels of several taps take the other route.
    closed = layer.taps == 1 and all(statistic.closed_form for statistic in statistics_of(needs))
    if closed and loss.softmax_weight(items) is not None:
        return "softmax head"
    return "separable" if items.logits.shape[1] > 1 else "passes"


def skipped_positions(
    layer: Layer, record: Record, items: Items, marked: Tensor | None
) -> tuple[int, int] | None:
    """How many positions before and after the predictions a last layer has; None where it is not the last.

    It is the last one where its output is that of the network, up to layout and positions that are cut off
    at the ends: the next-token loss of a language model leaves out the last one.

    Args:
        layer: The layer.
        record: Its call.
        items: The outputs.
        marked: What arrives at the layer of `marker`.
    """
    if layer.groups != 1 or record.z_edge is None or marked is None:
        return None
    sent = marker(items)
    delta = layer.signals(marked, len(sent))[:, 0].transpose(1, 2)
    before = int(delta.abs().amax((0, 2)).gt(0.5).int().argmax())  # the first place at which anything arrives
    after = delta.shape[1] - before - sent.shape[1]
    if after < 0 or delta.shape[2] != sent.shape[2]:
        return None
    expected = F.pad(sent, (0, 0, before, after))
    same = torch.allclose(delta, expected, rtol=1e-3, atol=1e-3)
    return (before, after) if same and only_layout_between(items.logits, record.z_edge) else None


def marker(items: Items) -> Tensor:
    """One vector per prediction p, (p + 1)(e_0 − e_1), to be sent back: it says where predictions come from.

    It sums to zero, so a log-softmax lets it pass unchanged.
    """
    if "marker" not in items.memo:
        sent = torch.zeros_like(items.logits)
        numbers = torch.arange(1, sent.shape[1] + 1, device=sent.device, dtype=sent.dtype)
        sent[:, :, 0] = numbers
        sent[:, :, 1:2] = -numbers[:, None]  # nowhere, where there is one output
        items.memo["marker"] = sent
    return items.memo["marker"]


def bytes_per_sample(
    routes: Routes, records: Mapping[str, Record], items: Items, block: int, itemsize: int
) -> int:
    """Memory of one sample of a micro-batch.

    Without a backward pass that is the largest layer's input and output and what the loss makes of logits;
    with one, all inputs and outputs, which autograd and the recording keep, and the signals of a block.
    """
    n = items.logits.shape[0]
    sizes, outputs = _sizes(records, n), 4 * items.logits.numel() // n
    if not routes.backward:
        return itemsize * (2 * max(sizes) + outputs)
    signals = sum(route.numbers_per_sample(block) for route in routes.layers)
    signals += sum(block * records[module.name].z_shape.numel() // n for module in routes.affine)
    return itemsize * (2 * sum(sizes) + outputs + signals * 5 // 4)


def graph_bytes_per_sample(records: Mapping[str, Record], items: Items, itemsize: int) -> int:
    """Rough size of the graph of one sample's first derivatives.

    Inputs, outputs and what lies between, forwards and backwards.
    """
    n = items.logits.shape[0]
    return itemsize * (6 * sum(_sizes(records, n)) + 8 * items.logits.numel() // n)


def _sizes(records: Mapping[str, Record], n: int) -> list[int]:
    """Numbers in one sample's input and output of every module."""
    return [(record.x.numel() + record.z_shape.numel()) // n for record in records.values()]
