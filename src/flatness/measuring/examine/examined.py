"""What examining a network finds, layer by layer: how often weights are used, what the user should know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor, nn
from torch.nn.utils import parametrize

from flatness.errors import listed
from flatness.losses import Items
from flatness.measuring.examine.unfamiliar import View
from flatness.network.affine import AffineModule
from flatness.network.graph import NetworkGraph, reads
from flatness.network.layers import Layer, own_parameters
from flatness.network.layers.shared import SharedLayer
from flatness.network.recording import Record


@dataclass(frozen=True)
class Reuse:
    """What a recorded forward pass says about one weight that is used more than once.

    Attributes:
        times: How often it is used.
        shared: The layer with all its uses that are seen; None where there is no such layer: for norm layers,
            and for weights that one module call and something else use.
        all_seen: Whether there are no others.
    """

    times: int
    shared: SharedLayer | None
    all_seen: bool


def reparametrisation(module: nn.Module) -> str | None:
    """How a module's weight is made from other parameters, in words; None where it is a parameter itself."""
    if parametrize.is_parametrized(module, "weight"):
        steps = module.parametrizations["weight"]  # type: ignore[index]
        return ", ".join(type(step).__name__.lstrip("_") for step in steps)
    made = isinstance(getattr(module, "weight", None), nn.Parameter) or "weight" not in vars(module)
    hooks = [type(hook).__name__ for hook in module._forward_pre_hooks.values() if hasattr(hook, "name")]
    return None if made else ", ".join(hooks) or "computed before every call"


def find_reuse(
    views: Mapping[str, View], recorded: Mapping[str, list[Record]], uses: Mapping[int, int]
) -> dict[str, Reuse]:
    """Hold the reads of every parameter in the graph against those that recorded calls explain.

    Args:
        views: The recorded modules.
        recorded: Every call of each.
        uses: How many operators read a parameter on the way to the output, by the parameter's `id`.
    """
    calls = {name: len(own) for name, own in recorded.items()}
    counting = {name: sum(call.counts for call in own) or len(own) for name, own in recorded.items()}
    unseen = _unseen_uses(views, counting, uses)
    reuse: dict[str, Reuse] = {}
    for members in _families(views, calls):
        total = sum(calls[name] for name in members)
        shared = _shared([views[name] for name in members]) if total > 1 else None
        for name in members if total > 1 else filter(unseen.get, members):
            # Where a call is cut off, the next pass may have no edge for it.
            whole = not unseen[name] and counting[name] == calls[name]
            reuse[name] = Reuse(total + unseen[name], shared, shared is not None and whole)
    return reuse


def _families(views: Mapping[str, View], names: Iterable[str]) -> Iterable[list[str]]:
    """The modules that have a weight in common, by name."""
    found: dict[int, list[str]] = {}
    for name in names:
        found.setdefault(_weight_key(views[name]), []).append(name)
    return found.values()


def _unseen_uses(
    views: Mapping[str, View], calls: Mapping[str, int], uses: Mapping[int, int]
) -> dict[str, int]:
    """For every module, how often one of its parameters is read without a recorded call that explains it."""
    left, read_by = Counter(uses), {name: _read_by(views[name]) for name in calls}
    for name, found in read_by.items():
        left.subtract({parameter: count * calls[name] for parameter, count in found.items()})
    return {name: max([0, *(left[parameter] for parameter in found)]) for name, found in read_by.items()}


def _shared(members: list[View]) -> SharedLayer | None:
    layers = [view for view in members if isinstance(view, Layer)]
    if not layers or len(layers) < len(members):
        return None
    shared = SharedLayer.of(layers)
    return shared if shared.is_one_matrix() else None


def _weight_key(view: View) -> int:
    """What tells weights apart: the parameter, or the module where the weight is made from parameters."""
    weight = view.module.weight
    return id(weight) if isinstance(weight, nn.Parameter) else id(view.module)


def _read_by(view: View) -> Counter[int]:
    """How many operators read each parameter when the module runs once, by the parameter's `id`."""
    found: Counter[int] = Counter()
    for key in ("weight", "bias"):
        value = getattr(view.module, key, None)
        if isinstance(value, nn.Parameter):
            found[id(value)] += 1
        elif isinstance(value, Tensor):
            found.update(reads(value))
    for parameter in view.module.parameters(recurse=False):
        found.setdefault(id(parameter), 1)
    return found


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
        """The last call of every module that ran, of those that count where any does."""
        return {name: last_of(calls) for name, calls in self.recorded.items()}

    @property
    def unused(self) -> list[str]:
        """Layers and norm layers that did not run and whose parameters nothing else used."""
        return [name for name, record in self.records.items() if record.unused]

    @property
    def last(self) -> str | None:
        """The layer that ran last among those the output depends on."""
        return next((name for name in reversed(self.called) if not self.records[name].idle), None)


def last_of(calls: list[Record]) -> Record:
    """The last call that derivatives of the output come back to; the last of all where none is."""
    return next((call for call in reversed(calls) if call.counts), calls[-1])


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
    made = {name: reparametrisation(examined.layers[name].module) for name in examined.called}
    for kind in dict.fromkeys(filter(None, made.values())):
        same = [name for name, own in made.items() if own == kind]
        yield f"{{}}: W is the effective weight, made from other parameters ({kind})", same


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
