"""Watching later batches: a plan holds for the path through the network that the first samples took."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from flatness.curvature.sums.routes import LayerRoute
from flatness.errors import LayerError, NotExactError, listed
from flatness.measuring.examine.examined import Examined
from flatness.network.graph import read_graph
from flatness.network.layers import Layer
from flatness.problem.problem import Problem

_PATH = "Expected every batch to take the same path through the network but "
_NEEDED = "Exact curvature needs a path that does not depend on the data."


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
        self._known = examined.graph.operators
        self._shift_invariant = problem.loss.shift_invariant
        records = examined.records
        self._routes = {route.name: route for route in routes if records[route.name].meets_samples_once}
        self._last = {
            name: route.layer for name, route in self._routes.items() if route.kind == "softmax head"
        }
        self._uses = {
            id(parameter): (name, examined.graph.uses.get(id(parameter), 0))
            for name in sorted({*linear, *self._last})
            for parameter in problem.model.get_submodule(name).parameters(recurse=False)
        }
        self._edges: dict[str, GradientEdge] = {}
        self._outputs: dict[str, tuple[Tensor, int]] = {}
        self._rows: dict[str, int] = {}
        self._calls: list[tuple[str, GradientEdge, int]] = []
        shared = [record.shared for record in records.values() if record.shared is not None]
        self._measured = {*self._routes, *(use.name for layer in shared for use in layer.uses)}
        problem.model.register_forward_pre_hook(self._forget)
        for name in {*linear, *self._measured}:
            problem.model.get_submodule(name).register_forward_hook(self._note(name, name in linear))
        for name in unused:
            problem.model.get_submodule(name).register_forward_pre_hook(partial(_refuse_call, name))

    def __call__(self, logits: Tensor) -> None:
        """Look at the outputs of a batch, laid out as predictions.

        Raises:
            NotExactError: If the plan does not hold for them.
        """
        for name, rows in self._rows.items():
            self._check_rows(name, rows, len(logits))
        if logits.requires_grad:
            self._check_blocks(logits)
            graph = read_graph(logits, self._edges, final_log_softmax=self._shift_invariant)
            found = set(graph.operators - self._known).union(*graph.curved.values())
            if found:
                met = listed(sorted(found))
                raise NotExactError(
                    f"{_PATH}a later one meets {met}, which the first samples did not. {_NEEDED}"
                )
            for key, (name, uses) in self._uses.items():
                if graph.uses.get(key, 0) > uses:
                    raise NotExactError(
                        f"{_PATH}a later one uses a parameter of {name!r} {graph.uses[key]} times, the first "
                        f"samples {uses}. {_NEEDED}"
                    )
        for name, (z, version) in self._outputs.items():
            if z._version != version or not _same_up_to_shifts(self._last[name], z, logits.detach()):
                raise NotExactError(
                    f"{_PATH}on a later one something follows {name!r}, which was last for the first "
                    f"samples. {_NEEDED}"
                )
        self._forget()

    def _check_rows(self, name: str, rows: int, n: int) -> None:
        if rows % n:
            raise LayerError(
                f"Expected {name!r} to be given as many rows for each sample but it was given {rows} for {n} "
                "samples. Look for a mask that leaves some out, and pass batch_size=1, or layers= without it."
            )
        if self._routes[name].positions == 1 and self._routes[name].layer.plain and rows != n:
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
        calls = [(name, edge) for name, edge, rows in self._calls if rows != n and rows % n == 0]
        if n == 1 or not calls:
            return
        edges = [edge for _, edge in calls]
        for first in (0, 1):
            sent = torch.zeros_like(logits)
            sent[first::2] = 1 + torch.arange(logits[0].numel()).view(logits[0].shape).to(sent) % 7
            arrived = torch.autograd.grad(logits, edges, sent, retain_graph=True, allow_unused=True)
            for (name, _), signal in zip(calls, arrived, strict=True):
                if signal is not None and bool(signal.unflatten(0, (n, -1))[1 - first :: 2].any()):
                    raise LayerError(
                        f"Expected {name!r} to be given as many rows for each sample, one sample after the "
                        f"other, but in a batch of {n} samples some of its {len(signal)} rows lie elsewhere. "
                        "Look for a mask that leaves some out, and pass batch_size=1, or layers= without it."
                    )

    def _forget(self, *_: Any) -> None:
        self._edges.clear()
        self._outputs.clear()
        self._rows.clear()
        self._calls.clear()

    def _note(self, name: str, linear: bool) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not isinstance(output, Tensor):
                return
            if linear and output.requires_grad:
                self._edges[name] = get_gradient_edge(output)
            if name in self._measured and output.requires_grad and output.dim():
                self._calls.append((name, get_gradient_edge(output), len(output)))
            route = self._routes.get(name)
            if route is not None:
                per_row = output.shape[-1:] if route.layer.plain else output.shape[1:]
                self._rows[name] = output.numel() // max(1, per_row.numel())
            if name in self._last:
                self._outputs[name] = (output.detach(), output._version)

        return hook


def _refuse_call(name: str, *_: object) -> None:
    raise LayerError(
        f"{_PATH}a later one calls {name!r}, which the first samples did not. Name the layers to "
        "measure with layers=, without those used now and then."
    )


def _same_up_to_shifts(layer: Layer, z: Tensor, logits: Tensor) -> bool:
    """Whether logits (n, T, K) are what a layer puts out at T positions, up to a shift for each."""
    if z.numel() != logits.numel():
        return False
    if z.data_ptr() == logits.data_ptr():
        return True
    rows = layer.signals(z, len(logits))[:, 0].transpose(1, 2)
    if rows.shape != logits.shape:
        return False
    apart = (logits - rows).float() if logits.element_size() < 4 else logits - rows
    spread = apart.amax(-1) - apart.amin(-1)
    # A network in double precision may end in a log-softmax of `z.float()`.
    eps = max(torch.finfo(logits.dtype).eps, torch.finfo(torch.float32).eps)
    return bool((spread <= eps**0.5 * (1 + rows.abs().amax(-1))).all())
