"""One forward pass of training: what layers and the loss were given, with the graph attached."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatness.errors import FlatnessError, LayerError, listed
from flatness.losses import Items, Loss
from flatness.losses.base import promote
from flatness.measuring.examine.unfamiliar import is_familiar
from flatness.network.layers import Layer, find_layers, select_layers
from flatness.network.layers.shared import SharedLayer, Use
from flatness.network.live_calls import LiveCall, LiveCalls
from flatness.network.memory import ran_out
from flatness.network.repeated_parameters import told_apart
from flatness.network.second_derivatives import SecondDerivatives
from flatness.problem import batches
from flatness.problem.guard import Guard, is_compiled, repeated_tokens
from flatness.problem.model import DefaultForward, Forward, unwrap


@dataclass(frozen=True)
class TrainingPass:
    """One forward pass: what the layers asked for and the loss were given.

    Attributes:
        loss: The loss.
        output: What the model returned.
        items: The same as predictions; their numbers are not checked yet.
        layers: The layers asked for, one per weight.
        calls: Calls of every module that ran.
    """

    loss: Loss
    output: Tensor
    items: Items
    layers: list[Layer]
    calls: Mapping[str, list[LiveCall]]

    def uses(self, layer: Layer) -> list[tuple[Use, LiveCall]]:
        """All calls of all modules that use a layer's weight."""
        uses = layer.uses if isinstance(layer, SharedLayer) else [Use(layer.name, layer)]
        return [(use, call) for use in uses for call in self.calls.get(use.name, [])]


# How batches with "labels" are given to a model, found out once.
_FORWARDS: WeakKeyDictionary[nn.Module, dict[str, DefaultForward]] = WeakKeyDictionary()


def _settled_forward(model: nn.Module, batch: Any, loss: Loss) -> DefaultForward:
    """How a batch is given to the model; runs that say what labels mean leave the model as it was."""
    forward = _FORWARDS.setdefault(model, {}).setdefault(repr(loss), DefaultForward(loss))
    if forward.alignment is None and isinstance(batch, Mapping) and "labels" in batch:
        with Guard(model, seed=0):
            forward.settle(model, batches.rows(batch, 0, 8))
    return forward


# The tokens that a table is given once for all samples, such as positions; None if every sample has its own,
# and False if its rows do not belong to single samples.
_Asked = Tensor | bool | None
# These tokens for every table of a model, by name; found once.
_ASKED: WeakKeyDictionary[nn.Module, dict[str, _Asked]] = WeakKeyDictionary()


def _shared_tokens(
    model: nn.Module, batch: Any, loss: Loss, forward: Forward, tables: Mapping[str, nn.Module]
) -> dict[str, _Asked]:
    """The tokens that these tables are given; the runs that find them leave the model as it was."""
    known = _ASKED.setdefault(model, {})
    if tables.keys() <= known.keys() or batches.size_of(batch) < 2:
        return known

    def run(samples: int, repeated: Mapping[nn.Module, Tensor]) -> tuple[Tensor, dict[str, list[LiveCall]]]:
        calls = LiveCalls(tables, tables)
        with calls, repeated_tokens(repeated, lambda: samples):
            output, target = forward(model, batches.copied(batches.rows(batch, 0, samples)))
        return loss.items(promote(output), target).logits, calls.of

    with Guard(model, seed=0):
        (_, alone), (before, both) = run(1, {}), run(2, {})
        pairs = {name: list(zip(alone.get(name, []), both.get(name, []), strict=False)) for name in tables}
        shared = {
            name: calls[0][0].x
            for name, calls in pairs.items()
            if len(calls) == len(both.get(name, [])) == 1 and torch.equal(calls[0][0].x, calls[0][1].x)
        }
        repeated = {tables[name]: x for name, x in shared.items()}
        if repeated and not _apart(before, partial(run, 2, repeated), shared):
            shared = {}
    own = [name for name, calls in pairs.items() if all(len(two.x) == 2 * len(one.x) for one, two in calls)]
    for found in (dict.fromkeys(tables, False), dict.fromkeys(own), shared):
        known.update(found)
    return known


def _apart(
    before: Tensor, run: Callable[[], tuple[Tensor, dict[str, list[LiveCall]]]], names: Iterable[str]
) -> bool:
    """Whether rows of these tables, looked up once for each sample, act on that sample alone."""
    try:
        after, calls = run()
    except (RuntimeError, FlatnessError) as error:
        if ran_out(error):
            raise
        return False
    return told_apart(before, after, [calls[name][0].edge for name in names])


def training_pass(
    model: nn.Module,
    batch: Any,
    asked: str | Iterable[str] | None,
    loss: Loss,
    forward: Forward | None,
) -> TrainingPass:
    """Run a model once in its own mode, and pick the layers.

    Args:
        model: The model, perhaps in a wrapper.
        batch: Inputs and targets.
        asked: The layers, in the user's words.
        loss: The loss.
        forward: How a batch is given to the model; found out where it is None.
    """
    inner = unwrap(model)[0]
    forward = forward or _settled_forward(inner, batch, loss)
    available = find_layers(inner)
    if asked is not None and asked != "last":
        # Unknown names are refused before the model runs and updates statistics.
        kinds = {name: type(module).__name__ for name, module in inner.named_modules()}
        select_layers(available, list(available), asked, modules=kinds)
    probed = () if asked == "last" else available.keys()
    # A last layer whose weight is used elsewhere, as by a table of tokens, has no closed form.
    second = bool(probed) or len({_weight_key(view) for view in available.values()}) < len(available)
    tables = _tables(available, asked)
    shared = _shared_tokens(inner, batch, loss, forward, tables)
    repeated = {tables[name]: x for name in tables if isinstance(x := shared.get(name), Tensor)}
    calls = LiveCalls({name: view.module for name, view in available.items()}, probed)
    with (
        _differentiable_twice(inner, second=second),
        repeated_tokens(repeated, lambda: batches.size_of(batch)),
        calls,
    ):
        # The wrapper that keeps processes in step is called, not one that copies modules.
        output, target = forward(inner if isinstance(model, nn.DataParallel) else model, batch)
    items = loss.lay_out(output, target)
    names = _names(available, calls, asked)
    run = TrainingPass(loss, output, items, _one_per_weight(names, available, calls.of), calls.of)
    for layer in run.layers:
        for use, call in run.uses(layer):
            _check_call(use, call, len(items.logits), shared)
    return run


def _tables(views: Mapping[str, Layer], asked: str | Iterable[str] | None) -> dict[str, nn.Module]:
    """The tables that may be penalised; the last layer involves one only if its weight is tied."""
    tables = {name: view for name, view in views.items() if view.chooses}
    if asked == "last" and tables:
        keys = [_weight_key(view) for view in views.values()]
        tables = {name: view for name, view in tables.items() if keys.count(_weight_key(view)) > 1}
    return {name: view.module for name, view in tables.items()}


def _names(available: Mapping[str, Layer], calls: LiveCalls, asked: str | Iterable[str] | None) -> list[str]:
    """The layers asked for, among those that ran."""
    names = select_layers(available, [name for name in calls.of if name in available], asked)
    if not names:
        raise LayerError(
            "Expected a model that calls at least one supported layer but it called none. Supported layers "
            f"of this model: {listed(available) or 'none'}."
        )
    return names


@contextmanager
def _differentiable_twice(model: nn.Module, *, second: bool) -> Iterator[None]:
    """Compiled modules run as they are written; fused attention, which has no second derivative, is off."""
    with ExitStack() as stack:
        if any(is_compiled(module) or module._compiled_call_impl is not None for module in model.modules()):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if second:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(SecondDerivatives())
        yield


def _one_per_weight(
    names: list[str], views: Mapping[str, Layer], calls: Mapping[str, list[LiveCall]]
) -> list[Layer]:
    """Views of these layers; a weight that is used more than once is seen through all of its uses."""
    keys, users = {name: _weight_key(views[name]) for name in calls}, defaultdict[int, list[str]](list)
    for name, key in keys.items():
        users[key].append(name)
    found: dict[int, Layer] = {}
    for name in names:
        key = keys[name]
        if sum(len(calls[user]) for user in users[key]) == 1:
            found[key] = views[name]
        elif key not in found:
            shared = SharedLayer.of([views[user] for user in users[key]])
            if not shared.is_one_matrix():
                raise LayerError(
                    f"Expected layers that share a weight to see the same matrix but {listed(users[key])} "
                    "lay it out differently. Pass layers= without these; flatness.measure can measure them."
                )
            found[key] = shared
    return list(found.values())


def _weight_key(view: Layer) -> int:
    """What tells weights apart: the parameter, or the module where the weight is made from parameters."""
    weight = view.weight
    return id(weight if isinstance(weight, nn.Parameter) else view.module)


def _check_call(use: Use, call: LiveCall, n: int, tables: Mapping[str, _Asked]) -> None:
    """Refuse a layer that computes something else than WΦ + b, or whose input was overwritten."""
    view, kind = use.view, type(use.view.module).__name__
    if view.chooses and n > 1 and (tables.get(use.name, False) is False or len(call.x) % n):
        raise LayerError(
            f"Expected {use.name!r} to look up rows for every sample but it was given tokens of shape "
            f"{list(call.x.shape)} for {n} samples. Pass layers= without it, or look positions up for each "
            "sample, as positions.expand(len(x), -1) does."
        )
    if not (is_familiar(view) or view.explains(call.x.detach(), call.z.detach(), n)):
        raise LayerError(
            f"Expected {use.name!r} to compute WΦ + b but this {kind} returned something else: it has "
            "its own forward, or a hook on its output. Pass layers= without it, or describe it with "
            "flatness.register_layer."
        )
    if type(view).matrix is not Layer.matrix:
        raise LayerError(
            f"Expected {type(view).__name__} to define arranged(), which turns a weight into W, but it "
            "overrides matrix(), which has no gradient. Call that method arranged(self, weight), and write "
            "weight for self.weight.detach()."
        )
    if call.x._version != call.x_version:
        raise LayerError(
            f"Expected the input of {use.name!r} to stay as it was but it was overwritten in place. Pass "
            "inplace=False to the module that does it, or layers= without this one."
        )
