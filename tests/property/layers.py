"""Layers and norms: plain, bare, computed from other parameters, derived, hooked."""

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from property.steps import (
    KINDS,
    Composed,
    Draw,
    Shape,
    Step,
    among,
    anything,
    chance,
    divisors,
    of_rank,
    step,
    width,
)


@step(anything, lambda draw, shape: {"out": width(draw), "bias": chance(draw)})
def linear(shape, options, parts):
    return nn.Linear(shape[-1], options["out"], bias=options["bias"])


def _convolution(draw: Draw, shape: Shape) -> dict[str, Any]:
    groups = among(draw, *divisors(shape[0]))
    space = shape[1:]
    kernel = tuple(draw.randint(1, min(3, size)) for size in space)
    same = chance(draw)
    chosen: dict[str, Any] = {
        "out": groups * draw.randint(1, 2),
        "kernel": kernel,
        "groups": groups,
        "bias": chance(draw),
        "padding_mode": among(draw, "zeros", "zeros", "reflect", "replicate", "circular"),
        "padding": tuple(draw.randint(0, min(1, size - 1)) for size in space),
        "stride": tuple(draw.randint(1, 2) for _ in space),
        "dilation": 1,
    }
    if same and all(size % 2 for size in kernel):
        chosen |= {"padding": "same" if chosen["padding_mode"] == "zeros" else 0, "stride": 1}
    elif max(kernel) < 3 and min(space) >= 3:
        chosen["dilation"] = draw.randint(1, 2)
    return chosen


@step(of_rank(2, 3, 4), _convolution)
def convolution(shape, options, parts):
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(shape) - 2]
    given = {key: value for key, value in options.items() if key not in ("out", "kernel")}
    return kind(shape[0], options["out"], options["kernel"], **given)


def _transposed(draw: Draw, shape: Shape) -> dict[str, Any]:
    groups = among(draw, *divisors(shape[0]))
    return {
        "out": groups * draw.randint(1, 2),
        "kernel_size": draw.randint(1, 2),
        "stride": draw.randint(1, 2),
        "groups": groups,
        "bias": chance(draw),
    }


@step(lambda shape: len(shape) in (2, 3, 4) and math.prod(shape) <= 20, _transposed)
def transposed_convolution(shape, options, parts):
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[len(shape) - 2]
    return kind(shape[0], options.pop("out"), **options)


@step(of_rank(1), lambda draw, shape: {"out": width(draw)})
def bilinear(shape, options, parts):
    module = nn.Bilinear(shape[-1], shape[-1], options["out"])
    return Composed(lambda own, x: own.inner(x, x.tanh()), inner=module)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape))


@step(
    anything,
    lambda draw, shape: {"out": width(draw), "how": among(draw, "linear", "matmul", "einsum", "mul")},
)
def bare_parameter(shape, options, parts):
    """A weight that belongs to no layer."""
    compute = {
        "linear": lambda own, x: F.linear(x, own.table, own.shift),
        "matmul": lambda own, x: x @ own.table.T + own.shift,
        "einsum": lambda own, x: torch.einsum("...m,dm->...d", x, own.table) + own.shift,
        "mul": lambda own, x: (x.unsqueeze(-2) * own.table).sum(-1) + own.shift,
    }[options["how"]]
    return Composed(compute, table=parameter(options["out"], shape[-1]), shift=parameter(options["out"]))


@step(
    anything, lambda draw, shape: {"form": among(draw, "gain", "shift", "layer scale", "temperature", "exp")}
)
def scale(shape, options, parts):
    compute = {
        "gain": lambda own, x: x * own.scale,
        "shift": lambda own, x: x + own.scale,
        "layer scale": lambda own, x: x + own.scale * x.tanh(),
        "temperature": lambda own, x: x / (1 + own.scale.square()),
        "exp": lambda own, x: x * own.scale.exp(),
    }[options["form"]]
    return Composed(compute, scale=parameter(shape[-1]))


def _normalised(draw: Draw, shape: Shape) -> dict[str, Any]:
    return {
        "how": among(draw, "weight_norm", "weight_norm", "spectral_norm", "exp", "pruned", "old weight_norm"),
        "dim": among(draw, 0, 1, None),
        "inner": Step(*_inner_layer(draw, shape)),
    }


def _inner_layer(draw: Draw, shape: Shape) -> tuple[str, dict[str, Any]]:
    name = "convolution" if len(shape) > 1 and chance(draw) else "linear"
    return name, KINDS[name].options(draw, shape)


class Exponential(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp() - 1


@step(anything, _normalised)
def parametrized(shape, options, parts):
    """A layer whose weight is computed from other parameters."""
    module = KINDS[options["inner"].kind].make(shape, dict(options["inner"].options), ())
    how = options["how"]
    if how == "weight_norm":
        return parametrizations.weight_norm(module, dim=options["dim"])
    if how == "old weight_norm":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, and in use
            return nn.utils.weight_norm(module, dim=options["dim"])
    if how == "spectral_norm":
        return parametrizations.spectral_norm(module)
    if how == "pruned":
        mask = torch.arange(module.weight.numel()).reshape(module.weight.shape) % 3 != 0
        return prune.custom_from_mask(module, "weight", mask)
    parametrize.register_parametrization(module, "weight", Exponential())
    return module


class Doubled(nn.Linear):
    """A Linear that computes something else."""

    def forward(self, x):
        return 2 * F.linear(x, self.weight, self.bias)


class Rectifying(nn.Linear):
    """A Linear with its activation inside."""

    def forward(self, x):
        return F.relu(super().forward(x))


class Plain(nn.Linear):
    """A Linear by another name."""

    def forward(self, input):
        return torch.matmul(input, self.weight.t()) + (0 if self.bias is None else self.bias)


class Standardised(nn.Linear):
    """Weight standardisation: what multiplies is not what is stored."""

    def forward(self, x):
        centred = self.weight - self.weight.mean()
        return F.linear(x, centred / (0.1 + centred.square().mean()).sqrt(), self.bias)


class Unexpected(nn.Linear):
    """W x + b for most samples."""

    def forward(self, x):
        z = super().forward(x)
        return torch.where(x.sum(-1, keepdim=True) > 1.5, z.tanh(), z)


SUBCLASSES = {kind.__name__: kind for kind in (Doubled, Rectifying, Plain, Standardised, Unexpected)}


@step(anything, lambda draw, shape: {"kind": among(draw, *SUBCLASSES), "out": width(draw)})
def subclass(shape, options, parts):
    return SUBCLASSES[options["kind"]](shape[-1], options["out"])


HOOKS = {
    "forward, scaled": ("register_forward_hook", lambda module, args, output: 1.5 * output),
    "forward, curved": ("register_forward_hook", lambda module, args, output: output.tanh()),
    "forward, in place": ("register_forward_hook", lambda module, args, output: output.relu_()),
    "before": ("register_forward_pre_hook", lambda module, args: (args[0] * 0.7 + 0.1,)),
    "watching": ("register_forward_hook", lambda module, args, output: None),
}


@step(anything, lambda draw, shape: {"hook": among(draw, *HOOKS), "inner": Step(*_inner_layer(draw, shape))})
def hooked(shape, options, parts):
    module = KINDS[options["inner"].kind].make(shape, dict(options["inner"].options), ())
    register, hook = HOOKS[options["hook"]]
    getattr(module, register)(hook)
    return module


@step(anything, lambda draw, shape: {"rank": draw.randint(1, 2), "out": width(draw)})
def low_rank(shape, options, parts):
    """A Linear with an adapter beside it."""
    return Composed(
        lambda own, x: own.base(x) + 2.0 * own.up(own.down(x)),
        base=nn.Linear(shape[-1], options["out"]),
        down=nn.Linear(shape[-1], options["rank"], bias=False),
        up=nn.Linear(options["rank"], options["out"], bias=False),
    )


# Norms


@step(anything, lambda draw, shape: {"affine": chance(draw)})
def layer_norm(shape, options, parts):
    return nn.LayerNorm(shape[-1], elementwise_affine=options["affine"], eps=0.1)


@step(anything, lambda draw, shape: {"affine": chance(draw)})
def rms_norm(shape, options, parts):
    return nn.RMSNorm(shape[-1], elementwise_affine=options["affine"], eps=0.1)


@step(anything, lambda draw, shape: {"affine": chance(draw)})
def batch_norm(shape, options, parts):
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(shape) - 1]
    return kind(shape[0], affine=options["affine"])


@step(
    lambda shape: len(shape) > 1 and math.prod(shape[1:]) > 1,
    lambda draw, shape: {"groups": among(draw, *divisors(shape[0])), "affine": chance(draw)},
)
def group_norm(shape, options, parts):
    return nn.GroupNorm(options["groups"], shape[0], affine=options["affine"], eps=0.1)


@step(
    lambda shape: len(shape) in (2, 3) and math.prod(shape[1:]) > 1,
    lambda draw, shape: {"affine": chance(draw), "track_running_stats": chance(draw)},
)
def instance_norm(shape, options, parts):
    kind = (nn.InstanceNorm1d, nn.InstanceNorm2d)[len(shape) - 2]
    return kind(shape[0], eps=0.1, **options)


@step(of_rank(2, 3))
def local_response_norm(shape, options, parts):
    return nn.LocalResponseNorm(2, alpha=0.5)


@step(anything)
def shrink(shape, options, parts):
    """What a recipe inserts where a value has grown too large."""
    return Composed(lambda own, x: own.inner(x.flatten(1)), inner=nn.Linear(math.prod(shape), 3))
