"""What a few samples tell about a network: which layers run, how weights are used, what comes after them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flatness.curvature.parameters.parameter_products import own_parameter
from flatness.curvature.sums.routes import marker
from flatness.errors import ModelError, OutOfMemoryError
from flatness.losses import Items
from flatness.measuring.examine.examined import Examined, LayerRecord, notes_on
from flatness.measuring.examine.probe import check_runs, largest, run_alone, settled_run
from flatness.measuring.examine.reuse import Reuse, find_reuse, tied_embeddings
from flatness.measuring.examine.unfamiliar import misread_samples
from flatness.network.affine import AffineModule, find_affine
from flatness.network.graph import InPlaceOperators, NetworkGraph, read_graph
from flatness.network.layers import Layer, find_layers, own_parameters
from flatness.network.layers.shared import EmbeddingLayer
from flatness.network.memory import fits, ran_out
from flatness.network.operators import WRITTEN
from flatness.network.recording import Record, Recording
from flatness.problem import batches
from flatness.problem.guard import differentiable
from flatness.problem.problem import Problem

View = Layer | AffineModule

_SAMPLES = (8, 4, 2, 1)
_CUT_OFF = "no gradient reaches it (torch.no_grad, detach or reentrant checkpointing in the forward pass)"
# Only the math kernel of fused attention has this operator.
_FUSED = "SafeSoftmax"
_MATH_ATTENTION = "attention runs as its math kernel, which has second derivatives; fused kernels have none"


def examine(problem: Problem, *, last_only: bool = False) -> Examined:
    """Run a few samples and record them, fewer when they do not fit into memory.

    Args:
        problem: The model, data and loss.
        last_only: Whether nothing is asked of any layer but the last; then no other need be differentiable.
    """
    for size in _SAMPLES:
        found: list[Examined] = []
        work = partial(_examine_into, found, problem, size, last_only)
        if fits(work, problem.device):
            return found[0]
    raise OutOfMemoryError(
        f"Expected one sample to fit into memory but it does not, on {problem.device}. "
        "Use a lower dtype, or a device with more memory."
    )


def _examine_into(found: list[Examined], problem: Problem, size: int, last_only: bool) -> None:
    found.append(_examine(problem, problem.example(size), last_only))


def _examine(problem: Problem, example: Any, last_only: bool) -> Examined:
    """Three runs: as it is, one sample alone, all recorded with gradients; more only if they show a need."""
    first = settled_run(problem, example)
    # The first run of all may make or replace modules.
    views = _views(problem.model)
    alone = run_alone(problem, example, views)
    views = {name: view for name, view in views.items() if name not in alone.misread}
    misread = misread_samples(problem, {name: view for name, view in views.items() if name in alone.inputs})
    views = {name: view for name, view in views.items() if name not in misread}
    record = partial(_recorded, problem, example, views, last_only)
    run = record(check=lambda again: check_runs(problem, example, first, again, alone))
    if not run.settled:
        run = record(copy_inputs=run.overwrites, note_writes=True)
    examined = Examined(
        items=run.items,
        graph=run.graph,
        records=_records(problem, example, views, run, alone.inputs),
        called=[name for name in run.calls if _is_layer(views[name])],
        affine={name: view for name in run.calls if isinstance(view := views[name], AffineModule)},
        overwrites=run.overwrites,
        writers=tuple(run.writers),
    )
    notes = notes_on(problem.model, examined, [*alone.misread, *misread])
    return replace(examined, notes=(*[_MATH_ATTENTION] * (_FUSED in run.graph.operators), *notes))


def _views(model: nn.Module) -> dict[str, View]:
    """The modules to look at, by name."""
    layers = find_layers(model)
    return {**layers, **tied_embeddings(model, layers), **find_affine(model)}


def _is_layer(view: View) -> bool:
    """Embeddings are looked at only because their table is another layer's weight."""
    return isinstance(view, Layer) and not isinstance(view, EmbeddingLayer)


@dataclass
class _RecordedRun:
    """The example, run once with its graph.

    Attributes:
        items: The outputs.
        calls: What was recorded of every module that ran, call by call.
        graph: What the autograd graph says.
        overwrites: Whether the network overwrites what layers were given.
        writers: Names of `autograd.Function`s that write into what they are given.
        settled: Whether this says all; else what is overwritten was not copied, or what writes not noted.
        reuse: Weights that are used more than once, by module.
        undifferentiable: Why torch cannot differentiate what follows a module.
        marked: What arrives at modules whose output may be the network's when `marker` is sent back.
    """

    items: Items
    calls: dict[str, list[Record]]
    graph: NetworkGraph
    overwrites: bool
    writers: list[str]
    settled: bool
    reuse: dict[str, Reuse] = field(default_factory=dict)
    undifferentiable: dict[str, str] = field(default_factory=dict)
    marked: dict[str, Tensor] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """How often every module ran."""
        return {name: len(calls) for name, calls in self.calls.items()}


def _recorded(
    problem: Problem,
    example: Any,
    views: Mapping[str, View],
    last_only: bool,
    *,
    check: Callable[[Tensor], None] | None = None,
    copy_inputs: bool = False,
    note_writes: bool = False,
) -> _RecordedRun:
    """Run the example with its graph and read it.

    Args:
        problem: The model, data and loss.
        example: A few samples.
        views: The modules to record.
        last_only: As in `examine`.
        check: Called with the logits before anything else is made of them.
        copy_inputs: Whether to record copies of what layers are given.
        note_writes: Whether to watch every operator for writing in place; slow.
    """
    modules = {name: view.module for name, view in views.items()}
    with differentiable(problem.model), Recording(modules, copy_inputs=copy_inputs) as recording:
        in_place = InPlaceOperators()
        with in_place if note_writes else nullcontext():
            output, target = problem.outputs(batches.copied(example))
        items = problem.laid_out(output, target, look=False)
        if check is not None:
            with recording.paused():
                check(items.logits)
        edges = {name: calls[-1].z_edge for name, calls in recording.calls.items()}
        graph = read_graph(
            items.logits,
            {name: edge for name, edge in edges.items() if edge is not None},
            final_log_softmax=problem.loss.shift_invariant,
            curved_in_place=in_place.curved,
        )
        overwrites = copy_inputs or bool(recording.overwritten())
        run = _RecordedRun(
            items,
            dict(recording.calls),
            graph,
            overwrites,
            writers=in_place.functions,
            settled=overwrites == copy_inputs and (note_writes or WRITTEN not in graph.operators),
        )
        if run.settled:
            run.reuse = find_reuse(views, run.counts, graph.uses)
            _send_back(run, [name for name in run.calls if _is_layer(views[name])], last_only)
    return run


def _send_back(run: _RecordedRun, called: list[str], last_only: bool) -> None:
    """Send one signal back, so that what cannot be differentiated is known before any data is read."""
    reached, counts = sorted(run.graph.reached), run.counts
    if not run.items.logits.requires_grad:
        raise ModelError(
            "Expected an output that can be differentiated but the forward pass runs under torch.no_grad or "
            "detaches it. Take that out of the model's code: measuring needs the graph."
        )
    last = next((name for name in reversed(called) if name in run.graph.reached), None)
    if last_only and last is not None and not run.graph.curved[last]:
        reached = [last]
    if _backward_error(run, reached) is not None:
        errors = {name: _backward_error(run, [name]) for name in reached}
        run.undifferentiable = {
            name: f"torch cannot differentiate what follows it: {error}"
            for name, error in errors.items()
            if error is not None
        }
    if run.counts != counts:
        raise ModelError(
            "Expected layers that run in the forward pass only but the backward pass runs them again: "
            "activation checkpointing. Switch it off in the model and measure again; memory is kept by "
            "smaller micro-batches here."
        )


def _backward_error(run: _RecordedRun, names: list[str]) -> str | None:
    """What torch says against derivatives at these modules; None when there is nothing."""
    output, edges = run.items.logits, [run.calls[name][-1].z_edge for name in names]
    sent = marker(run.items)
    try:
        if edges:
            arrived = torch.autograd.grad(output, edges, sent, retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
            run.marked |= {
                name: signal
                for name, signal in zip(names, arrived, strict=True)
                if signal is not None and signal.numel() == sent.numel()
            }
    except RuntimeError as error:
        if ran_out(error):
            raise
        return str(error).split(":")[0].splitlines()[0]
    return None


def _records(
    problem: Problem,
    example: Any,
    views: Mapping[str, View],
    run: _RecordedRun,
    alone: Mapping[str, list[Tensor]],
) -> dict[str, LayerRecord]:
    """One record per module, with the first reason against it that was found."""
    loose, rigid = _reasons(views, run, alone)
    unreached = [name for name in run.calls if name not in run.graph.reached]
    cut_off = _cut_off(problem, example, run, {name: views[name] for name in unreached})
    once = Reuse(1, None, all_seen=True)

    def record(name: str, view: View) -> LayerRecord:
        reuse, calls = run.reuse.get(name, once), run.calls.get(name)
        return LayerRecord(
            name,
            view,
            call=calls[-1] if calls else None,
            operators=tuple(run.graph.curved.get(name, ())),
            uses=reuse.times,
            shared=reuse.shared,
            refused=loose.get(name) or rigid.get(name) or cut_off.get(name),
            via_parameter=name in loose and name not in unreached and _has_parameter(problem.model, view),
            idle=name in unreached and name not in cut_off,
            unused=not calls and run.graph.uses.keys().isdisjoint(map(id, own_parameters(view.module))),
            marked=run.marked.get(name),
        )

    return {name: record(name, view) for name, view in views.items()}


def _reasons(
    views: Mapping[str, View], run: _RecordedRun, alone: Mapping[str, list[Tensor]]
) -> tuple[dict[str, str], dict[str, str]]:
    """Why modules are refused that products with a parameter may measure, and why others are."""
    loose = {name: f"its weight is used {r.times} times" for name, r in run.reuse.items() if not r.all_seen}
    rigid = {name: reason for name, reason in run.undifferentiable.items() if name not in loose}
    loose |= _mixed_rows(views, run, alone, {*loose, *rigid})
    for name, reuse in run.reuse.items():
        uses = [use.name for use in reuse.shared.uses] if reuse.shared is not None else []
        found = [reason for use in uses if (reason := loose.get(use) or rigid.get(use))]
        loose |= {name: found[0]} if found else {}
    return loose, rigid


def _has_parameter(model: nn.Module, view: View) -> bool:
    """Whether a module's weight is a parameter, or a part of one."""
    return isinstance(view, AffineModule) or own_parameter(model, view) is not None


def _mixed_rows(
    views: Mapping[str, View], run: _RecordedRun, alone: Mapping[str, list[Tensor]], refused: set[str]
) -> dict[str, str]:
    """Why modules are refused whose inputs are not laid out sample by sample.

    The first rows of every input must be those of the first sample alone.
    """
    n, mixed = run.items.logits.shape[0], {}
    for name, calls in run.calls.items():
        if name in refused:
            continue
        if name not in alone:
            mixed[name] = calls[0].x  # it is given some samples only
        for call, own in zip(calls, alone.get(name, ()), strict=False):
            if n > 1 and not _begins_with(call.x, own, n, several=_is_layer(views[name])):
                mixed[name] = call.x
    return {
        name: f"its input, of shape {list(x.shape)} for {n} samples, is not laid out sample by sample"
        for name, x in mixed.items()
    }


def _begins_with(x: Tensor, own: Tensor, n: int, *, several: bool) -> bool:
    """Whether the input of n samples begins with that of the first alone, which may have several rows."""
    rows = len(own)
    if x.shape != (n * rows, *own.shape[1:]) or (rows > 1 and not several):
        return False
    return not largest(x[:rows] - own) > 1e-2 * largest(own)


def _cut_off(problem: Problem, example: Any, run: _RecordedRun, views: Mapping[str, View]) -> dict[str, str]:
    """Why modules are refused that influence the output though no gradient reaches them.

    Args:
        problem: The model, data and loss.
        example: A few samples.
        run: What was recorded of them.
        views: The modules that no gradient reaches.
    """
    seen = {name: view for name, view in views.items() if not isinstance(view, EmbeddingLayer)}
    if not seen or not _influence(problem, example, run.items, seen.values()):
        return {}
    return {name: _CUT_OFF for name, view in seen.items() if _influence(problem, example, run.items, [view])}


def _influence(problem: Problem, example: Any, items: Items, views: Iterable[View]) -> bool:
    """Whether the output changes when these modules return something else."""
    handles = [view.module.register_forward_hook(lambda m, a, output: 1.5 * output + 1) for view in views]
    try:
        with torch.no_grad():
            other = problem.items(batches.copied(example)).logits
    finally:
        for handle in handles:
            handle.remove()
    logits = items.logits.detach()
    return not bool((other - logits).abs().max() <= 1e-5 * logits.abs().max())
