"""What a few samples tell about a network: which layers run, how weights are used, what comes after them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from flatness.curvature.parameters.parameter_products import own_parameter
from flatness.curvature.sums.routes import marker
from flatness.errors import ModelError, OutOfMemoryError
from flatness.losses import Items
from flatness.measuring.examine.alone import run_alone
from flatness.measuring.examine.examined import Examined, add_notes
from flatness.measuring.examine.probe import check_runs, explain, largest, run_whole, settle_weights
from flatness.measuring.examine.randomness import Draws
from flatness.measuring.examine.reuse import find_reuse, tied_embeddings
from flatness.measuring.examine.unfamiliar import misread_samples
from flatness.network.affine import AffineModule, find_affine
from flatness.network.graph import InPlaceOperators, read_graph
from flatness.network.layers import Layer, find_layers, own_parameters
from flatness.network.layers.shared import EmbeddingLayer
from flatness.network.memory import fits, ran_out
from flatness.network.operators import WRITTEN, is_layout, operator_name
from flatness.network.parts import modules
from flatness.network.recording import Record, Recording
from flatness.problem import batches
from flatness.problem.guard import differentiable
from flatness.problem.problem import Problem
from flatness.problem.repeating import FirstOutputs

_SAMPLES = (8, 4, 2, 1)
_CUT_OFF = "no gradient reaches it (torch.no_grad, detach or reentrant checkpointing in the forward pass)"
# Only the math kernel of fused attention has this operator.
_FUSED = "SafeSoftmax"
_MATH_ATTENTION = "attention runs as its math kernel, which has second derivatives; fused kernels have none"


def examine(problem: Problem, *, last_only: bool = False) -> Examined:
    """Probe the model and record a few samples, fewer when they do not fit into memory.

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
    """Two runs: one sample alone, and all recorded with gradients; more only if they show a need."""
    draws = Draws(problem.model, problem.seed)
    try:
        parts = modules(problem.model)
        views = _views(problem.model)
        alone = run_alone(problem, example, views)
        if modules(problem.model) != parts:
            # The first run of all made or replaced modules.
            views = _views(problem.model)
            alone = run_alone(problem, example, views)
        if settle_weights(problem, example):
            alone = run_alone(problem, example, views)
        views = {name: view for name, view in views.items() if name not in alone.misread}
        later = misread_samples(problem, {name: view for name, view in views.items() if name in alone.inputs})
        views = {name: view for name, view in views.items() if name not in later}
        record = partial(_recorded, problem, example, views, last_only)
        examined = record(check=lambda items: check_runs(problem, example, items, alone.logits, draws))
    except Exception as error:
        explain(problem, example, error)
        raise
    if not examined.settled:
        examined = record(copy_inputs=examined.overwrites, note_writes=True)
    _refuse_rows(examined, alone.inputs)
    for name, shared in list(examined.shared.items()):
        reasons = [examined.refused[use.name] for use in shared.uses if use.name in examined.refused]
        if reasons:
            examined.refused[name] = reasons[0]
            examined.loose.add(name)
    _refuse_unreached(problem, example, examined)
    unreached = {name for name in examined.records if name not in examined.graph.reached}
    examined.loose -= unreached
    examined.loose = {
        name
        for name in examined.loose
        if name in examined.affine
        or (name in examined.layers and own_parameter(problem.model, examined.layers[name]) is not None)
    }
    add_notes(problem.model, examined, [*alone.misread, *later])
    problem.first_outputs = FirstOutputs(example, examined.items.logits)
    return examined


def _views(model: nn.Module) -> dict[str, Layer | AffineModule]:
    """The modules to look at, by name."""
    layers = find_layers(model)
    return {**layers, **tied_embeddings(model, layers), **find_affine(model)}


def _recorded(
    problem: Problem,
    example: Any,
    views: Mapping[str, Layer | AffineModule],
    last_only: bool,
    *,
    check: Callable[[Items], None] | None = None,
    copy_inputs: bool = False,
    note_writes: bool = False,
) -> Examined:
    """Run the example with its graph and read it.

    Args:
        problem: The model, data and loss.
        example: A few samples.
        views: The modules to record.
        last_only: As in `examine`.
        check: Called with the outputs, the first time that the example runs as a whole.
        copy_inputs: Whether to record copies of what layers are given.
        note_writes: Whether to watch every operator for writing in place; slow.
    """
    modules = {name: view.module for name, view in views.items()}
    with differentiable(problem.model), Recording(modules, copy_inputs=copy_inputs) as recording:
        with InPlaceOperators() if note_writes else nullcontext() as in_place:
            output, target = run_whole(problem, example)
        items = problem.laid_out(output, target, look=False)
        if check is not None:
            problem.look(items)
            problem.loss.check(output.detach(), target)
            with recording.paused():
                check(items)
        records = {name: calls[-1] for name, calls in recording.calls.items()}
        edges = {name: record.z_edge for name, record in records.items() if record.z_edge is not None}
        shift_invariant = problem.loss.shift_invariant
        curved = in_place.curved if in_place is not None else ()
        graph = read_graph(items.logits, edges, final_log_softmax=shift_invariant, curved_in_place=curved)
        overwrites = copy_inputs or bool(recording.overwritten())
        examined = Examined(
            items=items,
            layers={name: view for name, view in views.items() if _is_layer(view)},
            affine={name: view for name in records if isinstance(view := views[name], AffineModule)},
            called=[name for name in records if _is_layer(views[name])],
            records=records,
            graph=graph,
            overwrites=overwrites,
            writers=in_place.functions if in_place is not None else [],
            settled=overwrites == copy_inputs and (note_writes or WRITTEN not in graph.operators),
        )
        if examined.settled:
            _find_reused(views, examined, recording)
            _refuse_undifferentiable(examined, recording, last_only)
    if _FUSED in graph.operators:
        examined.notes.append(_MATH_ATTENTION)
    for name, view in views.items():
        if name not in records and not any(graph.uses.get(id(own), 0) for own in own_parameters(view.module)):
            examined.silent.append(name)
    return examined


def _is_layer(view: Layer | AffineModule) -> TypeGuard[Layer]:
    """Embeddings are looked at only because their table is another layer's weight."""
    return isinstance(view, Layer) and not isinstance(view, EmbeddingLayer)


def _find_reused(views: Mapping[str, Layer | AffineModule], examined: Examined, recording: Recording) -> None:
    """Refuse weights some of whose uses are not seen; others that are used twice are summed over uses."""
    calls = {name: len(recorded) for name, recorded in recording.calls.items()}
    found = find_reuse(views, calls, examined.graph.uses)
    for name, count in found.refused.items():
        examined.refused[name] = f"its weight is used {count} times"
        examined.loose.add(name)
    for name, shared in found.shared.items():
        examined.shared[name] = shared
        examined.inputs |= {use.name: [call.x for call in recording.calls[use.name]] for use in shared.uses}
        examined.reused[name] = sum(calls[use.name] for use in shared.uses)


def _refuse_undifferentiable(examined: Examined, recording: Recording, last_only: bool) -> None:
    """Send one signal back, so that what cannot be differentiated is known before any data is read."""
    output, reached = examined.items.logits, sorted(examined.graph.reached)
    if not output.requires_grad:
        raise ModelError(
            "Expected an output that can be differentiated but the forward pass runs under torch.no_grad or "
            "detaches it. Take that out of the model's code: measuring needs the graph."
        )
    calls = sum(len(recorded) for recorded in recording.calls.values())
    last = next((name for name in reversed(examined.called) if name in examined.graph.reached), None)
    if last_only and last is not None and not examined.graph.curved[last]:
        reached = [last]
    if _backward_error(examined, reached) is not None:
        errors = {name: _backward_error(examined, [name]) for name in reached}
        for name, error in errors.items():
            if error is not None:
                examined.refused.setdefault(name, f"torch cannot differentiate what follows it: {error}")
    if sum(len(recorded) for recorded in recording.calls.values()) != calls:
        raise ModelError(
            "Expected layers that run in the forward pass only but the backward pass runs them again: "
            "activation checkpointing. Switch it off in the model and measure again; memory is kept by "
            "smaller micro-batches here."
        )


def _backward_error(examined: Examined, names: list[str]) -> str | None:
    """What torch says against derivatives at these modules; None when there is nothing."""
    output, edges = examined.items.logits, [examined.records[name].z_edge for name in names]
    sent = marker(examined.items)
    if len(names) == 1 and _is_output(examined.items, examined.records[names[0]]):
        examined.marked[names[0]] = sent[:, 0]
        return None
    try:
        if edges:
            arrived = torch.autograd.grad(output, edges, sent, retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
            examined.marked |= {
                name: signal
                for name, signal in zip(names, arrived, strict=True)
                if signal is not None and signal.numel() == sent.numel()
            }
    except RuntimeError as error:
        if ran_out(error):
            raise
        return str(error).split(":")[0].splitlines()[0]
    return None


def _is_output(items: Items, record: Record) -> bool:
    """Whether the logits are the output of that call itself, (n, K) as (n, 1, K): what is sent arrives."""
    node, (n, T, K) = items.logits.grad_fn, items.logits.shape
    if T != 1 or record.z_shape != (n, K) or record.z_edge is None or node is None:
        return False
    operands = node.next_functions
    return operator_name(node) == "Unsqueeze" and is_layout(node) and operands[0] == record.z_edge[:2]


def _refuse_rows(examined: Examined, alone: Mapping[str, list[Tensor]]) -> None:
    """Refuse inputs not laid out sample by sample: the first rows must be those of the first sample alone.

    Of what runs once that is its one input; of a shared weight, the inputs of all calls.
    """
    n = examined.items.logits.shape[0]
    pairs = {
        (name, call): pair
        for name, record in examined.records.items()
        if n > 1 and name in alone and name not in examined.refused
        for call, pair in enumerate(zip(examined.inputs.get(name, [record.x]), alone[name], strict=False))
    }
    fitting = {
        (name, call): (x[: len(own)], own)
        for (name, call), (x, own) in pairs.items()
        if x.shape == (n * len(own), *own.shape[1:]) and (len(own) == 1 or name in examined.layers)
    }
    first, own = [x for x, _ in fitting.values()], [own for _, own in fitting.values()]
    found = largest([*torch._foreach_sub(first, own), *own]) if own else []
    changes = zip(fitting, found[: len(own)], found[len(own) :], strict=True)
    same = {key for key, change, size in changes if not change > 1e-2 * size}
    others = {name: call for name, call in pairs if (name, call) not in same}
    # What the first sample alone does not run is given some samples only.
    others |= dict.fromkeys((name for name in examined.records if name not in alone), 0)
    for name, call in others.items():
        x = examined.inputs.get(name, [examined.records[name].x])[call]
        examined.loose.add(name)
        examined.refused.setdefault(
            name, f"its input, of shape {list(x.shape)} for {n} samples, is not laid out sample by sample"
        )


def _refuse_unreached(problem: Problem, example: Any, examined: Examined) -> None:
    """Tell modules that do not influence the output from those that no gradient reaches though they do."""
    seen = [name for name in examined.records if name in examined.layers or name in examined.affine]
    unreached = [name for name in seen if name not in examined.graph.reached]
    for name in unreached if unreached and _influence(problem, example, examined, unreached) else ():
        if _influence(problem, example, examined, [name]):
            examined.refused.setdefault(name, _CUT_OFF)
    examined.idle |= {name for name in unreached if examined.refused.get(name) != _CUT_OFF}


def _influence(problem: Problem, example: Any, examined: Examined, names: list[str]) -> bool:
    """Whether the output changes when these modules return something else."""
    views: dict[str, Any] = {**examined.layers, **examined.affine}
    handles = [
        views[name].module.register_forward_hook(lambda m, a, output: 1.5 * output + 1) for name in names
    ]
    try:
        with torch.no_grad():
            other = problem.items(batches.copied(example)).logits
    finally:
        for handle in handles:
            handle.remove()
    change = (other - examined.items.logits.detach()).abs().max()
    return not bool(change <= 1e-5 * examined.items.logits.detach().abs().max())
