"""Scales and shifts: norm layers and PReLU, whose parameters multiply or shift channels one by one.

They are not layers (no matrix to rescale), but the trace of the whole network's Hessian is only complete with
them. For z = γ∘u + β with u the normalised input, the derivatives of one sample are g_γ = Σ_p δ_p∘u_p and g_β
= Σ_p δ_p.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from flatness.network.layers import own_parameters
from flatness.network.memory import attempt


def _instance_norm(module: Any, x: Tensor) -> Tensor:
    own = module.running_mean is None
    return F.instance_norm(x, module.running_mean, module.running_var, use_input_stats=own, eps=module.eps)


# What a module multiplies, of its input.
_NORMALISED: tuple[tuple[type[nn.Module], Callable[[Any, Tensor], Tensor]], ...] = (
    (_InstanceNorm, _instance_norm),
    (_BatchNorm, lambda own, x: F.batch_norm(x, own.running_mean, own.running_var, eps=own.eps)),
    (nn.LayerNorm, lambda own, x: F.layer_norm(x, own.normalized_shape, eps=own.eps)),
    (nn.RMSNorm, lambda own, x: F.rms_norm(x, own.normalized_shape, eps=own.eps)),
    (nn.GroupNorm, lambda own, x: F.group_norm(x, own.num_groups, eps=own.eps)),
    (nn.PReLU, lambda _, x: x.clamp(max=0)),
)


class AffineModule:
    """A module z = γ∘u + β (or a PReLU, u = min(x, 0)), and the per-sample derivatives of γ and β.

    A layer norm of a subclass may run over the channels of feature maps, which come second: ConvNeXt's does.
    `explains` finds that out, and the rest goes by it.
    """

    def __init__(self, name: str, module: nn.Module, normalise: Callable[[Any, Tensor], Tensor]) -> None:
        self.name = name
        self.module: Any = module
        self._of_features = normalise
        self._over_last = isinstance(module, (nn.LayerNorm, nn.RMSNorm))
        self._channels_second = False

    def explains(self, x: Tensor, z: Tensor, n: int) -> bool:
        """Whether an output z is γ∘u + β for the input x (for a PReLU max(x, 0) + γ∘u), up to rounding."""
        if x.shape != z.shape:
            return False
        either = self._over_last and x.dim() > 2 and len(self.module.normalized_shape) == 1
        layouts = [self._channels_second, not self._channels_second] if either else [False]
        fitting = next((second for second in layouts if self._fits(x, z, second)), None)
        self._channels_second = bool(fitting)
        return fitting is not None

    def _fits(self, x: Tensor, z: Tensor, channels_second: bool) -> bool:
        if channels_second:
            x, z = x.movedim(1, -1), z.movedim(1, -1)
        expected, _ = attempt(lambda: self._expected(x), RuntimeError)
        if expected is None:
            return False
        return bool((expected - z).abs().max() <= torch.finfo(z.dtype).eps ** 0.5 * (1 + z.abs().max()))

    def _expected(self, x: Tensor) -> Tensor:
        """Return z as the module's class computes it, channels in their usual place."""
        z = self._of_features(self.module, x)
        for key, combine in (("weight", Tensor.mul), ("bias", Tensor.add)):
            value = getattr(self.module, key, None)
            if value is not None:
                z = combine(z, self._along_channels(value.detach(), x))
        return z + x.clamp(min=0) if isinstance(self.module, nn.PReLU) else z

    def _along_channels(self, value: Tensor, x: Tensor) -> Tensor:
        if self._over_last or value.numel() == 1:
            return value
        return value.reshape(-1, *[1] * (x.dim() - 2))

    def gradients(self, x: Tensor, dz: Tensor) -> dict[str, Tensor]:
        """Per-sample derivatives of every own parameter, each (n, number of entries)."""
        if self._channels_second:
            x, dz = x.movedim(1, -1), dz.movedim(1, -1)
        gradients = {}
        if getattr(self.module, "weight", None) is not None:
            gradients[f"{self.name}.weight"] = self._reduce(dz * self._of_features(self.module, x))
        if getattr(self.module, "bias", None) is not None:
            gradients[f"{self.name}.bias"] = self._reduce(dz)
        return gradients

    def _reduce(self, values: Tensor) -> Tensor:
        n = values.shape[0]
        if self._over_last:
            return values.reshape(n, -1, self.module.weight.numel()).sum(1)
        if isinstance(self.module, nn.PReLU) and self.module.weight.numel() == 1:
            return values.reshape(n, -1).sum(1, keepdim=True)
        return values.reshape(n, values.shape[1], -1).sum(2)


def find_affine(model: nn.Module) -> dict[str, AffineModule]:
    """Every norm layer and PReLU that owns parameters, by name."""
    found = {}
    for name, module in model.named_modules():
        kinds = (normalise for kind, normalise in _NORMALISED if isinstance(module, kind))
        if own_parameters(module) and (normalise := next(kinds, None)):
            found[name] = AffineModule(name, module, normalise)
    return found
