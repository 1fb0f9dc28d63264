"""What an optimizer is about to do to a network's parameters, read from its state; nothing of it is changed.

An optimizer moves θ to θ − ηΔ. Δ is found by letting a copy of the optimizer, parameter by parameter and in
float64, take the step: it is what ``optimizer.step()`` would do, whatever the options of the optimizer are.
Where groups of parameters have rates of their own, η is the largest of them, and Δ shares out the rest.

Near a quadratic with Hessian H the step is one of gradient descent, with momentum, in the metric P:

    SGD         1
    Adam(W)     (1 − β₁^t)(√(ν / (1 − β₂^t)) + ε)
    RMSprop     √ν + ε, of the centred ν where the optimizer is

which is stable while λ_max(P^-½ H P^-½) is below the threshold (2 + 2β)/((1 − τ)η), with momentum β of which
a gradient enters with the share 1 − τ: τ = β₁ for Adam, the dampening for SGD. Nesterov's variant has
(2 + 2β)/((1 + 2β)η).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.errors import OptionError, listed

_KINDS = (SGD, Adam, AdamW, RMSprop)
_AS_STATED = {"foreach": False, "fused": None, "capturable": False, "differentiable": False}


def innermost(optimizer: Any) -> Any:
    """The optimizer inside what Lightning and Accelerate put around it."""
    while type(optimizer) not in _KINDS and isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


@dataclass(frozen=True)
class Stability:
    """The sharpness up to which an optimizer is stable near a quadratic.

    Attributes:
        threshold: The largest curvature, in the optimizer's metric.
        formula: How it follows from momentum and rate.
        settings: Momentum and rate in words.
    """

    threshold: float
    formula: str
    settings: str


@dataclass(frozen=True)
class _Own:
    """One parameter as the optimizer has it: its group's settings, and what the optimizer remembers of it."""

    parameter: Tensor
    group: Mapping[str, Any]
    state: Mapping[str, Any]


class OptimizerState:
    """An optimizer of the parameters of a space.

    Args:
        space: The parameters.
        optimizer: `torch.optim.SGD`, `Adam`, `AdamW` or `RMSprop`, or a wrapper around one of them.

    Attributes:
        rate: η, the largest rate of any group.
        foreign: How many of the optimizer's tensors are not parameters of the model.

    Raises:
        OptionError: If it is another optimizer, has other parameters, maximises, or has not taken a step
            where its next one depends on those before.
    """

    def __init__(self, space: ParameterSpace, optimizer: Any) -> None:
        self._space, self._optimizer = space, innermost(optimizer)
        if type(self._optimizer) not in _KINDS:
            raise OptionError(
                f"Expected an optimizer of torch.optim out of {listed(kind.__name__ for kind in _KINDS)} but "
                f"got {type(self._optimizer).__name__}. Pass its next step as direction=, a tensor or a "
                "function of the gradients, to critical_sharpness or directional_sharpness."
            )
        names = {id(value): name for name, value in space.problem.given_parameters().items()}
        self._own: dict[str, _Own] = {}
        self.foreign = 0
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is None:
                    self.foreign += 1
                elif parameter.requires_grad:
                    state = self._optimizer.state.get(parameter, {})
                    self._own[name] = _Own(parameter, group, state)
        self._check()
        self.rate = max(_rate(own.group) for own in self._own.values())

    def _check(self) -> None:
        kind = type(self._optimizer).__name__
        if not self._own:
            raise OptionError(
                f"Expected the optimizer of this model but got {kind} with {self.foreign} tensors, none of "
                "which is a trained parameter of the model. Pass the optimizer that trains this very "
                "object; one made for a copy, or before the model was replaced, holds other tensors."
            )
        if any(own.group.get("maximize") for own in self._own.values()):
            raise OptionError(
                f"Expected an optimizer that minimises the loss but got {kind} with maximize=True. Minimise "
                "the negative objective, and measure with that as the loss."
            )

    def update(self, gradient: Tensor) -> Tensor:
        """Δ, by which the next step moves θ to θ − ηΔ, for this gradient of the loss alone."""
        self._check_stepped(lambda own: self._remembers and not _has_memory(own.state))
        parts = self._space.split_exactly(gradient)
        steps = {
            name: self._step(self._own[name], part) if self._steps(name) else torch.zeros_like(part)
            for name, part in parts.items()
        }
        return self._space.join(steps)

    def metric_root(self, space: ParameterSpace) -> Tensor:
        """P^-½, times the root of a group's share of the rate; 0 for what the optimizer does not train."""
        adaptive = not isinstance(self._optimizer, SGD)
        self._check_stepped(lambda own: adaptive and not _has_memory(own.state))

        def root(name: str, value: Tensor) -> Tensor:
            own = self._own.get(name)
            if own is None or (adaptive and not _has_memory(own.state)):
                return torch.zeros_like(value, dtype=torch.float64)
            P = self._metric(own) if adaptive else torch.ones_like(value, dtype=torch.float64)
            return (self._share(own) / P.to(value.device)).sqrt()

        return space.per_parameter(root)

    @property
    def penalty(self) -> float:
        """The largest weight decay that enters as the gradient of a penalty; AdamW's does not."""
        kept = (own.group for own in self._own.values() if not own.group.get("decoupled_weight_decay"))
        apart = isinstance(self._optimizer, AdamW)
        return max((float(group["weight_decay"]) for group in kept if not apart), default=0.0)

    def stability(self) -> Stability | None:
        """The threshold; None where the rate is 0, or groups have different momenta and so no common one."""
        found = {self._threshold(own.group) for own in self._own.values()}
        return found.pop() if self.rate > 0 and len(found) == 1 else None

    def _threshold(self, group: Mapping[str, Any]) -> Stability:
        beta = float(group["betas"][0]) if "betas" in group else float(group["momentum"])
        symbol, eta = ("β₁" if "betas" in group else "β"), self.rate or 1.0
        if not beta:
            return Stability(2 / eta, "2/η", f"η = {eta:g}")
        settings = f"{symbol} = {beta:g}, η = {eta:g}"
        if group.get("nesterov"):
            return Stability((2 + 2 * beta) / ((1 + 2 * beta) * eta), "(2 + 2β)/((1 + 2β)η)", settings)
        damped = beta if "betas" in group else float(group.get("dampening", 0))
        if "betas" in group:
            formula = "(2 + 2β₁)/((1 − β₁)η)"
        elif damped:
            formula, settings = "(2 + 2β)/((1 − τ)η)", f"{settings}, dampening τ = {damped:g}"
        else:
            formula = "(2 + 2β)/η"
        return Stability((2 + 2 * beta) / ((1 - damped) * eta), formula, settings)

    def _metric(self, own: _Own) -> Tensor:
        state, group = own.state, own.group
        if isinstance(self._optimizer, RMSprop):
            nu = state["square_avg"].double()
            if group["centered"]:
                nu = (nu - state["grad_avg"].double().square()).clamp(min=0)
            return nu.sqrt() + group["eps"]
        t, (beta1, beta2) = float(state["step"]), map(float, group["betas"])
        nu = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"].double()
        return (1 - beta1**t) * ((nu / (1 - beta2**t)).sqrt() + group["eps"])

    def _step(self, own: _Own, gradient: Tensor) -> Tensor:
        """What a copy of the optimizer, at this share of the rate, takes off this parameter."""
        before = own.parameter.detach().double()
        copy = before.clone()
        copy.grad = gradient.to(before)
        plain = {key: value for key, value in _AS_STATED.items() if key in own.group}
        alone = type(self._optimizer)([{**own.group, **plain, "params": [copy], "lr": self._share(own)}])
        alone.state[copy] = {key: _copied(value) for key, value in own.state.items()}
        alone.step()
        return before - copy

    def _share(self, own: _Own) -> float:
        """The rate of a parameter's group in units of the largest; Δ has none where all are 0."""
        return _rate(own.group) / self.rate if self.rate else 1.0

    def _steps(self, name: str) -> bool:
        """Whether the optimizer moves a parameter; one that never had a gradient has no state."""
        own = self._own.get(name)
        return own is not None and (not self._remembers or _has_memory(own.state))

    @property
    def _remembers(self) -> bool:
        """Whether a step depends on those before."""
        plain = isinstance(self._optimizer, SGD)
        return not plain or any(own.group["momentum"] for own in self._own.values())

    def _check_stepped(self, lacks: Any) -> None:
        if all(map(lacks, self._own.values())):
            kind = type(self._optimizer).__name__
            raise OptionError(
                f"Expected {kind} to have taken a step, because its next one depends on earlier ones, but "
                "its state is empty. Measure after the first step, or load its state: "
                "optimizer.load_state_dict(checkpoint['optimizer'])."
            )
        for name, own in self._own.items():
            if lost := [key for key in self._moments(own) if own.state and key not in own.state]:
                kind = type(self._optimizer).__name__
                raise OptionError(
                    f"Expected {kind} to remember {listed(lost)} of {name!r} but its state has only "
                    f"{listed(own.state)}. Load a state saved by the same kind of optimizer with the "
                    "same options."
                )

    def _moments(self, own: _Own) -> list[str]:
        """The entries of the state that an adaptive optimizer's metric needs."""
        if isinstance(self._optimizer, SGD):
            return []
        if isinstance(self._optimizer, RMSprop):
            return ["square_avg"] + ["grad_avg"] * bool(own.group.get("centered"))
        return ["exp_avg_sq"] + ["max_exp_avg_sq"] * bool(own.group.get("amsgrad"))


def _rate(group: Mapping[str, Any]) -> float:
    return float(group["lr"])


def _has_memory(state: Mapping[str, Any]) -> bool:
    return any(value is not None for value in state.values())


def _copied(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().double().clone() if value.is_floating_point() else value.detach().clone()
