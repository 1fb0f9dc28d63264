"""What examining a network finds, layer by layer, and what the user should know of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor, nn

from flatness.errors import listed
from flatness.losses import Items
from flatness.measuring.examine.reuse import reparametrised
from flatness.measuring.examine.unfamiliar import View
from flatness.network.affine import AffineModule
from flatness.network.graph import NetworkGraph
from flatness.network.layers import Layer, own_parameters
from flatness.network.layers.shared import SharedLayer
from flatness.network.recording import Record


@dataclass(frozen=True)
class LayerRecord:
    """What a few samples showed of one layer or norm layer.

    Attributes:
        name: Its name in the model.
        view: The layer as W and Φ, or the norm layer.
        operators: Those between it and the output that are not piecewise linear.
        uses: How often its weight is used.
        shared: Where that is more than once, the weight with all its uses that are seen.
        refused: Why signals at its calls do not give its curvature; None when they do.
        via_parameter: Whether products with the Hessian of its parameter give it instead, where it is
            refused: some uses of the weight are not seen, or samples are not told apart.
        idle: Whether it ran but does not influence the output.
        unused: Whether it did not run and nothing else used its parameters.
        marked: What arrives at it when `marker` is sent back, if its output may be the network's.
    """

    name: str
    view: View
    operators: tuple[str, ...] = ()
    uses: int = 1
    shared: SharedLayer | None = None
    refused: str | None = None
    via_parameter: bool = False
    idle: bool = False
    unused: bool = False
    marked: Tensor | None = None

    @property
    def hopeless(self) -> bool:
        """Whether no method gives its curvature."""
        return self.refused is not None and not self.via_parameter

    @property
    def curved(self) -> str | None:
        """Why its Hessian is more than its Gauss-Newton part, in words; None when it is not."""
        if self.via_parameter:
            return self.refused
        if self.shared is not None:
            return self.used_again
        return f"{listed(self.operators, 4)} after it" if self.operators else None

    @property
    def meets_samples_once(self) -> bool:
        """Whether signals at its one call give its curvature, sample by sample."""
        return self.shared is None and not self.via_parameter

    @property
    def used_again(self) -> str:
        """How often its weight is used, in words."""
        return f"its weight is used {self.uses} times"


@dataclass(frozen=True)
class Examined:
    """A network, seen through one recorded forward pass.

    Attributes:
        items: The outputs, with their graph.
        graph: What the autograd graph says.
        recorded: What was recorded of every module that ran, call by call, in the order of their first call.
        overwrites: Whether the network overwrites what layers were given.
        writers: Names of `autograd.Function`s that write into what they are given, where that is noted.
        records: What that says of every module looked at, by name.
        notes: What the user should know.
    """

    items: Items
    graph: NetworkGraph
    recorded: dict[str, list[Record]]
    overwrites: bool
    writers: tuple[str, ...]
    records: dict[str, LayerRecord] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @cached_property
    def layers(self) -> dict[str, Layer]:
        """The supported layers."""
        return {name: record.view for name, record in self.records.items() if isinstance(record.view, Layer)}

    @cached_property
    def called(self) -> list[str]:
        """Names of the layers that ran, in the order of their first call."""
        return [name for name in self.recorded if name in self.layers]

    @cached_property
    def affine(self) -> dict[str, AffineModule]:
        """The norm layers and PReLUs that ran, by name, in that order."""
        views = [self.records[name].view for name in self.recorded]
        return {view.name: view for view in views if isinstance(view, AffineModule)}

    @cached_property
    def calls(self) -> dict[str, Record]:
        """The last call of every module that ran."""
        return {name: calls[-1] for name, calls in self.recorded.items()}

    @property
    def unused(self) -> list[str]:
        """Layers and norm layers that did not run and whose parameters nothing else used."""
        return [name for name, record in self.records.items() if record.unused]

    @property
    def last(self) -> str | None:
        """The layer that ran last among those the output depends on."""
        return next((name for name in reversed(self.called) if not self.records[name].idle), None)


def notes_on(model: nn.Module, examined: Examined, misread: list[str]) -> list[str]:
    """What was left out, and what is measured otherwise than one may think."""
    said = [*_left_out(model, examined, misread), *_otherwise(model, examined)]
    return [text.format(listed(names)) for text, names in said if names]


def _left_out(model: nn.Module, examined: Examined, misread: list[str]) -> Iterator[tuple[str, list[str]]]:
    """What to say of layers that are not measured, and which these are."""
    not_called = [name for name in examined.layers if name not in examined.recorded]
    unused = [name for name in not_called if examined.records[name].unused]
    teach = "flatness.register_layer adds support"
    yield "left out, because the forward pass never calls them: {}", unused
    yield (
        "left out, because their weights are used without calling the layer: {}",
        [name for name in not_called if name not in unused],
    )
    yield f"left out, because they do not compute what their class computes: {{}}; {teach}", misread
    yield (
        f"left out, because the layer type is not supported: {{}}; {teach}",
        _unknown(model, examined, misread),
    )


def _otherwise(model: nn.Module, examined: Examined) -> Iterator[tuple[str, list[str]]]:
    """What to say of layers that are measured and have something about them, and which these are."""
    yield "the output does not depend on: {}", [n for n in examined.called if examined.records[n].idle]
    for kind, names in reparametrised({name: examined.layers[name] for name in examined.called}).items():
        yield f"{{}}: W is the effective weight, made from other parameters ({kind})", names


def frozen_note(model: nn.Module) -> list[str]:
    """What to say where frozen parameters are measured."""
    frozen = [name for name, value in model.named_parameters() if not value.requires_grad]
    return [f"frozen (requires_grad=False) but measured like the others: {listed(frozen, 4)}"] * bool(frozen)


def _unknown(model: nn.Module, examined: Examined, misread: Collection[str]) -> list[str]:
    """Modules with parameters of their own that no layer or norm layer accounts for."""
    known = {*examined.layers, *examined.affine, *examined.unused, *misread}
    parts = {name for layer in examined.layers.values() for name in (layer.weight_name, layer.bias_name)}
    named = model.named_parameters(remove_duplicate=False)
    covered = {id(value) for name, value in named if name in parts}
    return [
        f"{name or 'the model itself'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if name not in known and any(id(value) not in covered for value in own_parameters(module))
    ]
