"""What a few samples tell about a network: which layers run, how weights are used, what comes after them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flatness.curvature.sums.routes import marker
from flatness.errors import FlatnessError, ModelError, OutOfMemoryError
from flatness.losses import Items
from flatness.measuring.examine.examined import (
    Examined,
    LayerRecord,
    Reuse,
    find_reuse,
    last_of,
    notes_on,
)
from flatness.measuring.examine.probe import Alone, check_runs, largest, run_alone, settled_run
from flatness.measuring.examine.unfamiliar import View, misread_samples
from flatness.network.affine import AffineModule, find_affine
from flatness.network.graph import InPlaceOperators, nodes_behind, read_graph
from flatness.network.layers import Layer, find_layers, own_parameter, own_parameters
from flatness.network.memory import attempt, fits, ran_out
from flatness.network.operators import WRITTEN
from flatness.network.recording import Record, Recording
from flatness.problem import batches
from flatness.problem.guard import differentiable
from flatness.problem.problem import Problem

if TYPE_CHECKING:
    from flatness.network.repeated_parameters import Shape

_SAMPLES = (8, 4, 2, 1)
# The most outputs that all examined samples have together, unless there are only two samples: two sequences
# of a language model have a hundred million.
_MOST_OUTPUTS = 1 << 26
_CUT_OFF = "no gradient reaches it (the forward pass uses torch.no_grad, detach or reentrant checkpointing)"
_PROBABILITIES = (
    "the outputs are probabilities, but the loss applies a softmax to them; return logits, or pass "
    "loss='nll' with log-probabilities"
)
# Only the math kernel of fused attention has this operator.
_FUSED = "scaled_dot_product_attention"
_MATH_ATTENTION = (
    "attention is computed by torch's math kernel, because the fused kernels have no second derivatives"
)


def examine(problem: Problem, *, last_only: bool = False) -> Examined:
    """Run a few samples and record them, fewer when they do not fit into memory.

    Args:
        problem: The model, data and loss.
        last_only: Whether nothing is asked of any layer but the last; then no other need be differentiable.
    """
    found: list[Examined] = []
    for size in _SAMPLES:
        if fits(lambda: found.append(_examine_all(problem, size, last_only)), problem.device):  # noqa: B023
            return found[0]
    raise OutOfMemoryError(
        f"Expected one sample to fit into memory but it does not, on {problem.device}. "
        "Use a lower dtype, or a device with more memory."
    )


def _examine_all(problem: Problem, size: int, last_only: bool) -> Examined:
    """The first samples and, where they do not reach all experts of a mixture, samples that do."""
    example = problem.example(size)
    examined = _examine(problem, example, last_only)
    if not examined.unused:
        return examined
    from flatness.measuring.examine.routed import unreached_experts, with_samples_of

    names = unreached_experts(problem.model, examined)
    wider = with_samples_of(problem, example, names) if names else None
    return examined if wider is None else _examine(problem, wider, last_only)


def _examine(problem: Problem, example: Any, last_only: bool) -> Examined:
    """Three runs: as it is, one sample alone, all recorded with gradients; more only if they show a need."""
    first = settled_run(problem, example)
    if first.logits.numel() > _MOST_OUTPUTS and len(first.logits) > 2:
        example = batches.copied(batches.rows(example, 0, 2))
        first = settled_run(problem, example)
    # The first run of all may make or replace modules.
    views: dict[str, View] = {**find_layers(problem.model), **find_affine(problem.model)}
    alone = run_alone(problem, example, views)
    seen = {name: views[name] for name in alone.inputs if name not in alone.misread}
    misread = [*alone.misread, *misread_samples(problem, seen)]
    views = {name: view for name, view in views.items() if name not in misread}
    run = _recorded(problem, example, views)
    check_runs(problem, example, first, run.items.logits, alone)
    run = _with_repeated_tokens(problem, example, views, run, alone)
    if run.overwrites or WRITTEN in run.graph.operators:
        run = _recorded(problem, example, views, copy_inputs=run.overwrites, note_writes=True)
    sent_back = _send_back(problem, run, views, last_only)
    examined = replace(run, records=_records(problem, example, views, run, alone, sent_back))
    notes = [_MATH_ATTENTION] * (_FUSED in run.graph.operators) + notes_on(problem.model, examined, misread)
    notes += [_PROBABILITIES] * _are_probabilities(problem, first.logits)
    return replace(examined, notes=tuple(notes))


def _are_probabilities(problem: Problem, logits: Tensor) -> bool:
    """Whether the supposed logits are at least 0 and sum to 1 for every prediction."""
    if problem.loss.name != "cross_entropy" or logits.shape[-1] == 1:
        return False
    return bool((logits >= 0).all() and ((logits.float().sum(-1) - 1).abs() < 1e-2).all())


def _with_repeated_tokens(
    problem: Problem, example: Any, views: Mapping[str, View], run: Examined, alone: Alone
) -> Examined:
    """The run again with tables of positions looked up once for each sample, where that changes nothing.

    Their signals then come back sample by sample, like those of all other layers.
    """
    tables = _position_tables(views, run, alone)
    if not tables:
        return run
    from flatness.network.repeated_parameters import told_apart

    with problem.repeated_tokens({views[name].module: x for name, x in tables.items()}) as keep:
        again, _ = attempt(lambda: _recorded(problem, example, views), RuntimeError, FlatnessError)
        if again is None:
            return run
        edges = [again.recorded[name][0].z_edge for name in tables]
        if not told_apart(run.items.logits, again.items.logits, edges):
            return run
        keep()
    for name, tokens in tables.items():
        alone.inputs[name] = [tokens.reshape(1, *again.recorded[name][0].x.shape[1:])]
    return again


def _position_tables(views: Mapping[str, View], run: Examined, alone: Alone) -> dict[str, Tensor]:
    """What tables are asked for, by name, where a sample by itself asks for the same as all together."""
    return {
        name: calls[0].x
        for name, calls in run.recorded.items()
        if isinstance(view := views[name], Layer) and view.chooses
        if len(run.items.logits) > 1 and len(calls) == 1
        if [x.shape for x in alone.inputs.get(name, [])] == [calls[0].x.shape]
        if torch.equal(alone.inputs[name][0], calls[0].x)
    }


def repeatable_parameters(problem: Problem, names: Iterable[str]) -> dict[str, Shape]:
    """The parameters among these that may have a copy for every sample, with the shape of a copy.

    Class tokens, positions, scales of residual branches: those that modules of a class have under the same
    name go together.
    """
    from flatness.network.repeated_parameters import RepeatedParameters, told_apart

    held, candidates = dict(problem.model.named_parameters()), _alike(problem.model, names)
    example = problem.example(2) if candidates else None
    if not candidates or batches.size_of(example) < 2:
        return {}
    with torch.no_grad():
        before = problem.items(batches.copied(example)).logits

    def fits_in(shapes: dict[str, Shape]) -> bool:
        with differentiable(problem.model), RepeatedParameters(problem.model, shapes) as repeated:
            try:
                # Of one sample other kernels may run, which take no copies.
                for part in (batches.rows(example, 0, 1), example):
                    repeated.prepare(batches.size_of(part))
                    after = problem.items(batches.copied(part)).logits
            except (RuntimeError, FlatnessError) as error:
                if ran_out(error):
                    raise
                return False
            own = [held[name] for name in shapes]
            return after.requires_grad and told_apart(before, after, repeated.copies.values(), own)

    found: dict[str, Shape] = {}
    for group in candidates:
        ways = [dict(zip(group, way, strict=True)) for way in zip(*group.values(), strict=True)]
        found |= next((way for way in ways if fits_in(way)), {})
    return {name: found[name] for name in names if name in found}


def _alike(model: nn.Module, names: Iterable[str]) -> list[dict[str, list[Shape]]]:
    """Shapes that copies may have, by name: groups that modules of a class have under the same name."""
    from flatness.network.repeated_parameters import shapes_of_copies

    groups: dict[object, dict[str, list[Shape]]] = {}
    for name in names:
        owner, _, key = name.rpartition(".")
        if shapes := shapes_of_copies(model.get_parameter(name)):
            kind = type(model.get_submodule(owner)), key, tuple(shapes)
            groups.setdefault(kind, {})[name] = shapes
    return list(groups.values())


def _recorded(
    problem: Problem,
    example: Any,
    views: Mapping[str, View],
    *,
    copy_inputs: bool = False,
    note_writes: bool = False,
) -> Examined:
    """Run the example with its graph and read it.

    Args:
        problem: The model, data and loss.
        example: A few samples.
        views: The modules to record.
        copy_inputs: Whether to record copies of what layers are given.
        note_writes: Whether to watch every operator for writing in place; slow.
    """
    in_place = InPlaceOperators()
    with differentiable(problem.model), Recording(_modules(views), copy_inputs=copy_inputs) as recording:
        with in_place if note_writes else nullcontext():
            output, target = problem.outputs(batches.copied(example))
        calls, overwrites = dict(recording.calls), copy_inputs or bool(recording.overwritten())
    items = problem.laid_out(output, target, look=False)
    behind = nodes_behind(items.logits)
    for call in chain.from_iterable(calls.values()):
        call.counts = call.z_edge is not None and call.z_edge.node in behind
    edges = {name: last_of(of_module).z_edge for name, of_module in calls.items()}
    graph = read_graph(
        items.logits,
        {name: edge for name, edge in edges.items() if edge is not None},
        final_log_softmax=problem.loss.shift_invariant,
        curved_in_place=in_place.curved,
    )
    return Examined(items, graph, calls, overwrites, tuple(in_place.functions))


def _modules(views: Mapping[str, View]) -> dict[str, nn.Module]:
    return {name: view.module for name, view in views.items()}


@dataclass
class _SentBack:
    """What a signal that is sent back from the outputs shows.

    Attributes:
        marked: What arrives at modules whose output may be the network's when `marker` is sent back.
        undifferentiable: Why torch cannot differentiate what follows a module.
    """

    marked: dict[str, Tensor] = field(default_factory=dict)
    undifferentiable: dict[str, str] = field(default_factory=dict)

    def differentiate(self, run: Examined, names: list[str]) -> None:
        """Take the derivatives at some modules at once; one after another where that fails."""
        output, edges = run.items.logits, [run.calls[name].z_edge for name in names]
        sent = marker(run.items)
        try:
            arrived = torch.autograd.grad(output, edges, sent, retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
        except RuntimeError as error:
            if ran_out(error):
                raise
            if len(names) == 1:
                reason = str(error).split(":")[0].splitlines()[0]
                self.undifferentiable[names[0]] = f"torch cannot differentiate what follows it: {reason}"
                return
            for name in names:
                self.differentiate(run, [name])
            return
        for name, signal in zip(names, arrived, strict=True):
            # Layout moves numbers, or leaves some out; none but a network's last modules get as many.
            if signal is not None and signal.count_nonzero() == sent.count_nonzero():
                self.marked[name] = signal


def _send_back(problem: Problem, run: Examined, views: Mapping[str, View], last_only: bool) -> _SentBack:
    """Send one signal back, so that what cannot be differentiated is known before any data is read."""
    if not run.items.logits.requires_grad:
        raise ModelError(
            "Expected an output that can be differentiated, but the forward pass runs under torch.no_grad "
            "or detaches it. Remove that from the model's code: measuring needs the graph."
        )
    reached, found = [name for name in run.recorded if name in run.graph.reached], _SentBack()
    last = [name for name in reached if isinstance(views[name], Layer)][-1:]
    only = last if last_only and last and not run.graph.curved[last[0]] else reached
    with differentiable(problem.model), Recording(_modules(views), edges=False) as again:
        if only:
            found.differentiate(run, sorted(only))
        if again.calls:
            raise ModelError(
                "The backward pass runs the layers again, as activation checkpointing does, so they cannot "
                "be recorded. Switch checkpointing off and measure again; smaller micro-batches save memory "
                "here."
            )
    return found


def _records(
    problem: Problem,
    example: Any,
    views: Mapping[str, View],
    run: Examined,
    alone: Alone,
    sent_back: _SentBack,
) -> dict[str, LayerRecord]:
    """One record per module, with the first reason against it that was found."""
    counts = {name: len(calls) for name, calls in run.recorded.items()}
    reuse = find_reuse(views, run.recorded, run.graph.uses)
    refused = _refused(views, run, alone, reuse, sent_back.undifferentiable)
    unreached = {name: views[name] for name in counts if name not in run.graph.reached}
    cut_off = _cut_off(problem, example, run, unreached)

    def record(name: str, view: View) -> LayerRecord:
        used, parameters = reuse.get(name, Reuse(1, None, all_seen=True)), own_parameters(view.module)
        reason, loose = refused.get(name, (cut_off.get(name), False))
        return LayerRecord(
            name,
            view,
            operators=tuple(run.graph.curved.get(name, ())),
            uses=used.times,
            shared=used.shared,
            refused=reason,
            via_parameter=loose and name not in unreached and _has_parameter(problem.model, view),
            idle=name in unreached and name not in cut_off,
            unused=name not in counts and run.graph.uses.keys().isdisjoint(map(id, parameters)),
            marked=sent_back.marked.get(name),
        )

    return {name: record(name, view) for name, view in views.items()}


def _refused(
    views: Mapping[str, View],
    run: Examined,
    alone: Alone,
    reuse: Mapping[str, Reuse],
    undifferentiable: Mapping[str, str],
) -> dict[str, tuple[str, bool]]:
    """Why signals at calls do not give a module's curvature, and whether products with a parameter may."""
    found = {name: (reason, False) for name, reason in undifferentiable.items()}
    again = {name: used.times for name, used in reuse.items() if not used.all_seen}
    found |= {name: (f"its weight is used {times} times", True) for name, times in again.items()}
    found |= _mixed(views, run, alone, run.recorded.keys() - found.keys())
    for name, used in reuse.items():
        uses = [] if used.shared is None else used.shared.uses
        reasons = [found[use.name][0] for use in uses if use.name in found]
        if reasons:
            found[name] = (reasons[0], True)
    return found


def _mixed(
    views: Mapping[str, View], run: Examined, alone: Alone, names: Iterable[str]
) -> dict[str, tuple[str, bool]]:
    """The modules among these whose inputs are not laid out sample by sample."""
    found, n = {}, len(run.items.logits)
    for name in names:
        x = _mixed_input(views[name], run.recorded[name], alone.inputs.get(name, []), n)
        if x is not None:
            shape = list(x.shape)
            reason = f"its input, of shape {shape} for {n} samples, is not laid out sample by sample"
            found[name] = (reason, True)
    return found


def _has_parameter(model: nn.Module, view: View) -> bool:
    """Whether a module's weight is a parameter, or a part of one."""
    return isinstance(view, AffineModule) or own_parameter(model, view) is not None


def _mixed_input(view: View, calls: list[Record], alone: list[Tensor], n: int) -> Tensor | None:
    """An input of a module that is not laid out sample by sample; None where all are.

    The first rows of every input must be those of the first sample alone.
    """
    if not alone:
        return calls[0].x  # it is given some samples only
    pairs = zip(calls, alone, strict=False)
    mixed = [
        call.x for call, own in pairs if not _begins_with(call.x, own, n, several=isinstance(view, Layer))
    ]
    return mixed[-1] if mixed and n > 1 else None


def _begins_with(x: Tensor, own: Tensor, n: int, *, several: bool) -> bool:
    """Whether the input of n samples begins with that of the first alone, which may have several rows."""
    rows = len(own)
    if x.shape != (n * rows, *own.shape[1:]) or (rows > 1 and not several):
        return False
    apart, size = largest(x[:rows] - own, own)
    return not apart > 1e-2 * size


def _cut_off(problem: Problem, example: Any, run: Examined, views: Mapping[str, View]) -> dict[str, str]:
    """Why modules are refused that influence the output though no gradient reaches them.

    Args:
        problem: The model, data and loss.
        example: A few samples.
        run: What was recorded of them.
        views: The modules that no gradient reaches.
    """
    if not views or not _influence(problem, example, run.items, views.values()):
        return {}
    return {name: _CUT_OFF for name, view in views.items() if _influence(problem, example, run.items, [view])}


def _influence(problem: Problem, example: Any, items: Items, views: Iterable[View]) -> bool:
    """Whether the output changes when these modules return something else."""
    with ExitStack() as hooks, torch.no_grad():
        for view in views:
            hook = view.module.register_forward_hook(lambda m, a, output: 1.5 * output + 1)
            hooks.enter_context(hook)
        other = problem.items(batches.copied(example)).logits
    logits = items.logits.detach()
    return not bool((other - logits).abs().max() <= 1e-5 * logits.abs().max())
