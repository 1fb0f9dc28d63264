"""Sharpness along the step that an optimizer is about to take, and in the metric of its steps.

The step moves θ to θ − ηΔ. On a quadratic the risk is back at E for η_c = 2 Δᵀg / ΔᵀHΔ, so that critical
sharpness 2/η_c is ΔᵀHΔ / Δᵀg; elsewhere η_c is bracketed and bisected by forward passes alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flatness.catalogue.functionals import largest_of_network
from flatness.catalogue.measure import NetworkView, Surroundings, Valued
from flatness.curvature.parameters.optimizer_state import OptimizerState, Stability
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.curvature.spectra import SpectrumRequest
from flatness.errors import NotFiniteError, OptionError, ProcessError, UndefinedMeasureError, listed
from flatness.problem.batches import describe

# Doublings of a rate after which the risk counts as never rising, and the longest jump by a parabola.
_DOUBLINGS, _JUMP = 20, 16.0
# A share of the first rate at which no parameter moves any more: if the risk rises there, it is rounding.
_SMALLEST = 2.0**-60


@dataclass(frozen=True)
class _Update:
    """A step without its rate.

    Attributes:
        step: Δ.
        slope: Δᵀ∇E, by how much the risk falls per unit of the rate at first.
        words: What Δ is, for notes.
        state: The optimizer it comes from, if it does.
        terms: What there is to keep about it.
    """

    step: Tensor
    slope: float
    words: str
    state: OptimizerState | None
    terms: Mapping[str, Any]


def critical_sharpness(around: Surroundings) -> dict[str | None, Valued]:
    """2/η_c, with η_c the rate at which a step along Δ leaves the risk where it is."""
    update = _update(around)
    _refuse_rising(update)
    space = around.space
    # By a forward pass like the others: what a gradient's pass says may differ in the last bits.
    risk, passes = space.risk(), 1

    def rise(rate: float) -> float:
        nonlocal passes
        passes += 1
        after = _risk_or_infinity(space, -rate * update.step)
        # All processes go on as the first one decides.
        return space.problem.ranks.first(after - risk if math.isfinite(after) else math.inf)

    start = (update.state and update.state.rate) or (risk / update.slope if risk > 0 else 1.0)
    low, high = _crossing(rise, _parabola(rise, start, update.slope), float(around.options["width"]))
    terms = {**update.terms, "critical_rate": (low + high) / 2, "passes": passes}
    notes = [f"along {update.words}; {passes} forward passes"]
    if math.isinf(high):
        notes.append(f"the risk did not rise up to a rate of {low:.3g}, so the value counts as 0")
        return {None: Valued(0.0, tuple(notes), method="bisection", terms={**terms, "critical_rate": None})}
    notes[0] += f", the critical rate lies between {low:.5g} and {high:.5g}"
    dip = update.slope * low / 4
    rounding = 8 * torch.finfo(space.problem.dtype).eps * abs(risk)
    if dip < rounding:
        notes.append(
            f"not reliable: along this step the risk falls by about {dip:.1g} only, and "
            f"{space.problem.dtype} resolves {rounding:.1g}; pass dtype=torch.float64"
        )
    value = 4 / (low + high)
    if update.state is not None and update.state.rate > 0:
        terms |= {"rate": update.state.rate, "threshold": 2 / update.state.rate}
        notes.append(
            f"a step at the rate η = {update.state.rate:g} raises the risk from a value of 2/η = "
            f"{2 / update.state.rate:.4g} on"
        )
    precise, off = dip >= rounding, 2 / low - value
    return {None: Valued(value, tuple(notes), precise, method="bisection", residual=off, terms=terms)}


def _risk_or_infinity(space: ParameterSpace, vector: Tensor) -> float:
    """E at θ + vector; infinity where the network overflows, in whichever process."""
    try:
        return space.risk(vector)
    except NotFiniteError:
        return math.inf
    except ProcessError as error:
        if error.kind != NotFiniteError.__name__:
            raise
        return math.inf


def directional_sharpness(around: Surroundings) -> dict[str | None, Valued]:
    """ΔᵀHΔ / ‖Δ‖²."""
    update = _update(around)
    curvature = float(update.step @ around.hessian([update.step])[0])
    length = float(update.step.norm())
    notes = [f"along {update.words}, of length {length:.3g}; one Hessian product"]
    if update.slope > 0 and curvature > 0:
        notes.append(f"critical sharpness would be {curvature / update.slope:.4g} on a quadratic")
    return {None: Valued(curvature / length**2, tuple(notes), terms=update.terms)}


def preconditioned_sharpness(around: Surroundings) -> dict[str | None, Valued]:
    """λ_max(P^-½ H P^-½), and the threshold up to which the optimizer is stable."""
    optimizer, options = around.options["optimizer"], around.options
    if optimizer is None:
        raise UndefinedMeasureError(
            "Expected an optimizer, whose state holds the metric of preconditioned_sharpness, but got none. "
            "From Python, pass options={'preconditioned_sharpness': {'optimizer': optimizer}}; the command "
            "line cannot. hessian_top_eigenvalue does without."
        )
    state = OptimizerState(around.space, optimizer)
    request = SpectrumRequest(
        state.metric_root, tolerance=options["tolerance"], max_products=options["max_products"]
    )
    spectrum = around.spectrum(request)
    found = largest_of_network(NetworkView({}, {}, spectrum=spectrum, options=options))
    terms, said = _against(spectrum.largest, state)
    if state.penalty and not around.space.problem.weight_decay:
        said.append(
            f"without the optimizer's weight decay: pass weight_decay={state.penalty:g} for the curvature of "
            "the loss and its penalty together"
        )
    return {None: replace(found, notes=(*said, *found.notes), terms=terms)}


def _against(value: float, state: OptimizerState) -> tuple[dict[str, Any], list[str]]:
    """A value in the optimizer's metric beside the threshold of stability: what to keep, and the notes."""
    found: Stability | None = state.stability()
    if found is None:
        reason = "its rate is 0" if not state.rate else "its groups have different momenta"
        return {"rate": state.rate}, [f"no threshold of stability for this optimizer: {reason}"]
    terms = {"rate": state.rate, "threshold": found.threshold, "share": value / found.threshold}
    return terms, [
        f"stability threshold {found.formula} = {found.threshold:.5g} at {found.settings}; the value is "
        f"{value / found.threshold:.3g} of it"
    ]


def _update(around: Surroundings) -> _Update:
    """Δ as the options say: an optimizer's next step, a direction, or the gradient."""
    options, space = around.options, around.space
    optimizer, direction = options["optimizer"], options["direction"]
    if optimizer is not None and direction is not None:
        raise OptionError(
            "Expected one of optimizer and direction but got both. Leave direction out for the optimizer's "
            "next step."
        )
    elsewhere = options["update_data"] is not None or options["update_loss"] is not None
    if elsewhere and direction is not None and not callable(direction):
        raise OptionError(
            "Expected update_data and update_loss beside an optimizer, the gradient or a function of it, but "
            "direction holds the step itself. Leave one of them out."
        )
    gradient, source, terms = _gradient(around, elsewhere)
    state = None
    if optimizer is not None:
        state = OptimizerState(space, optimizer)
        step = state.update(gradient)
        words = f"the next step of {type(optimizer).__name__}{source}"
    elif direction is not None:
        step, words = _direction(space, direction, gradient), f"a direction that was given{source}"
    else:
        step, words = gradient, f"the gradient{source}"
    if not bool(step.any()):
        raise UndefinedMeasureError(
            f"Expected a step to measure along but {words} is zero everywhere. At a point where nothing "
            "moves measure hessian_top_eigenvalue; check that the optimizer's parameters require gradients."
        )
    return _Update(step, float(step @ around.gradient()[1]), words, state, terms)


def _gradient(around: Surroundings, elsewhere: bool) -> tuple[Tensor, str, dict[str, Any]]:
    """The gradient that the step follows, where it is from, and what to keep of that.

    An optimizer adds its own weight decay: for it, and for other data, the penalty is no part of it.
    """
    options, space = around.options, around.space
    problem = space.problem
    if not elsewhere:
        slope = around.gradient()[1]
        own = options["optimizer"] is not None
        return slope - problem.weight_decay * space.theta if own else slope, "", {}
    other = problem.beside(options["update_data"], options["update_loss"])
    other.example(1)
    there = ParameterSpace(other)
    slope = there.gradient()[1] - other.weight_decay * there.theta
    where = f" of {other.samples} other samples" if options["update_data"] is not None else ""
    which = f" of {other.loss.name}" if options["update_loss"] is not None else ""
    return slope, where + which, {"update_fingerprint": f"{other.fingerprint or 0:x}"}


def _direction(space: ParameterSpace, direction: Any, gradient: Tensor) -> Tensor:
    """A direction as a vector: a tensor, tensors by name, or what a function makes of gradients by name."""
    if callable(direction) and not isinstance(direction, Tensor):
        direction = direction(space.split_exactly(gradient))
    if isinstance(direction, Tensor) and direction.shape == space.theta.shape:
        return _finite(direction.detach().to(space.theta))
    if isinstance(direction, Mapping):
        return _finite(_from_names(space, direction))
    raise OptionError(
        f"Expected direction to be one tensor of {len(space.theta)} numbers, tensors by the names of "
        f"parameters, or a function that makes them of gradients by name, but got {describe(direction)}. "
        "For example {name: p.grad for name, p in model.named_parameters()}."
    )


def _from_names(space: ParameterSpace, direction: Mapping[str, Any]) -> Tensor:
    own = space.parameters
    faults = {
        "missing:": [name for name in own if name not in direction],
        "unknown:": [name for name in direction if name not in own],
        "of other shapes:": [
            name
            for name, value in own.items()
            if name in direction and getattr(direction[name], "shape", None) != value.shape
        ],
    }
    if any(faults.values()):
        wrong = ", ".join(f"{word} {listed(names)}" for word, names in faults.items() if names)
        raise OptionError(
            f"Expected direction to hold a tensor for every parameter, by name, but got {wrong}. "
            "For example {name: p.grad for name, p in model.named_parameters()}."
        )
    return space.join({name: value.to(space.theta) for name, value in direction.items()})


def _finite(step: Tensor) -> Tensor:
    if not bool(step.isfinite().all()):
        raise OptionError(
            "Expected a direction of finite numbers but got NaN or infinity. Check the gradients it is of."
        )
    return step


def _refuse_rising(update: _Update) -> None:
    if update.slope <= 0:
        raise UndefinedMeasureError(
            f"Expected a step along which the risk falls at first but along {update.words} Δᵀ∇E = "
            f"{update.slope:.3g} is not positive, so that no rate is critical. Momentum may point uphill "
            "for a moment; measure at another step, or use directional_sharpness. A direction is subtracted "
            "from the parameters, like a gradient."
        )


def _parabola(rise: Callable[[float], float], start: float, slope: float) -> float:
    """Where the parabola through the slope at 0 and the rise at one rate crosses 0: a rate to begin at."""
    bend = (rise(start) + slope * start) / start**2
    if not 0 < bend < math.inf:
        return start
    return min(max(slope / bend, start / _JUMP), start * _JUMP)


def _crossing(rise: Callable[[float], float], guess: float, width: float) -> tuple[float, float]:
    """Two rates, at most `width` of the larger apart, at the first of which the risk has not risen.

    The second is infinite where the risk has not risen at any rate that was tried.
    """
    # Near a quadratic the guess is right: two passes say so.
    low, high = guess * (1 - width / 2), guess * (1 + width / 2)
    if rise(low) > 0:
        low, high = low / 2, low
        while rise(low) > 0 and low > guess * _SMALLEST:
            low, high = low / 2, low
    elif rise(high) <= 0:
        low, high = high, 2 * high
        while rise(high) <= 0:
            low, high = high, 2 * high
            if high > guess * 2**_DOUBLINGS:
                return low, math.inf
    while high - low > width * high:
        middle = (low + high) / 2
        low, high = (low, middle) if rise(middle) > 0 else (middle, high)
    return low, high
