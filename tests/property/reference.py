"""Every row of a report that a dense Hessian can tell, with the scale that rounding is judged against."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import oracle
from property.recipes import Made, make_model
from property.tasks import TASKS

# A saturated softmax leaves p(1 − p) with the rounding of 1, not of itself: 1e-6 of ‖∂f/∂W‖², judged at 1e-9,
# is 1e-15.
SATURATED = 1e-6
# What rounding leaves of terms of size 10 that cancel: 1e-14, judged at 1e-9.
DUST = 1e-5


@dataclass(frozen=True)
class Expected:
    """The right value of a row.

    Attributes:
        value: From the dense Hessian.
        scale: Sum of the sizes of everything that was added up to it.
        iterated: Whether it is an eigenvalue, which an iteration finds to its own tolerance.
    """

    value: float
    scale: float
    iterated: bool = False


class Reference:
    """Dense float64 values of one network, made when they are asked for."""

    def __init__(self, made: Made) -> None:
        self.made = made
        self._rows: dict[str, dict] = {}

    def exists(self) -> bool:
        """Whether the risk and its gradient exist, and torch can tell it."""
        parameters = [one for one in self.made.model.parameters() if one.requires_grad]
        risk = self.made.risk(self.made.model)
        if not parameters or not risk.requires_grad:
            return bool(risk.isfinite())
        try:
            gradients = torch.autograd.grad(risk, parameters, allow_unused=True)
        except RuntimeError as error:
            # by a branch, what another one still needs; or an operator without a derivative
            if "modified by an inplace operation" in str(error) or "is not implemented" in str(error):
                return False
            raise
        return all(bool(one.isfinite().all()) for one in (risk, *gradients) if one is not None)

    def row(
        self, measure: str, layer: str | None, unit: int | None, reduction: str | None
    ) -> Expected | None:
        """The right value of a row; None where no dense formula is written for it."""
        if layer is None:
            return self._network(measure) if unit is None and reduction is None else None
        if layer not in self._rows:
            self._rows[layer] = dict(layer_rows(self.made, layer))
        return self._rows[layer].get((measure, unit, reduction))

    def _network(self, measure: str) -> Expected | None:
        model = self.made.model
        if measure == "weight_norm":
            total = sum(one.square().sum().item() for one in model.parameters())
            return Expected(total, total)
        if measure == "hessian_trace":
            blocks = [oracle.hessian(model, self.made.risk, [name]) for name, _ in model.named_parameters()]
            size = sum(float(H.abs().sum()) for H in blocks)
            size += SATURATED * sum(outputs_by(model, self.made.x, one) for one in model.parameters())
            return Expected(sum(float(H.trace()) for H in blocks), size)
        if measure in ("fisher_rao", "fisher_rao_diagonal") and self.made.recipe.form == "single":
            return self._fisher_rao(measure)
        return None

    def _fisher_rao(self, measure: str) -> Expected | None:
        """Mean of ⟨θ, ∇ℓ_i⟩², or of Σ_j θ_j² (∂_j ℓ_i)², where every sample weighs the same."""
        made, task = self.made, TASKS[self.made.recipe.task]
        if made.recipe.task not in ("cross_entropy", "soft labels", "smoothing", "mse", "bce", "log cosh"):
            return None
        model, K = made.model, made.recipe.K
        g = oracle.sample_gradients(model, made.x.clone(), made.y, lambda f, y: task.reference(K, f, y))
        terms = g * oracle.all_parameters(model)
        whole = measure == "fisher_rao"
        value = float((terms.sum(1) if whole else terms).square().sum() / len(g))
        return Expected(value, float(terms.abs().sum(1).square().mean()) + DUST)


def plain(made: Made, name: str) -> nn.Module:
    """The network, or one made anew in which the layer's weight is a parameter, not computed from others."""
    owner = made.model.get_submodule(name) if not name.endswith((".q", ".k", ".v")) else None
    if owner is None or "weight" in owner._parameters:
        return made.model
    model = make_model(made.recipe)
    owner = model.get_submodule(name)
    model(made.x.clone())  # a hook computes it when it runs
    value = owner.weight.detach().clone()
    if parametrize.is_parametrized(owner, "weight"):
        parametrize.remove_parametrizations(owner, "weight")
    else:  # a hook before the forward pass computes it
        owner._forward_pre_hooks.clear()
        owner.__dict__.pop("weight", None)
    owner.weight = nn.Parameter(value)
    return model


def outputs_by(model: nn.Module, x: Tensor, weight: nn.Parameter) -> float:
    """About ‖∂f/∂W‖², f all outputs of all samples: the mean of ‖sᵀ ∂f/∂W‖² over random signs s, from two."""
    f = model(x.clone())
    total, generator = DUST / SATURATED, torch.Generator().manual_seed(0)
    for _ in range(2 if f.requires_grad else 0):
        signs = torch.randint(2, f.shape, generator=generator) * 2.0 - 1
        (J,) = torch.autograd.grad(f, [weight], signs.double(), retain_graph=True, materialize_grads=True)
        total += float(J.square().sum()) / 2
    return total


def layer_rows(made: Made, name: str) -> Iterator[tuple[tuple[str, int | None, str | None], Expected]]:
    """All rows of one layer."""
    model = plain(made, name)
    try:
        parameter, entries = oracle.layer_entries(model, name)
        weight = model.get_parameter(parameter)
    except TypeError:  # an embedding's table
        return
    assert isinstance(weight, nn.Parameter)
    flat_entries = entries.flatten()
    whole = oracle.hessian(model, made.risk, [parameter])[flat_entries][:, flat_entries]
    W = weight.detach().flatten()[entries]
    H = oracle.within_groups(whole, W)
    taps = oracle.kernel_taps(model.get_submodule(name)) if not name.endswith((".q", ".k", ".v")) else 1
    size = float(whole.abs().sum()) + SATURATED * outputs_by(model, made.x, weight)
    norm = oracle.weight_norm(W)
    yield ("hessian_trace", None, None), Expected(oracle.hessian_trace(H), size)
    yield ("weight_norm", None, None), Expected(norm, norm)
    yield ("layer_flatness_trace", None, None), Expected(oracle.layer_flatness_trace(W, H), norm * size)
    yield ("relative_flatness", None, None), Expected(oracle.relative_flatness(W, H), norm * size)
    for measure, units in (
        ("neuron_flatness", oracle.neuron_flatness(W, H, taps)),
        ("neuron_flatness_incoming", oracle.neuron_flatness_incoming(W, H)),
    ):
        yield (measure, None, "max"), Expected(float(units.max()), norm * size)
        yield (measure, None, "sum"), Expected(float(units.sum()), norm * size)
        for unit, value in enumerate(units.tolist()):
            yield (measure, unit, None), Expected(value, norm * size)
    if not bool(whole.isfinite().all()):
        return
    yield ("hessian_top_eigenvalue", None, None), Expected(oracle.top_eigenvalue(whole), size, True)
    yield ("layer_flatness", None, None), Expected(oracle.layer_flatness(W, whole), norm * size, True)
    yield (
        ("maximal_relative_flatness", None, None),
        Expected(oracle.maximal_relative_flatness(W, H), norm * size, True),
    )
    spread = _spread(made, name)
    if spread is not None:
        value = oracle.relative_flatness_normalized(W, H, spread, taps)
        ratio = float(spread.max() / spread[spread > 0].min()) if bool((spread > 0).any()) else 1.0
        yield ("relative_flatness_normalized", None, None), Expected(value, ratio**2 * norm * size)


def _spread(made: Made, name: str) -> Tensor | None:
    """The spread of a layer's inputs; only where every sample weighs the same, as the reference has it."""
    if made.recipe.task not in ("cross_entropy", "mse", "squared_error", "smoothing", "bce", "nll"):
        return None
    module = made.model.get_submodule(name) if not name.endswith((".q", ".k", ".v", ".out_proj")) else None
    if module is None:
        return None
    # modules that share a weight are one layer, which sees the inputs of all of them
    weight = module._parameters.get("weight")
    named = made.model.named_modules()
    sharing = (
        [key for key, other in named if other._parameters.get("weight") is weight]
        if weight is not None
        else [name]
    )
    inputs = [oracle.channel_inputs(made.model, made.x.clone(), key) for key in sharing]
    phi = torch.cat(inputs)
    ratio = phi.std(0, correction=0) / phi.square().mean(0).sqrt().clamp(min=1e-300)
    if bool(((ratio > 1e-12) & (ratio < 1e-3)).any()):  # whether it varies is a matter of the tolerance
        return None
    return oracle.feature_spread(phi)
