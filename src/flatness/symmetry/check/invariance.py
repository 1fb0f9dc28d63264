"""Which measures notice that a network was rewritten into an equal one?"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from flatness.catalogue.measure import Measure
from flatness.catalogue.registry import adapted_measures
from flatness.errors import ModelError, OptionError, OutOfMemoryError, listed, nearest
from flatness.measuring.measure import measure
from flatness.problem import batches
from flatness.problem.guard import Kept
from flatness.problem.model import converted
from flatness.problem.problem import Problem
from flatness.problem.progress import ProgressBar
from flatness.problem.ranks import separately
from flatness.report.report import Report
from flatness.symmetry.check.verdicts import InvarianceReport, InvarianceRow, Rewriting, judged
from flatness.symmetry.flow.groups import Symmetries, checked, symmetries
from flatness.symmetry.rewriting.base import Draw, Rescaling
from flatness.symmetry.rewriting.equality import Comparison
from flatness.symmetry.rewriting.kinds import KINDS, kind_named
from flatness.symmetry.rewriting.rescaling import make_rescaling, rescaled_copy

_OF_PROBLEM = ("forward", "batch_size", "device", "seed", "progress")
_EXAMPLE = 8


@separately()  # every process of a group for itself: an invariance shows on any part of the data
def check_invariance(
    model: nn.Module,
    data: Any,
    loss: Any = "cross_entropy",
    measures: str | Iterable[str] = "default",
    kinds: str | Iterable[str] = ("layerwise", "neuronwise"),
    trials: int = 3,
    seed: int = 0,
    *,
    samples: int | None = 1000,
    low: float = 0.2,
    high: float = 5.0,
    condition: float | None = None,
    weight_decay: float = 0.0,
    dtype: torch.dtype | None = None,
    **arguments: Any,
) -> InvarianceReport:
    """Rewrite a network into equivalent ones, measure them all, and report how far each measure drifts.

    A measure that declares an invariance must not drift by more than rounding, iteration and its standard
    error explain. The model is copied; the original is not changed.

    Args:
        model: The network.
        data: As for `flatness.measure`.
        loss: As for `flatness.measure`.
        measures: A name, a list of names, "default" or "all".
        kinds: Out of "layerwise", "neuronwise", "permutation", "output" and "attention"; see
            `flatness.rescale`. Measures that are neuron-wise invariant except in their own feature layer get
            rows of the kind "neuronwise except own features" as well.
        trials: Number of rewritten networks per kind; ten make a good plot.
        seed: Seed of the factors, and of measuring.
        samples: At most this many samples, from the start of the data; None for all. An invariance does not
            depend on the data, so a part is enough.
        low: Smallest factor.
        high: Largest factor.
        condition: Largest condition number of the matrices of "attention"; high/low by default.
        weight_decay: Must be 0: a penalty on the weights changes under every rescaling, so no measure that
            includes it is invariant.
        dtype: Precision of the check. None: float64 if model and memory allow, otherwise the model's own.
        **arguments: Further arguments of `flatness.measure`, such as ``layers`` or ``forward``.

    Returns:
        An `InvarianceReport`: print it, or use ``.to_frame()``, ``.ok`` and ``.plot_data()``.

    Example:
        >>> import torch, flatness
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> data = (torch.randn(50, 4), torch.randint(3, (50,)))
        >>> report = flatness.check_invariance(
        ...     model, data, measures=["hessian_trace", "neuron_flatness"], trials=1
        ... )
        >>> report.ok
        True
        >>> frame = report.to_frame()
        >>> bool(frame[frame.measure == "hessian_trace"].holds.any())
        False
    """
    chosen, _ = adapted_measures(measures, arguments.get("options"))
    wanted, draw = _checked_kinds(kinds), Draw(low=low, high=high, condition=condition)
    _check_numbers(trials, samples, weight_decay)
    _check_arguments(arguments)
    asked = "all" if measures == "all" else [item.name for item in chosen]
    options = {"loss": loss, "measures": asked, "seed": seed, **arguments}
    with Kept(checked(model)):
        original = _Original(model, data, samples, dtype, options)
        draws = [replace(draw, seed=number) for number in range(seed, seed + trials)]
        rewritings, skipped = _rewritings(original, wanted, chosen, draws)
        rows: list[InvarianceRow] = []
        total = sum(len(rewriting.rescalings) for rewriting in rewritings)
        with ProgressBar("rewritten networks", total, bool(options.get("progress", True))) as bar:
            for rewriting in rewritings:
                reports = []
                for rescaling in rewriting.rescalings:
                    reports.append(original.rewritten(rewriting, rescaling))
                    bar.advance()
                rows += judged(rewriting, chosen, original.report, reports)
    order = {item.name: position for position, item in enumerate(chosen)}
    rows.sort(key=lambda row: order[row.measure])
    meta = {key: original.report.meta[key] for key in ("model", "loss", "samples", "dtype", "risk")}
    notes = dict.fromkeys((*original.notes, *skipped, *_zero_values(rows)))
    return InvarianceReport(tuple(rows), tuple(notes), meta | {"trials": trials, "seed": seed})


class _Original:
    """The network as it is, measured once, and all that is needed to measure rewritten ones alike.

    Attributes:
        report: Its measures.
        found: What may be rewritten in it.
        notes: What the reader should know.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        samples: int | None,
        dtype: torch.dtype | None,
        options: dict[str, Any],
    ) -> None:
        given = {key: options[key] for key in _OF_PROBLEM if key in options}
        problem = Problem(model, data, options["loss"], dtype=dtype, **given)
        with problem.guarded():
            self._part, cut = _first_samples(problem, samples)
            example = problem.example(_EXAMPLE)
        self._model, self.report, notes = _measured(problem.model, self._part, dtype, options)
        # "all" leaves out what this network cannot have, once.
        found = list(dict.fromkeys(row.measure for row in self.report.results))
        self._options = {**options, "measures": found}
        if cut:
            notes.append(
                f"measured on the first {samples} samples, which is enough: an invariance does not depend "
                "on the data; samples= takes more"
            )

        def forward(network: nn.Module, batch: Any) -> Any:
            return problem.forward(network, batch)[0]

        self.found = symmetries(self._model, example, forward=forward)
        self._comparison = Comparison(self._model, example, forward, self._part)
        self.notes = [*problem.notes, *self.report.notes, *notes, *self._comparison.notes]

    def rewritten(self, rewriting: Rewriting, rescaling: Rescaling) -> Report:
        """The measures of a rewritten copy."""
        asked = {**self._options, **rewriting.only, "progress": False}  # one bar for all networks
        own = asked.get("options") or {}
        asked["options"] = {key: own[key] for key in own if key in asked["measures"]}
        return measure(rescaled_copy(self._model, rescaling, self._comparison), self._part, **asked)


def _first_samples(problem: Problem, samples: int | None) -> tuple[list[Any], bool]:
    """The first batches of the data, and whether there are more."""
    part: list[Any] = []
    missing = math.inf if samples is None else samples
    for batch in problem.source.batches(problem.micro_batch):
        if missing <= 0:
            return part, True
        size = batches.size_of(batch)
        part.append(batch if size <= missing else batches.rows(batch, 0, int(missing)))
        missing -= size
    return part, missing < 0


def _measured(
    model: nn.Module, part: list[Any], dtype: torch.dtype | None, options: dict[str, Any]
) -> tuple[nn.Module, Report, list[str]]:
    """The model to rewrite, in float64 where that is possible, and its measures."""
    try:
        base = converted(model, None, dtype or torch.float64)
        return base, measure(base, part, **options), []
    except (ModelError, OutOfMemoryError, RuntimeError) as error:
        own = next(model.parameters()).dtype
        if dtype is not None or own == torch.float64:
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        name = str(own).removeprefix("torch.")
        note = f"checked in {name} with a wide tolerance, because float64 was not possible ({reason})"
        return model, measure(model, part, **options), [note]


def _rewritings(
    original: _Original, kinds: list[str], chosen: list[Measure], draws: list[Draw]
) -> tuple[list[Rewriting], list[str]]:
    """Everything to measure, and a note for each kind that this network does not allow."""

    def drawn(kind: str, frozen: Set[int] = frozenset()) -> list[Rescaling]:
        return [make_rescaling(original.found, kind, replace(draw, frozen=frozen)) for draw in draws]

    rewritings: list[Rewriting] = []
    refused: dict[str, ModelError] = {}
    for kind in kinds:
        try:
            rewritings.append(Rewriting(kind, drawn(kind)))
        except ModelError as error:
            refused[kind] = error
            continue
        partial = kind_named(kind).partial or ""
        excepting = [item.name for item in chosen if partial in item.invariances]
        apart = own_feature_batches(original.found, original.report.layers()) if excepting else ()
        for together, frozen in apart:
            only = {"layers": together, "measures": excepting}
            rewritings.append(Rewriting(partial, drawn(kind, frozen), only))
    if not rewritings:
        raise next(iter(refused.values()))
    return rewritings, [f"no {kind} rewriting: {error}" for kind, error in refused.items()]


def own_feature_batches(found: Symmetries, layers: list[str]) -> list[tuple[list[str], set[int]]]:
    """Layers that can be judged together while the feature layers of all of them keep their scale.

    A layer joins a batch only if something of every layer's output still scales in it. Where freezing a
    layer's features leaves nothing to scale at all, there is nothing to judge.
    """
    made: list[tuple[list[str], set[int]]] = []
    for layer in layers:
        own = found.features_of(layer)
        if not own or len(own) == found.classes:
            continue
        for members, frozen in made:
            together = frozen | own
            if all(not (units := found.units_of(member)) or units - together for member in [*members, layer]):
                members.append(layer)
                frozen |= own
                break
        else:
            made.append(([layer], set(own)))
    return made


def _zero_values(rows: Iterable[InvarianceRow]) -> list[str]:
    """A note on values that are 0 throughout: no factor could move them, so that they show nothing."""
    zero = [row for row in rows if row.level != "unit" and not any((row.value, *row.values))]
    names = dict.fromkeys(f"{row.measure} ({row.layer or 'network'})" for row in zero)
    return [f"0 before and after, so nothing is checked: {listed(names, 6)}"] if names else []


def _checked_kinds(kinds: str | Iterable[str]) -> list[str]:
    if not isinstance(kinds, (str, Iterable)):
        raise OptionError(f"Expected kinds out of {listed(KINDS)} but got {kinds!r}.")
    wanted = [kinds] if isinstance(kinds, str) else list(dict.fromkeys(kinds))
    if not wanted:
        raise OptionError(f"Expected at least one kind out of {listed(KINDS)} but got none.")
    return [kind_named(kind).kind for kind in wanted]


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse what `flatness.measure` does not take, before anything runs."""
    known = [*inspect.signature(measure).parameters, *inspect.signature(check_invariance).parameters]
    for name in arguments:
        if name not in known:
            raise OptionError(
                f"Expected arguments of flatness.check_invariance or flatness.measure but got {name!r}."
                f"{nearest(name, known)}"
            )


def _counts(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def _check_numbers(trials: int, samples: int | None, weight_decay: float) -> None:
    if not _counts(trials):
        raise OptionError(f"Expected trials to be a positive integer but got {trials!r}.")
    if samples is not None and not _counts(samples):
        raise OptionError(f"Expected samples to be a positive integer or None but got {samples!r}.")
    if weight_decay != 0:
        raise OptionError(
            f"Expected weight_decay=0 but got {weight_decay!r}: with a penalty on the weights no measure is "
            "invariant, because rescaling changes the penalty. Leave it out."
        )
