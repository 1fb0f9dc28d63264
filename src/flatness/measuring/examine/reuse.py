"""Which weights are used more than once, and which of them can be measured by summing over their uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.utils import parametrize

from flatness.measuring.examine.unfamiliar import View
from flatness.network.graph import reads
from flatness.network.layers import Layer
from flatness.network.layers.shared import SharedLayer


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


def reparametrised(layers: Mapping[str, Layer]) -> dict[str, list[str]]:
    """Names of layers whose weight is computed from other parameters, by how it is."""
    found: dict[str, list[str]] = {}
    for name, layer in layers.items():
        kind = reparametrisation(layer.module)
        if kind is not None:
            found.setdefault(kind, []).append(name)
    return found


def find_reuse(
    views: Mapping[str, View], calls: Mapping[str, int], uses: Mapping[int, int]
) -> dict[str, Reuse]:
    """Hold the reads of every parameter in the graph against those that recorded calls explain.

    Args:
        views: The recorded modules.
        calls: How often each ran.
        uses: How many operators read a parameter on the way to the output, by the parameter's `id`.
    """
    unseen = _unseen_uses(views, calls, uses)
    families: dict[int, list[str]] = {}
    for name in calls:
        families.setdefault(_weight_key(views[name]), []).append(name)
    reuse: dict[str, Reuse] = {}
    for members in families.values():
        total = sum(calls[name] for name in members)
        shared = _shared([views[name] for name in members]) if total > 1 else None
        for name in members:
            if total > 1 or unseen[name]:
                reuse[name] = Reuse(total + unseen[name], shared, shared is not None and not unseen[name])
    return reuse


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
    return SharedLayer.of(layers)


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
