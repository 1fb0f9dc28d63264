"""How each layer is measured, decided once from a recorded example before any data is streamed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from flatness.curvature.sums.kinds import statistics_of
from flatness.curvature.sums.layer_sums import forms_g, holds_one_block
from flatness.losses import Items, Loss
from flatness.network.affine import AffineModule
from flatness.network.graph import only_layout_between
from flatness.network.layers import Layer
from flatness.network.layers.shared import SharedLayer
from flatness.network.recording import Record

Kind = Literal["softmax head", "separable", "passes"]


@dataclass
class LayerRoute:
    """How one layer's statistics are computed.

    Attributes:
        kind: "softmax head" is a closed form on the forward pass; "separable" a last layer whose positions
            are the predictions; "passes" one backward pass per output direction.
        needs: The statistics wanted of this layer.
        positions: P, how often a sample meets W.
        input_size: Numbers in one sample of the layer's input.
    """

    name: str
    layer: Layer
    kind: Kind
    needs: frozenset[str]
    positions: int
    input_size: int

    @property
    def needs_input_signal(self) -> bool:
        """Whether the derivative at the layer's input is used."""
        statistics = statistics_of(self.needs)
        if self.plain:
            return any(statistic.uses_u for statistic in statistics)
        return any(statistic.uses_dx for statistic in statistics) and not self.forms_g

    @property
    def plain(self) -> bool:
        """Whether each sample meets W once, and all statistics have a form for that."""
        once = self.layer.plain and self.positions == 1
        return once and all(statistic.from_squares for statistic in statistics_of(self.needs))

    @property
    def needs_spread(self) -> bool:
        """Whether the spread of the layer's features is used."""
        return any(statistic.scaled for statistic in statistics_of(self.needs))

    @property
    def forms_g(self) -> bool:
        """Whether sums are taken from the per-sample derivatives g (d×m)."""
        _, d, m = self.layer.matrix().shape
        return forms_g(self.needs, d, m, self.positions)

    @property
    def patch_numbers(self) -> int:
        """Numbers in the features of one sample; 0 where they are the input itself."""
        G, _, m = self.layer.matrix().shape
        return 0 if self.layer.plain else G * m * self.positions

    def numbers_per_sample(self, block: int) -> int:
        """Rough count of numbers that the signals of one sample take in this layer.

        Args:
            block: Output directions whose signals are held at once.
        """
        G, d, _ = self.layer.matrix().shape
        return block * (G * d * self.positions + self.input_size * self.needs_input_signal)


@dataclass
class Routes:
    """The routes of all layers, and what else the pass records.

    Attributes:
        layers: One route per layer.
        affine: Norm layers and PReLUs whose diagonals complete the network's trace.
        network: Whether all parameters of the network are being traced.
        passes: Backward passes per micro-batch.
        copy_inputs: Whether inputs must be copied because the network overwrites them.
        curved: Names of layers and norm layers after which the network is not piecewise linear, where the
            Hessian is more than its Gauss-Newton part. For the sampled engine.
    """

    layers: list[LayerRoute]
    affine: list[AffineModule] = field(default_factory=list)
    network: bool = False
    passes: int = 0
    copy_inputs: bool = False
    curved: frozenset[str] = frozenset()

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
        modules = {route.name: route.layer.module for route in self.layers}
        for layer in self.shared.values():
            modules |= layer.modules
        return modules | {module.name: module.module for module in self.affine}


def route_kind(
    layer: Layer, record: Record, items: Items, loss: Loss, marked: Tensor | None, needs: frozenset[str]
) -> Kind:
    """The cheapest exact way to a layer's statistics; `marked` is what arrives there of `marker`."""
    if not _is_last(layer, record, items, marked):
        return "passes"
    statistics = statistics_of(needs)
    # The closed form sees columns, not input channels: kernels of several taps take the other route.
    closed = layer.taps == 1 and all(statistic.closed_form for statistic in statistics)
    if closed and loss.softmax_weight(items) is not None:
        return "softmax head"
    separable = items.logits.shape[1] > 1 and all(statistic.from_squares for statistic in statistics)
    return "separable" if separable else "passes"


def _is_last(layer: Layer, record: Record, items: Items, marked: Tensor | None) -> bool:
    """Whether the layer's output is that of the network, up to layout."""
    if layer.groups != 1 or record.z_edge is None or not only_layout_between(items.logits, record.z_edge):
        return False
    return marked is not None and _positions_are_predictions(layer, marked, items)


def marker(items: Items) -> Tensor:
    """One vector per prediction p, (p + 1)(e_0 − e_1), to be sent back: it says where predictions come from.

    It sums to zero, so a log-softmax lets it pass unchanged.
    """
    if "marker" not in items.memo:
        _, T, K = items.logits.shape
        sent = torch.zeros_like(items.logits)
        numbers = 1 if T == 1 else torch.arange(1, T + 1, device=sent.device, dtype=sent.dtype)
        sent[:, :, 0] = numbers
        if K > 1:
            sent[:, :, 1] = -numbers
        items.memo["marker"] = sent
    return items.memo["marker"]


def _positions_are_predictions(layer: Layer, marked: Tensor, items: Items) -> bool:
    """Whether position p of the layer is prediction p of the output, row k its output k."""
    sent = marker(items)
    if marked.numel() != sent.numel():
        return False
    delta = layer.signals(marked, items.logits.shape[0])[:, 0].transpose(1, 2)
    if delta.shape != sent.shape:
        return False
    # Mostly they are equal, or one and the same.
    if delta.data_ptr() == sent.data_ptr() and delta.stride() == sent.stride():
        return True
    return torch.equal(delta, sent) or bool(torch.allclose(delta, sent, rtol=1e-3, atol=1e-3))


def positions_of(layer: Layer, record: Record, n: int) -> int:
    """P, from the shape of the recorded output."""
    d = layer.output_units
    return max(1, record.z_shape.numel() // max(1, n * d))


def bytes_per_sample(
    routes: Routes, records: Mapping[str, Record], items: Items, block: int, itemsize: int
) -> int:
    """Memory of one sample of a micro-batch.

    Without a backward pass that is the largest layer's input and output and what the loss makes of logits;
    with one, all inputs and outputs, which autograd and the recording keep, and the signals of a block. In
    float64, torch unfolds the patches of a convolution to multiply them.
    """
    n = items.logits.shape[0]
    sizes = {name: (record.x.numel() + record.z_shape.numel()) // n for name, record in records.items()}
    outputs = 4 * items.logits.numel() // n
    if not routes.backward:
        light = not routes.network and all(holds_one_block(route.needs) for route in routes.layers)
        return itemsize * (2 * max(sizes.values()) + (outputs * 5 // 8 if light else outputs))
    signals = sum(route.numbers_per_sample(block) for route in routes.layers if route.kind != "softmax head")
    signals += sum(block * records[module.name].z_shape.numel() // n for module in routes.affine)
    unfolded = max((route.patch_numbers for route in routes.layers), default=0) if itemsize == 8 else 0
    return itemsize * (2 * sum(sizes.values()) + outputs + signals * 5 // 4 + unfolded)


def graph_bytes_per_sample(records: Mapping[str, Record], items: Items, itemsize: int) -> int:
    """Rough size of the graph of one sample's first derivatives.

    Inputs, outputs and what lies between, forwards and backwards.
    """
    n = items.logits.shape[0]
    sizes = sum((record.x.numel() + record.z_shape.numel()) // n for record in records.values())
    return itemsize * (6 * sizes + 8 * items.logits.numel() // n)
