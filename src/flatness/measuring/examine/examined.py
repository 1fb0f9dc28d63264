"""What examining a network finds, and what the user should know of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from flatness.errors import listed
from flatness.losses import Items
from flatness.measuring.examine.reuse import reparametrised
from flatness.network.affine import AffineModule
from flatness.network.graph import NetworkGraph
from flatness.network.layers import Layer, own_parameters
from flatness.network.layers.shared import SharedLayer
from flatness.network.parts import named_modules, named_parameters
from flatness.network.recording import Record


@dataclass
class Examined:
    """A network, seen through one recorded forward pass.

    Attributes:
        items: The outputs, with their graph.
        layers: The supported layers, by name.
        affine: The norm layers and PReLUs that ran, by name.
        called: Names of the layers that ran, in the order of their first call.
        records: What was recorded, by name; the last call of each.
        graph: What the autograd graph says.
        refused: Why a layer, or a norm layer, cannot be measured exactly whatever follows it.
        loose: Those of the refused that can be measured through their parameter, which no module call shows
            sample by sample: some uses of the weight are not seen, or samples are not told apart.
        shared: Layers whose weight is used more than once, all uses seen unless they are loose.
        reused: How often their weight is used.
        inputs: What the modules that use their weight were given, call by call.
        idle: Layers that ran but do not influence the output.
        silent: Layers and norm layers that did not run and whose parameters nothing else used.
        overwrites: Whether the network overwrites what layers were given.
        writers: Names of `autograd.Function`s that write into what they are given.
        settled: Whether this says all; else what is overwritten was not copied, or what writes not noted.
        marked: What arrives at modules whose output may be the network's when `marker` is sent back.
        notes: What the user should know.
    """

    items: Items
    layers: dict[str, Layer]
    affine: dict[str, AffineModule]
    called: list[str]
    records: dict[str, Record]
    graph: NetworkGraph
    refused: dict[str, str] = field(default_factory=dict)
    loose: set[str] = field(default_factory=set)
    shared: dict[str, SharedLayer] = field(default_factory=dict)
    reused: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    idle: set[str] = field(default_factory=set)
    silent: list[str] = field(default_factory=list)
    overwrites: bool = False
    writers: list[str] = field(default_factory=list)
    settled: bool = True
    marked: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def last(self) -> str | None:
        """The layer that ran last among those the output depends on."""
        return next((name for name in reversed(self.called) if name not in self.idle), None)


def add_notes(model: nn.Module, examined: Examined, misread: list[str]) -> None:
    """Say what was left out, and what is measured otherwise than one may think."""
    notes = examined.notes
    silent = [name for name in examined.layers if name in examined.silent]
    if silent:
        notes.append(f"never called in the forward pass and left out: {listed(silent)}")
    bypassed = [
        name for name in examined.layers if name not in examined.records and name not in examined.silent
    ]
    if bypassed:
        notes.append(
            f"their weights are used without calling them, and they are left out: {listed(bypassed)}"
        )
    if misread:
        notes.append(
            f"compute something else than their class says and are left out: {listed(misread)}; "
            "flatness.register_layer can teach it"
        )
    idle = [name for name in examined.called if name in examined.idle]
    if idle:
        notes.append(f"the output does not depend on: {listed(idle)}")
    known = {*examined.layers, *examined.affine, *examined.silent, *misread}
    others = [
        (name, module)
        for name, module in named_modules(model)
        if module._parameters and name not in known and own_parameters(module)
    ]
    covered = _covered(model, examined) if others else set()
    unknown = [
        f"{name or 'the model itself'} ({type(module).__name__})"
        for name, module in others
        if any(id(value) not in covered for value in own_parameters(module))
    ]
    notes += [
        f"{listed(names)}: W is the effective weight, made from other parameters ({kind})"
        for kind, names in reparametrised({name: examined.layers[name] for name in examined.called}).items()
    ]
    frozen = [name for name, value in named_parameters(model).items() if not value.requires_grad]
    if frozen:
        notes.append(f"frozen (requires_grad=False) and measured like all others: {listed(frozen, 4)}")
    if unknown:
        notes.append(
            f"not a supported layer and left out: {listed(unknown)}; flatness.register_layer can teach it"
        )


def _covered(model: nn.Module, examined: Examined) -> set[int]:
    """The parameters that are weights and biases of layers, by `id`."""
    names = {name for layer in examined.layers.values() for name in (layer.weight_name, layer.bias_name)}
    return {id(value) for name, value in model.named_parameters(remove_duplicate=False) if name in names}
