"""Watching later batches: a plan holds for the path through the network that the first samples took."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from flatness.curvature.sums.routes import LayerRoute
from flatness.errors import LayerError, NotExactError, listed
from flatness.measuring.examine.examined import Examined
from flatness.network.graph import read_graph
from flatness.network.layers import own_parameters
from flatness.problem.problem import Problem

_PATH = "Expected every batch to take the same path through the network but "
_NEEDED = "Exact curvature requires a path that does not depend on the data."


@dataclass(frozen=True)
class _Call:
    """What one call of a module put out.

    Attributes:
        name: Its name.
        edge: Where its derivatives are taken; None where there are none.
        shape: The shape of its output.
        z: The output itself, of a layer that is the network's last.
        version: How often that had been written to.
    """

    name: str
    edge: GradientEdge | None
    shape: torch.Size
    z: Tensor | None
    version: int

    def may_mix(self, n: int) -> bool:
        """Whether it has several rows for each of n samples, flattened, and derivatives that say whose."""
        rows = self.shape[0] if self.shape and self.edge is not None else n
        return n > 1 and rows != n and rows % n == 0


class Watch:
    """Holds every batch against what the plan relies on; the guard removes its hooks with all others.

    Args:
        problem: The model, data and loss.
        examined: What the first samples showed.
        linear: Layers and norm layers after which the network has to be piecewise linear.
        routes: How layers are measured sample by sample.
        unused: Layers that the first samples did not use and that may not be used at all.
    """

    def __init__(
        self,
        problem: Problem,
        examined: Examined,
        *,
        linear: Collection[str],
        routes: Iterable[LayerRoute],
        unused: Iterable[str],
    ) -> None:
        self._graph, self._linear = examined.graph, set(linear)
        self._shift_invariant = problem.loss.shift_invariant
        self._calls: list[_Call] = []
        records, modules = examined.records, dict(problem.model.named_modules())
        self._routes = {route.name: route for route in routes if records[route.name].meets_samples_once}
        # What goes through a parameter is not read off its calls.
        shared = [one.shared.modules for one in records.values() if one.shared and not one.via_parameter]
        self._measured = {*self._routes, *chain(*shared)}
        self._last = {name for name, route in self._routes.items() if route.kind == "softmax head"}
        self._owners: dict[int, str] = {}
        for name in sorted(self._linear | self._last):
            self._owners |= dict.fromkeys(map(id, own_parameters(modules[name])), name)
        problem.model.register_forward_pre_hook(lambda *_: self._calls.clear())
        for name in self._linear | self._measured:
            modules[name].register_forward_hook(partial(self._note, name))
        for name in unused:
            modules[name].register_forward_pre_hook(partial(_refuse_call, name))

    def _note(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            edge = get_gradient_edge(output) if output.requires_grad else None
            z, version = (output.detach(), output._version) if name in self._last else (None, 0)
            self._calls.append(_Call(name, edge, output.shape, z, version))

    def __call__(self, logits: Tensor) -> None:
        """Look at the outputs of a batch, laid out as predictions.

        Raises:
            NotExactError: If the plan does not hold for them.
        """
        latest = {call.name: call for call in self._calls}
        for name in self._routes.keys() & latest.keys():
            self._check_rows(self._routes[name], latest[name].shape, len(logits))
        if logits.requires_grad:
            self._check_blocks(logits)
            self._check_path(logits, latest)
        for name in self._last & latest.keys():
            route, call = self._routes[name], latest[name]
            z = call.z
            if z is None or z._version != call.version or not _same_up_to_shifts(route, z, logits.detach()):
                raise NotExactError(
                    f"{_PATH}on a later one something follows {name!r}, which was the last "
                    f"layer for the first samples. {_NEEDED}"
                )
        self._calls.clear()

    def _check_path(self, logits: Tensor, latest: Mapping[str, _Call]) -> None:
        """Refuse operators, and uses of parameters, that the first samples did not have."""
        edges = {name: call.edge for name, call in latest.items() if name in self._linear and call.edge}
        graph = read_graph(logits, edges, final_log_softmax=self._shift_invariant)
        found = set(graph.operators - self._graph.operators).union(*graph.curved.values())
        if found:
            met = listed(sorted(found))
            raise NotExactError(f"{_PATH}a later one meets {met}, which the first samples did not. {_NEEDED}")
        for key, name in self._owners.items():
            uses, known = graph.uses.get(key, 0), self._graph.uses.get(key, 0)
            if uses > known:
                raise NotExactError(
                    f"{_PATH}a later one uses a parameter of {name!r} {uses} times, the first samples "
                    f"{known}. {_NEEDED}"
                )

    def _check_rows(self, route: LayerRoute, shape: torch.Size, n: int) -> None:
        per_row = shape[-1:] if route.layer.plain else shape[1:]
        name, rows = route.name, shape.numel() // max(1, per_row.numel())
        if rows % n:
            raise LayerError(
                f"Expected {name!r} to be given as many rows for each sample but it was given {rows} for {n} "
                "samples. Look for a mask that leaves some out, and pass batch_size=1, or layers= without it."
            )
        if route.positions == 1 and route.layer.plain and rows != n:
            raise LayerError(
                f"Expected {name!r} to be given one row for each sample, as for the first samples, but it "
                f"was given {rows} for {n} samples. Put the longest samples first."
            )

    def _check_blocks(self, logits: Tensor) -> None:
        """Refuse flattened rows, (n·P, …), that are not P for each sample in turn.

        Signals of every other sample leave the rows of all samples between them at 0, exactly: no output
        depends on them.
        """
        n = len(logits)
        calls = [call for call in self._calls if call.name in self._measured and call.may_mix(n)]
        if not calls:
            return
        edges = [call.edge for call in calls]
        for first in (0, 1):
            sent = torch.zeros_like(logits)
            sent[first::2] = 1 + torch.arange(logits[0].numel()).view(logits[0].shape).to(sent) % 7
            arrived = torch.autograd.grad(logits, edges, sent, retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
            for call, signal in zip(calls, arrived, strict=True):
                if signal is not None and bool(signal.unflatten(0, (n, -1))[1 - first :: 2].any()):
                    raise LayerError(
                        f"Expected {call.name!r} to be given as many rows for each sample, one sample after "
                        f"the other, but in a batch of {n} samples some of its {len(signal)} rows lie "
                        "elsewhere. Look for a mask that leaves some out, and pass batch_size=1, or layers= "
                        "without it."
                    )


def _refuse_call(name: str, *_: object) -> None:
    raise LayerError(
        f"{_PATH}a later one calls {name!r}, which the first samples did not. Name the layers to "
        "measure with layers=, leaving out those that are used only sometimes."
    )


def _same_up_to_shifts(route: LayerRoute, z: Tensor, logits: Tensor) -> bool:
    """Whether logits (n, T, K) are what a layer puts out at T positions, up to a shift for each."""
    if z.numel() == logits.numel() and z.data_ptr() == logits.data_ptr():
        return True
    n, T, _ = logits.shape
    rows = route.layer.signals(z, n)[:, 0].transpose(1, 2)
    rows = rows[:, route.predictions(rows.shape[1], T)]
    if rows.shape != logits.shape:
        return False
    apart = (logits - rows).float() if logits.element_size() < 4 else logits - rows
    spread = apart.amax(-1) - apart.amin(-1)
    # A network in double precision may end in a log-softmax of `z.float()`.
    eps = max(torch.finfo(logits.dtype).eps, torch.finfo(torch.float32).eps)
    return bool((spread <= eps**0.5 * (1 + rows.abs().amax(-1))).all())
