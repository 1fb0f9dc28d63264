"""Activations and functions of one value: curved, piecewise linear, of layout, written in place."""

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

from property.steps import Function, Shape, among, anything, of_rank, step

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "ReLU": nn.ReLU,
    "ReLU in place": lambda: nn.ReLU(inplace=True),
    "LeakyReLU": nn.LeakyReLU,
    "LeakyReLU in place": lambda: nn.LeakyReLU(0.2, inplace=True),
    "PReLU": nn.PReLU,
    "RReLU": nn.RReLU,
    "ReLU6": nn.ReLU6,
    "Hardtanh": nn.Hardtanh,
    "Hardtanh in place": lambda: nn.Hardtanh(-0.5, 0.7, inplace=True),
    "Hardshrink": nn.Hardshrink,
    "Softshrink": nn.Softshrink,
    "Hardsigmoid": nn.Hardsigmoid,
    "Hardswish": nn.Hardswish,
    "Hardswish in place": lambda: nn.Hardswish(inplace=True),
    "Threshold": lambda: nn.Threshold(0.1, -0.4),
    "Threshold at 0": lambda: nn.Threshold(0.0, 0.0),
    "ELU": nn.ELU,
    "ELU in place": lambda: nn.ELU(inplace=True),
    "SELU": nn.SELU,
    "CELU": lambda: nn.CELU(0.7),
    "GELU": nn.GELU,
    "GELU tanh": lambda: nn.GELU("tanh"),
    "SiLU": nn.SiLU,
    "SiLU in place": lambda: nn.SiLU(inplace=True),
    "Mish": nn.Mish,
    "Sigmoid": nn.Sigmoid,
    "LogSigmoid": nn.LogSigmoid,
    "Softplus": nn.Softplus,
    "Softsign": nn.Softsign,
    "Tanh": nn.Tanh,
    "Tanhshrink": nn.Tanhshrink,
    "Softmax": lambda: nn.Softmax(-1),
    "Softmax of channels": lambda: nn.Softmax(1),
    "Softmin": lambda: nn.Softmin(-1),
    "LogSoftmax": lambda: nn.LogSoftmax(-1),
    "Identity": nn.Identity,
    "Dropout": nn.Dropout,
}


@step(anything, lambda draw, shape: {"name": among(draw, *ACTIVATIONS)})
def activation(shape, options, parts):
    return ACTIVATIONS[options["name"]]()


@step(
    lambda shape: shape[-1] % 2 == 0, lambda draw, shape: {"gate": among(draw, "glu", "relu", "gelu", "silu")}
)
def gated_halves(shape, options, parts):
    def halves(x):
        first, second = x.chunk(2, -1)
        return first * {"glu": torch.sigmoid, "relu": F.relu, "gelu": F.gelu, "silu": F.silu}[
            options["gate"]
        ](second)

    return nn.GLU(-1) if options["gate"] == "glu" else Function(halves)


FUNCTIONS: dict[str, tuple[Callable[[Shape], bool], Callable[[Tensor], Tensor]]] = {}


def function(
    name: str, compute: Callable[[Tensor], Tensor], fits: Callable[[Shape], bool] = anything
) -> None:
    FUNCTIONS[name] = (fits, compute)


for _name, _compute in {
    "abs": torch.abs,
    "neg": torch.neg,
    "sub from 1": lambda x: 1 - x,
    "add": lambda x: x + 0.3,
    "double": lambda x: x * 2,
    "half": lambda x: x / 2,
    "square": torch.square,
    "x * x": lambda x: x * x,
    "pow 3": lambda x: x**3,
    "pow 1": lambda x: x**1,
    "sin": torch.sin,
    "cos": torch.cos,
    "exp": lambda x: (x.clamp(max=2)).exp(),
    "log1p": lambda x: x.abs().log1p(),
    "sqrt": lambda x: (x.abs() + 0.2).sqrt(),
    "rsqrt": lambda x: (x.abs() + 0.2).rsqrt(),
    "reciprocal": lambda x: 1 / (x.abs() + 0.5),
    "erf": torch.erf,
    "atan": torch.atan,
    "logaddexp": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "hypot": lambda x: torch.hypot(x, torch.full_like(x, 0.4)),
    "sign times": lambda x: x * x.sign(),
    "step times": lambda x: x * (x > 0),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "where constant": lambda x: torch.where(x > 0.2, x, torch.full_like(x, 0.2)),
    "masked_fill": lambda x: x.masked_fill(x < 0, 0.0),
    "masked_fill constant": lambda x: x.masked_fill(x < -0.2, -0.2),
    "clamp": lambda x: x.clamp(-0.5, 0.8),
    "clamp at 0": lambda x: x.clamp(min=0),
    "maximum": lambda x: torch.maximum(x, 0.5 * x),
    "minimum constant": lambda x: torch.minimum(x, torch.full_like(x, 0.3)),
    "max pair": lambda x: torch.maximum(x, x.flip(-1)),
    "cumsum": lambda x: x.cumsum(-1),
    "cumprod": lambda x: x.cumprod(-1),
    "cummax": lambda x: x.cummax(-1).values,
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "sort": lambda x: x.sort(-1).values,
    "sort channels": lambda x: x.sort(1, descending=True).values,
    "flip": lambda x: x.flip(-1),
    "roll": lambda x: x.roll(1, -1),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "amax": lambda x: x.amax(-1, keepdim=True),
    "max": lambda x: x.max(-1, keepdim=True).values,
    "median": lambda x: x.median(-1, keepdim=True).values,
    "norm": lambda x: (x.square().sum(-1, keepdim=True) + 0.1).sqrt(),
    "vector_norm 1": lambda x: torch.linalg.vector_norm(x, 1, -1, keepdim=True),
    "var": lambda x: x.var(-1, correction=0, keepdim=True),
    "logsumexp": lambda x: x.logsumexp(-1, keepdim=True),
    "centre": lambda x: x - x.mean(-1, keepdim=True),
    "subtract max": lambda x: x - x.amax(-1, keepdim=True),
    "normalize": lambda x: F.normalize(x, dim=-1, eps=0.1),
    "cat self": lambda x: torch.cat([x, x], -1),
    "crelu": lambda x: torch.cat([x.relu(), (-x).relu()], 1),
    "constant feature": lambda x: F.pad(x, (0, 1), value=1.0),
    "flatten": lambda x: x.flatten(1),
    "transpose": lambda x: x.transpose(1, -1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "chunked": lambda x: torch.cat(x.split(1, -1)[::-1], -1),
    "unbind": lambda x: torch.stack(x.unbind(1), 1),
    "index": lambda x: x[:, torch.arange(x.shape[1]).flip(0)],
    "index_select": lambda x: x.index_select(-1, torch.zeros(2, dtype=torch.long)),
    "gather argmax": lambda x: x.gather(-1, x.argmax(-1, keepdim=True)),
    "gather abs argmax": lambda x: x.gather(-1, x.abs().argmax(-1, keepdim=True)),
    "take_along argsort": lambda x: x.take_along_dim((-x).argsort(-1), -1),
    "topk": lambda x: x.topk(min(2, x.shape[-1]), -1).values,
    "slice": lambda x: x[..., : (x.shape[-1] + 1) // 2],
    "stride slice": lambda x: x[..., ::2],
    "narrow": lambda x: x.narrow(-1, 0, 1),
    "cast": lambda x: x.to(torch.float64).type_as(x).double(),
    "round trip": lambda x: x + x.round().detach() - x.detach(),
    "rounded": lambda x: x - x.round(),
    "to int": lambda x: x * x.to(torch.int64),
    "fraction": lambda x: x.frac(),
    "floor division": lambda x: x * 0.5 + torch.div(x, 0.3, rounding_mode="floor"),
    "remainder": lambda x: x.remainder(0.7),
    "item": lambda x: x * 0.5 + float(torch.tensor(0.2)),
    "softmax scaled": lambda x: (2 * x).softmax(-1),
    "softmax times": lambda x: x * x.softmax(-1),
    "attention of itself": lambda x: (x.unsqueeze(-1) * x.unsqueeze(-2)).softmax(-1).mean(-1),
    "gram": lambda x: (x.unsqueeze(-1) @ x.unsqueeze(-2)).flatten(-2),
    "einsum self": lambda x: torch.einsum("n...i,n...j->n...ij", x, x.tanh()).sum(-1),
    "complex abs": lambda x: torch.complex(x, x.roll(1, -1) + 0.3).abs(),
    "complex real": lambda x: (torch.complex(x, x.roll(1, -1)) * (1 + 2j)).real,
    "fft": lambda x: torch.fft.fft(x, dim=-1).real,
    "fft abs": lambda x: torch.fft.fft(x + 0.1, dim=-1).abs(),
    "write view": lambda x: _written(x, lambda y: y[..., :1].mul_(2.0)),
    "write relu": lambda x: _written(x, lambda y: y[..., :1].relu_()),
    "write tanh": lambda x: _written(x, lambda y: y[..., :1].tanh_()),
    "write copy": lambda x: _written(x, lambda y: y[..., :1].copy_(y[..., -1:].clone())),
    "write add": lambda x: _written(x, lambda y: y[..., :1].add_(y[..., -1:].clone())),
    "write product": lambda x: _written(x, lambda y: y[..., :1].mul_(y[..., -1:].clone())),
    "write mask": lambda x: _written(x, lambda y: y.__setitem__(y > 0.5, 0.5)),
    "write zero": lambda x: _written(x, lambda y: y.__setitem__(y < 0, 0.0)),
    "write buffer": lambda x: _into_buffer(x),
    "in place sigmoid": lambda x: (x + 0).sigmoid_(),
    "in place mul": lambda x: (x + 0).mul_(x),
    "in place add": lambda x: (x * 1.5).add_(x, alpha=0.3),
    "in place div": lambda x: (x + 0).div_(2.0),
    "in place addcmul": lambda x: (x + 0).addcmul_(x, x, value=0.3),
    "lerp": lambda x: torch.lerp(x, x.flip(-1), 0.3),
    "lerp by value": lambda x: torch.lerp(x, x.flip(-1), x.sigmoid()),
    "addcmul": lambda x: torch.addcmul(x, x, x.flip(-1), value=0.4),
    "addcdiv": lambda x: torch.addcdiv(x, x, 1 + x.abs()),
    "softmax of dims": lambda x: x.flatten(1).softmax(1).reshape(x.shape),
    "log_softmax channels": lambda x: x.log_softmax(1),
    "scatter": lambda x: torch.zeros_like(x).scatter_add(-1, torch.zeros_like(x, dtype=torch.long), x),
    "one_hot argmax": lambda x: x * F.one_hot(x.argmax(-1), x.shape[-1]),
    "straight through": lambda x: x.softmax(-1) * x,
    "checkpoint": lambda x: torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False),
    "checkpoint relu": lambda x: torch.utils.checkpoint.checkpoint(torch.relu, x, use_reentrant=False),
    "vmap": lambda x: torch.vmap(lambda row: row.relu() * 2)(x),
    "empty part": lambda x: torch.cat([x, x[..., :0]], -1),
    "diag": lambda x: torch.diag_embed(x).sum(-1),
    "tril": lambda x: (x.unsqueeze(-1) * x.new_ones(x.shape[-1]).diag().cumsum(-1)).tril().sum(-1),
    "kron": lambda x: torch.stack([x, 2 * x], -1).flatten(-2),
    "repeat_interleave": lambda x: x.repeat_interleave(2, -1),
    "expand": lambda x: x.unsqueeze(-1).expand(*x.shape, 2).mean(-1),
    "nan_to_num": lambda x: x.nan_to_num(),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),
    "heaviside": lambda x: x * torch.heaviside(x, x.new_zeros(())),
    "copysign": lambda x: torch.copysign(x, torch.full_like(x, -1.0)),
    "fmod": lambda x: torch.fmod(x, 0.6),
    "xlogy": lambda x: torch.special.xlogy(x.abs() + 0.3, x.abs() + 0.3),
    "sinc": torch.sinc,
    "outer mean": lambda x: torch.matmul(x.unsqueeze(-1), x.unsqueeze(-2)).mean(-1),
    "cdist": lambda x: (torch.cdist(x.unsqueeze(-1), x.unsqueeze(-1) + 0.3, p=1)).sum(-1),
    "var_mean": lambda x: torch.var_mean(x, -1, correction=0, keepdim=True)[1],
    "prod": lambda x: x.prod(-1, keepdim=True),
    "dist": lambda x: (x - 0.1).abs().sum(-1, keepdim=True),
    "trapezoid": lambda x: torch.trapezoid(x, dim=-1).unsqueeze(-1),
    "diff": lambda x: torch.diff(x, dim=-1, prepend=x[..., :1]),
    "huber": lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="none"),
}.items():  # fmt: skip
    function(_name, _compute)


def _written(x: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    y = x.clone()
    write(y)
    return y


def _grid(n: int) -> Tensor:
    """Places between the pixels."""
    shrunk = torch.eye(2, 3, dtype=torch.float64).repeat(n, 1, 1) * 0.8
    return F.affine_grid(shrunk, [n, 1, 2, 2], align_corners=False)


def _into_buffer(x: Tensor) -> Tensor:
    y = x.new_zeros(x.shape)
    y[..., 0] = x[..., 0]
    y[..., -1] += 2 * x[..., -1]
    return y


for _name, _compute in {
    "max_pool": lambda x: F.max_pool1d(x, 2, 1, padding=1),
    "avg_pool": lambda x: F.avg_pool1d(x, 2, 1, padding=1),
    "lp_pool": lambda x: F.lp_pool1d(x.abs() + 0.1, 2, 1),
    "adaptive max": lambda x: F.adaptive_max_pool1d(x, 2),
    "adaptive avg": lambda x: F.adaptive_avg_pool1d(x, 2),
    "global avg": lambda x: x.mean(-1),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "linear interpolation": lambda x: F.interpolate(x, size=3, mode="linear"),
    "pad reflect": lambda x: F.pad(x, (1, 0), "replicate"),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "causal attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "bmm": lambda x: torch.bmm(x, x.mT),
    "bmm softmax": lambda x: torch.bmm(x.softmax(-1), x.mT),
    "pixel permute": lambda x: x.permute(0, 2, 1),
    "unfold": lambda x: x.unfold(-1, 1, 1).flatten(2),
    "cosine": lambda x: F.cosine_similarity(x.unsqueeze(1), x.unsqueeze(2), dim=-1, eps=0.1),
    "last token": lambda x: x[:, -1],
    "first token": lambda x: x[:, 0],
    "mean tokens": lambda x: x.mean(1),
    "max tokens": lambda x: x.max(1).values,
    "argmax token": lambda x: x[torch.arange(len(x)), x.sum(-1).argmax(-1)],
    "det": lambda x: (x @ x.mT + torch.eye(x.shape[1], dtype=x.dtype)).logdet().unsqueeze(-1),
    "solve": lambda x: torch.linalg.solve(x @ x.mT + torch.eye(x.shape[1], dtype=x.dtype), x),
}.items():
    function(_name, _compute, of_rank(2))

for _name, _compute in {
    "max_pool2d": lambda x: F.max_pool2d(x, 2, 1, padding=1),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2, 1, padding=1, count_include_pad=False),
    "adaptive max2d": lambda x: F.adaptive_max_pool2d(x, 1),
    "adaptive avg2d": lambda x: F.adaptive_avg_pool2d(x, (2, 1)),
    "global avg2d": lambda x: x.mean((2, 3)),
    "bilinear": lambda x: F.interpolate(x, size=(2, 3), mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, size=(2, 3), mode="bicubic"),
    "reflect2d": lambda x: F.pad(x, (1, 0, 0, 1), "replicate"),
    "unfold2d": lambda x: F.unfold(x, 1),
    "Softmax2d": nn.Softmax2d(),
    "squeeze and excite": lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(),
    "permute2d": lambda x: x.permute(0, 2, 3, 1),
    "merge tokens": lambda x: x.flatten(2).transpose(1, 2),
    "unpool": lambda x: F.max_unpool2d(*F.max_pool2d(x, 1, return_indices=True), 1),
    "grid_sample": lambda x: F.grid_sample(x, _grid(len(x)), align_corners=False),
}.items():  # fmt: skip
    function(_name, _compute, of_rank(3))

for _name, _compute in {
    "max_pool3d": lambda x: F.max_pool3d(x, 2, 1, padding=1),
    "avg_pool3d": lambda x: F.avg_pool3d(x, 2, 1, padding=1),
    "global avg3d": lambda x: x.mean((2, 3, 4)),
    "adaptive avg3d": lambda x: F.adaptive_avg_pool3d(x, 1),
}.items():
    function(_name, _compute, of_rank(4))

function(
    "pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), lambda shape: len(shape) == 3 and shape[0] % 4 == 0
)
function(
    "channel_shuffle", lambda x: F.channel_shuffle(x, 2), lambda shape: len(shape) == 3 and shape[0] % 2 == 0
)
function("fold halves", lambda x: x.unflatten(-1, (2, -1)), lambda shape: shape[-1] % 2 == 0)
function("maxout", lambda x: x.unflatten(-1, (2, -1)).amax(-2), lambda shape: shape[-1] % 2 == 0)
function(
    "rotary",
    lambda x: torch.cat([x[..., ::2] * 0.8 - x[..., 1::2] * 0.6, x[..., ::2] * 0.6 + x[..., 1::2] * 0.8], -1),
    lambda shape: shape[-1] % 2 == 0,
)


@step(
    anything,
    lambda draw, shape: {
        "name": among(draw, *[name for name, (fits, _) in FUNCTIONS.items() if fits(shape)])
    },
    name="function",
)
def _function(shape, options, parts):
    return Function(FUNCTIONS[options["name"]][1])
