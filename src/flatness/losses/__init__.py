"""Per-sample losses and the factors of their output Hessians.

The empirical risk is E = Σ_i ℓ_i / C. A `Loss` lays a batch out as independent predictions (`Items`), gives
the numerators ℓ_i (`values`), the batch's share of C (`normaliser`), and vectors s_r with signed weights c_r
such that, for every prediction, Σ_r c_r s_r s_rᵀ = ∂²ℓ/∂f² (`factors`). Nothing here knows what network made
the outputs.

One file an idea: `base` the interface, shapes and targets · `softmax` cross-entropy · `normalized`
its normalized version · `elementwise` squared errors and binary cross-entropy · `custom` any other function.
`resolve_loss` makes a `Loss` of what a user writes.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from flatness.errors import LossError, listed, nearest
from flatness.losses.base import Items, Loss, counted

__all__ = ["LOSS_NAMES", "Items", "Loss", "counted", "resolve_loss"]

# Where each loss is: a file of this folder and a class. It is loaded when it is asked for.
_NAMED: dict[str, str] = {
    "cross_entropy": "softmax.CrossEntropy",
    "nll": "softmax.NegativeLogLikelihood",
    "mse": "elementwise.MeanSquaredError",
    "squared_error": "elementwise.SquaredError",
    "bce": "elementwise.BinaryCrossEntropy",
    "normalized_cross_entropy": "normalized.NormalizedCrossEntropy",
}

LOSS_NAMES = tuple(_NAMED)
"""The names `resolve_loss` knows."""

# Torch's module and function, the name of the loss here, and what it takes of the module.
_TORCH: tuple[tuple[type[nn.Module], Any, str, tuple[str, ...]], ...] = (
    (nn.CrossEntropyLoss, F.cross_entropy, "cross_entropy", ("weight", "ignore_index", "label_smoothing")),
    (nn.NLLLoss, F.nll_loss, "nll", ("weight", "ignore_index")),
    (nn.MSELoss, F.mse_loss, "mse", ()),
    (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits, "bce", ("pos_weight", "weight")),
)

_ELEMENTWISE = {
    nn.L1Loss: F.l1_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss,
    nn.HuberLoss: F.huber_loss,
    nn.PoissonNLLLoss: F.poisson_nll_loss,
    nn.KLDivLoss: F.kl_div,
    nn.HingeEmbeddingLoss: F.hinge_embedding_loss,
    nn.SoftMarginLoss: F.soft_margin_loss,
}


def resolve_loss(loss: Any) -> Loss:
    """Turn a name, a torch loss or a function into a `Loss`.

    Args:
        loss: one of `LOSS_NAMES`; a torch loss module or function, read with torch's mean reduction; a
            function (output, target) → one loss per sample, shape (n,); or a `Loss`.

    Raises:
        LossError: if it is none of these, or is not a mean over samples.

    Example:
        >>> resolve_loss(nn.CrossEntropyLoss(label_smoothing=0.1))
        cross_entropy(label_smoothing=0.1)
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        if loss in _NAMED:
            return _loaded(_NAMED[loss])()
        raise LossError(
            f"Expected one of the losses {', '.join(LOSS_NAMES)} but got "
            f"{loss!r}.{nearest(loss, LOSS_NAMES)} "
            "For any other loss pass a function of (output, target) that returns one loss per sample."
        )
    if isinstance(loss, nn.Module):
        return _from_module(loss)
    if isinstance(loss, type):
        raise LossError(f"Expected a loss but got the class {loss.__name__}. Write {loss.__name__}().")
    if callable(loss):
        return _from_function(loss)
    raise LossError(
        f"Expected a loss name, a torch loss or a function but got {type(loss).__name__}. "
        f"Use one of {', '.join(LOSS_NAMES)}, or a function of (output, target) that returns one loss per "
        "sample."
    )


def _loaded(place: str) -> Callable[..., Loss]:
    """The class of a loss, by its file in this folder and its name."""
    module, _, kind = place.partition(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), kind)


def _from_function(function: Any) -> Loss:
    if function is F.binary_cross_entropy:
        raise _on_probabilities(
            "torch.nn.functional.binary_cross_entropy", "binary_cross_entropy_with_logits"
        )
    for _, known, loss, _ in _TORCH:  # by identity: a callable need not be hashable
        if function is known:
            return _loaded(_NAMED[loss])()
    inner = function.func if isinstance(function, functools.partial) else function
    name = getattr(inner, "__name__", type(inner).__name__).strip("<>")
    if getattr(F, name, None) is not function:
        return _loaded("custom.CustomLoss")(function, name)
    per_sample = functools.partial(function, reduction="none")
    if not _takes_two(per_sample):
        raise _unreadable(f"torch.nn.functional.{name}")
    elementwise = any(function is known for known in _ELEMENTWISE.values())
    return _loaded("custom.CustomLoss")(_reduced(per_sample, "mean"), name, elementwise)


def _from_module(module: nn.Module) -> Loss:
    name = type(module).__name__
    if isinstance(module, nn.BCELoss):
        raise _on_probabilities("BCELoss", "BCEWithLogitsLoss")
    reduction = getattr(module, "reduction", None)
    if reduction == "sum":
        raise LossError(
            "Expected a loss with reduction 'mean', since the risk is a mean over samples, but got "
            f"{name}(reduction='sum'). Write {name}(reduction='mean'), or pass a function of "
            "(output, target) that returns one loss per sample."
        )
    for known, _, loss, options in _TORCH:
        # a subclass with a forward of its own is some other loss
        if isinstance(module, known) and type(module).forward is known.forward:
            return _loaded(_NAMED[loss])(*(getattr(module, option) for option in options))
    trainable = [key for key, parameter in module.named_parameters() if parameter.requires_grad]
    if trainable:
        raise LossError(
            f"Expected a loss without trainable parameters, since no measure would include them, but got "
            f"{name} with {listed(trainable)}. Move them into the model, or freeze them with "
            f"requires_grad_(False)."
        )
    if reduction not in ("mean", "none", "batchmean") or not _takes_two(module.forward):
        raise _unreadable(name)
    per_sample = copy.copy(module)
    per_sample.reduction = "none"  # type: ignore[assignment]
    return _loaded("custom.CustomLoss")(
        _reduced(per_sample, reduction), name, isinstance(module, tuple(_ELEMENTWISE))
    )


def _reduced(per_element: Callable[[Tensor, Any], Tensor], reduction: str) -> Callable[[Tensor, Any], Tensor]:
    """Average (or, for torch's 'batchmean', add up) what a loss without reduction gives for each sample."""

    def per_sample(output: Tensor, target: Any) -> Tensor:
        losses = per_element(output, target)
        if not isinstance(losses, Tensor) or losses.dim() < 2:
            return losses
        return losses.flatten(1).sum(1) if reduction == "batchmean" else losses.flatten(1).mean(1)

    return per_sample


def _takes_two(function: Callable[..., Any]) -> bool:
    """Say whether a function can be called with (output, target) and nothing else."""
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError):  # the latter where a built-in has no signature
        return False
    return True


def _on_probabilities(name: str, instead: str) -> LossError:
    return LossError(
        f"Expected a loss on logits but got {name}, which leaves the sigmoid inside the model. "
        f"Let the model return logits and use {instead}, or loss='bce'."
    )


def _unreadable(name: str) -> LossError:
    return LossError(
        f"Expected a loss of (output, target) with reduction 'mean' or 'none' but got {name}. "
        "Write loss=lambda output, target: ..., returning one loss per sample, shape (n,)."
    )
