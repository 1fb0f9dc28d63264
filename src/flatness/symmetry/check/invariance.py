"""Which measures notice that a network was rewritten into an equal one?"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from flatness.catalogue.measure import Measure
from flatness.catalogue.registry import select_measures
from flatness.errors import ModelError, OptionError, OutOfMemoryError, listed, nearest
from flatness.measuring.measure import measure
from flatness.problem import batches
from flatness.problem.guard import Kept
from flatness.problem.model import converted
from flatness.problem.problem import Problem
from flatness.problem.progress import ProgressBar
from flatness.problem.ranks import separately
from flatness.report.report import Report, Result
from flatness.symmetry.check.verdicts import InvarianceReport, InvarianceRow
from flatness.symmetry.flow.groups import Symmetries, checked, symmetries
from flatness.symmetry.rewriting.base import Rescaling
from flatness.symmetry.rewriting.equality import Comparison
from flatness.symmetry.rewriting.kinds import KINDS, kind_named
from flatness.symmetry.rewriting.rescaling import check_choices, make_rescaling, rescaled_copy
from flatness.symmetry.trace.forward_pass import Forward

_OF_PROBLEM = ("forward", "batch_size", "device", "seed", "progress")
_EXAMPLE = 8
# Relative drift that rounding explains, by the precision of the arithmetic, and what eigenvalue iterations
# leave on top.
_ROUNDING = {"float64": 1e-7, "float32": 1e-2}
_COARSE = 0.2
_ITERATION = 1e-5
_NOT_CONVERGED = 1e-2
_STANDARD_ERRORS = 5.0


@dataclass(frozen=True)
class Rewriting:
    """One kind of rewriting, a few times.

    Attributes:
        kind: What measures declare about it.
        rescalings: One per trial.
        layers: The layers it is judged on; None for all of them and the network.
        measures: The measures it is judged on; None for all.
    """

    kind: str
    rescalings: list[Rescaling]
    layers: list[str] | None = None
    measures: list[str] | None = None


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
    weight_decay: float = 0.0,
    dtype: torch.dtype | None = None,
    **arguments: Any,
) -> InvarianceReport:
    """Rewrite a network into equal ones, measure them all, and report how far each measure drifts.

    A measure that declares an invariance must not drift by more than rounding, iteration and its standard
    error explain. The model is copied; the original is left as it was.

    Args:
        model: The network.
        data: As for `flatness.measure`.
        loss: As for `flatness.measure`.
        measures: A name, a list of names, "default" or "all".
        kinds: Out of "layerwise", "neuronwise", "permutation" and "output"; see `flatness.rescale`. Measures
            that are neuron-wise invariant except in their own feature layer get rows of the kind "neuronwise
            except own features" as well.
        trials: Number of rewritten networks per kind; ten make a good plot.
        seed: Seed of the factors, and of measuring.
        samples: At most so many samples, the first of the data; None for all. An invariance holds for every
            data set or for none, so that a part shows it as well as the whole.
        low: Smallest factor.
        high: Largest factor.
        weight_decay: Must be 0: a penalty on the weights notices every rescaling, and no measure that
            includes it is invariant.
        dtype: Precision of the check. None: float64 where the model and the memory allow, else the model's
            own.
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
    chosen = select_measures(measures)
    wanted = _checked_kinds(kinds, low, high)
    _check_numbers(trials, samples, weight_decay)
    _check_arguments(arguments)
    options = {"loss": loss, "measures": [item.name for item in chosen], "seed": seed, **arguments}
    with Kept(checked(model)):
        setting = _prepared(model, data, samples, dtype, options)
        original = setting.original
        rewritings, skipped = _rewritings(
            setting.found, wanted, chosen, original.layers(), range(seed, seed + trials), (low, high)
        )
        rows: list[InvarianceRow] = []
        total = sum(len(rewriting.rescalings) for rewriting in rewritings)
        with ProgressBar("rewritten networks", total, bool(options.get("progress", True))) as bar:
            for rewriting in rewritings:
                reports = []
                for rescaling in rewriting.rescalings:
                    reports.append(setting.measured(rewriting, rescaling))
                    bar.advance()
                rows += _judged(rewriting, chosen, original, reports)
    order = {item.name: position for position, item in enumerate(chosen)}
    rows.sort(key=lambda row: order[row.measure])
    meta = {key: original.meta[key] for key in ("model", "loss", "samples", "dtype", "risk")}
    notes = dict.fromkeys((*setting.notes, *skipped, *_zero_values(rows)))
    return InvarianceReport(tuple(rows), tuple(notes), meta | {"trials": trials, "seed": seed})


@dataclass(frozen=True)
class _Setting:
    """The original network, measured once, and all that is needed to measure rewritten ones alike."""

    base: nn.Module
    original: Report
    found: Symmetries
    example: Any
    forward: Forward
    part: list[Any]
    options: dict[str, Any]
    notes: tuple[str, ...]
    comparison: Comparison

    def measured(self, rewriting: Rewriting, rescaling: Rescaling) -> Report:
        """A rewritten network, measured like the original."""
        narrowed = {**self.options, "progress": False}  # one bar for all networks, not one for each
        if rewriting.layers is not None:
            narrowed["layers"] = rewriting.layers
        if rewriting.measures is not None:
            asked = self.options.get("options") or {}
            narrowed["measures"] = rewriting.measures
            narrowed["options"] = {key: asked[key] for key in asked if key in rewriting.measures}
        changed = rescaled_copy(self.base, self.example, rescaling, self.forward, self.comparison)
        return measure(changed, self.part, **narrowed)


def _prepared(
    model: nn.Module, data: Any, samples: int | None, dtype: torch.dtype | None, options: dict[str, Any]
) -> _Setting:
    given = {key: options[key] for key in _OF_PROBLEM if key in options}
    problem = Problem(model, data, options["loss"], dtype=dtype, **given)
    with problem.guarded():
        part, cut = _first_samples(problem, samples)
        example = problem.example(_EXAMPLE)
    base, original, notes = _original(problem.model, part, dtype, options)
    if cut:
        notes.append(
            f"measured on the first {samples} samples: an invariance holds for every data set or for none "
            "(samples=None takes all)"
        )

    def forward(network: nn.Module, batch: Any) -> Any:
        return problem.forward(network, batch)[0]

    found = symmetries(base, example, forward=forward)
    comparison = Comparison(base, example, forward, part)
    notes = [*problem.notes, *original.notes, *notes, *comparison.notes]
    return _Setting(base, original, found, example, forward, part, options, tuple(notes), comparison)


def _first_samples(problem: Problem, samples: int | None) -> tuple[list[Any], bool]:
    """The first batches of the data, and whether there are more."""
    part: list[Any] = []
    missing = samples
    for batch in problem.source.batches(problem.micro_batch):
        if missing is not None and missing <= 0:
            return part, True
        size = batches.size_of(batch)
        part.append(batch if missing is None or size <= missing else batches.rows(batch, 0, missing))
        if missing is not None:
            missing -= size
    return part, missing is not None and missing < 0


def _original(
    model: nn.Module, part: list[Any], dtype: torch.dtype | None, options: dict[str, Any]
) -> tuple[nn.Module, Report, list[str]]:
    """The model to rewrite, in float64 where that is possible, and its measures."""
    try:
        base = converted(model, None, dtype or torch.float64)
        return base, measure(base, part, **options), []
    except (ModelError, OutOfMemoryError, RuntimeError, TypeError) as error:
        own = next(model.parameters()).dtype
        if dtype is not None or own == torch.float64:
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        name = str(own).removeprefix("torch.")
        note = f"checked in {name}, with a wide tolerance: float64 was not possible ({reason})"
        return model, measure(model, part, **options), [note]


def _rewritings(
    found: Symmetries,
    kinds: list[str],
    chosen: list[Measure],
    layers: list[str],
    seeds: range,
    bounds: tuple[float, float],
) -> tuple[list[Rewriting], list[str]]:
    """Everything to measure, and a note for each kind that this network does not allow."""

    def drawn(kind: str, frozen: Set[int] = frozenset()) -> list[Rescaling]:
        low, high = bounds
        return [make_rescaling(found, kind, seed=seed, low=low, high=high, frozen=frozen) for seed in seeds]

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
        for together, frozen in own_feature_batches(found, layers) if excepting else ():
            rewritings.append(Rewriting(partial, drawn(kind, frozen), together, excepting))
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


def _judged(
    rewriting: Rewriting, chosen: list[Measure], original: Report, reports: list[Report]
) -> list[InvarianceRow]:
    """Rows for everything that both the original and the rewritten networks were measured in."""
    before, after = _by_quantity(original), [_by_quantity(report) for report in reports]
    measures = {item.name: item for item in chosen}
    dtype = str(original.meta.get("dtype"))
    both = [quantity for quantity in before if all(quantity in found for found in after)]
    if rewriting.layers is not None:
        # Other features are frozen for other layers, so that the network has no value of its own.
        both = [quantity for quantity in both if quantity.layer is not None]
    rows = []
    for quantity in both:
        again = [found[quantity] for found in after]
        rows.append(_row(rewriting, measures[quantity.measure], quantity, before[quantity], again, dtype))
    return rows


def _row(
    rewriting: Rewriting,
    measure: Measure,
    quantity: _Quantity,
    before: list[Result],
    after: list[list[Result]],
    dtype: str,
) -> InvarianceRow:
    first, layer = rewriting.rescalings[0], quantity.layer
    drift = max(_drift(before, changed, first.reorders) for changed in after)
    tolerance = max(_tolerance(before, changed, dtype) for changed in after)
    whole = rewriting.kind == first.kind
    declared = first.leaves(measure.invariances, layer) if whole else rewriting.kind in measure.invariances
    touched = any(rescaling.reaches(layer) for rescaling in rewriting.rescalings)
    return InvarianceRow(
        **quantity._asdict(),
        kind=rewriting.kind,
        declared=declared,
        drift=drift,
        holds=drift <= tolerance,
        verdict=_verdict(declared, drift <= tolerance, touched),
        tolerance=tolerance,
        touched=touched,
        value=_largest(before),
        values=tuple(_largest(changed) for changed in after),
    )


def _verdict(declared: bool, holds: bool, touched: bool) -> str:
    if declared:
        return "invariant" if holds else "broken"
    return "moves" if not holds else "unmoved" if touched else "untouched"


def _zero_values(rows: Iterable[InvarianceRow]) -> list[str]:
    """A note on values that are 0 throughout: no factor could move them, so that they show nothing."""
    zero = [row for row in rows if row.level != "unit" and not any((row.value, *row.values))]
    names = dict.fromkeys(f"{row.measure} ({row.layer or 'network'})" for row in zero)
    return [f"0 before and after, which shows nothing: {listed(names, 6)}"] if names else []


class _Quantity(NamedTuple):
    """What is measured."""

    measure: str
    layer: str | None
    reduction: str | None
    level: str


def _by_quantity(report: Report) -> dict[_Quantity, list[Result]]:
    found: dict[_Quantity, list[Result]] = {}
    for row in report.results:
        found.setdefault(_Quantity(row.measure, row.layer, row.reduction, row.level), []).append(row)
    return found


def _drift(before: list[Result], after: list[Result], reorders: bool) -> float:
    old, new = [row.value for row in before], [row.value for row in after]
    if reorders:
        old, new = sorted(old), sorted(new)
    change = max(abs(b - a) for a, b in zip(old, new, strict=True))
    if change == 0:
        return 0.0
    size = max(abs(value) for value in old)
    return change / size if size > 0 else math.inf


def _tolerance(before: list[Result], after: list[Result], dtype: str) -> float:
    rows = [*before, *after]
    allowed = _ROUNDING.get(dtype, _COARSE)
    if any(not row.converged for row in rows):
        allowed = max(allowed, _NOT_CONVERGED)
    elif any(row.residual is not None for row in rows):
        allowed = max(allowed, _ITERATION)
    size = max(abs(row.value) for row in before)
    error = max(math.hypot(a.stderr, b.stderr) for a, b in zip(before, after, strict=True))
    return allowed + (_STANDARD_ERRORS * error / size if size > 0 else 0.0)


def _largest(results: list[Result]) -> float:
    return max((row.value for row in results), key=abs)


def _checked_kinds(kinds: str | Iterable[str], low: float, high: float) -> list[str]:
    if not isinstance(kinds, (str, Iterable)):
        raise OptionError(f"Expected kinds out of {listed(KINDS)} but got {kinds!r}.")
    wanted = [kinds] if isinstance(kinds, str) else list(dict.fromkeys(kinds))
    if not wanted:
        raise OptionError(f"Expected at least one kind out of {listed(KINDS)} but got none.")
    for kind in wanted:
        check_choices(kind, low, high)
    return wanted


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
            f"Expected weight_decay=0 but got {weight_decay!r}: a penalty on the weights notices every "
            "rescaling, so that no measure with it "
            "is invariant. Leave it out."
        )
