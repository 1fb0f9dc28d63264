"""Networks of one shape as one: their parameters in one tensor, their forward passes in one program."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from flatness.errors import ModelError

ENGINES = ("looped", "channels_last", "grouped", "banded")
"""How a stack runs forward. ``looped``: one network after the other. ``channels_last``: the same with the
channels of images beside each other in memory, as large convolutions on a GPU want them. ``grouped``: all
at once through `torch.vmap`, which makes a batch of products out of linear layers and a grouped convolution
out of convolutions. ``banded``: the same with convolutions written as products of whole image rows with the
band matrix of the kernel."""
ALONE = ENGINES[:2]
"""Engines that run one network at a time."""
# Widest convolution, in channels, up to which an engine is the fastest on an H200, in images per second of
# all networks: LeNet-5 (16 channels) 2.5 M banded, 1.3 M grouped; ResNet-18 with 16 to 128 channels 64,000
# grouped, 44,000 banded, 26,000 one at a time; with 64 to 512 channels 17,000, 7,000 and 25,000. The LeNet
# of 50 channels was not timed; on its narrow maps bands cost 2.4 to 5.6 times the arithmetic.
_NARROW, _WIDE = 50, 128


class Stack:
    """Parameters and buffers of networks of one shape.

    All parameters that are trained live in `flat`, (networks, parameters); `parameters` are views into it
    with a leading axis for the network, so that an optimizer needs a handful of operations however many
    layers there are. Frozen parameters (``requires_grad`` is False) are among the buffers and never move.

    Args:
        networks: At least one; they are copied.
        device: Where to.
        engine: One of `ENGINES`.
    """

    def __init__(self, networks: Sequence[nn.Module], device: torch.device, engine: str) -> None:
        first = networks[0]
        trained = {name: value for name, value in first.named_parameters() if value.requires_grad}
        if not trained:
            raise ModelError(
                "Expected a model with parameters that can be trained but all of its parameters are frozen. "
                "Set requires_grad, or take it as a checkpoint: [checkpoints]."
            )
        self.shapes = {name: value.shape for name, value in trained.items()}
        held = [{**dict(network.named_parameters()), **dict(network.named_buffers())} for network in networks]
        rows = [_stacked(held, name).flatten(1).float().cpu() for name in trained]
        self.flat = torch.cat(rows, dim=1).to(device)
        self.buffers = {name: _stacked(held, name).to(device) for name in held[0] if name not in trained}
        self.skeleton = copy.deepcopy(first).to("meta").train()
        self.engine = engine
        self.parameters = self._views()

    def __len__(self) -> int:
        return len(self.flat)

    def _views(self) -> dict[str, Tensor]:
        """Leaves that share the memory of `flat`."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = self.flat.split(sizes, dim=1)
        return {
            name: part.view(len(self), *shape).detach().requires_grad_()
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def forward(self, x: Tensor) -> Tensor:
        """(networks, samples, …) → (networks, samples, outputs); network i sees x[i]."""
        if self.engine in ALONE:
            return torch.stack([self._alone(i, each) for i, each in enumerate(x)])
        # On a GPU, the backward pass of fused attention fails on the layout that vmap produces.
        plain = sdpa_kernel(SDPBackend.MATH)
        with plain, BandedConvolutions() if self.engine == "banded" else nullcontext():
            return torch.vmap(self._one, randomness="different")(self.parameters, self.buffers, x)

    def _one(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(self.skeleton, (parameters, buffers), (x,))

    def _alone(self, row: int, x: Tensor) -> Tensor:
        """One network's outputs, from copies: a view into `flat` may begin where fast kernels cannot read."""
        parameters, buffers = self._row(row)

        def laid_out(value: Tensor) -> Tensor:
            images = self.engine == "channels_last" and value.dim() == 4
            return value.clone(memory_format=torch.channels_last if images else torch.contiguous_format)

        copies = {name: laid_out(value) for name, value in parameters.items()}
        return self._one(copies, buffers, laid_out(x))

    def _row(self, i: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return (
            {name: value[i] for name, value in self.parameters.items()},
            {name: value[i] for name, value in self.buffers.items()},
        )

    def gradient(self, losses: Tensor) -> Tensor:
        """The gradient of each network's loss by its own parameters, (networks, parameters).

        A network's loss does not depend on another's parameters, so the gradient of the sum is all of them.
        """
        found = torch.autograd.grad(losses.sum(), list(self.parameters.values()), allow_unused=True)
        rows = [
            (torch.zeros_like(value) if part is None else part).reshape(len(self), -1)
            for part, value in zip(found, self.parameters.values(), strict=True)
        ]
        return torch.cat(rows, dim=1)

    def keep(self, rows: Tensor) -> None:
        """Keep the networks in these rows; the others leave."""
        self.flat = self.flat[rows]
        self.buffers = {name: value[rows] for name, value in self.buffers.items()}
        self.parameters = self._views()

    def weights(self, row: int) -> dict[str, Tensor]:
        """The state dict of one network, on the host."""
        parameters, buffers = self._row(row)
        values = {**parameters, **buffers}
        # A state dict has tied parameters under all their names and leaves some buffers out.
        first = {id(value): name for name, value in self.skeleton.named_parameters()}
        wanted = self.skeleton.state_dict(keep_vars=True).items()
        return {name: values[first.get(id(value), name)].detach().cpu().clone() for name, value in wanted}

    def saved(self) -> dict[str, Any]:
        """What a checkpoint needs."""
        return {
            "flat": self.flat.cpu(),
            "buffers": {name: value.cpu() for name, value in self.buffers.items()},
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on from what `saved` returned, for the same networks in the same rows."""
        self.flat.copy_(saved["flat"])
        for name, value in saved["buffers"].items():
            self.buffers[name].copy_(value)


def _stacked(held: Sequence[dict[str, Tensor]], name: str) -> Tensor:
    return torch.stack([own[name].detach() for own in held])


def usual_engine(model: nn.Module, device: torch.device, bfloat16: bool = False) -> str:
    """The engine that is usually the fastest for such networks.

    A rule and no trial: engines round differently, and a study that is run again is to train the same
    networks. A CPU works on one convolution with all its cores and gains nothing from several at once
    (measured: a third of the speed), while small products do profit. A GPU wants everything at once, as long
    as networks are small; in bfloat16 one after the other: `torch.vmap` has no batch norm
    of two precisions.
    """
    if bfloat16:
        return "looped" if device.type == "cpu" else "channels_last"
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    widest = max((own.out_channels for own in model.modules() if isinstance(own, convolutions)), default=0)
    if not widest:
        return "grouped"
    if device.type == "cpu":
        return "looped"
    return "banded" if widest <= _NARROW else "grouped" if widest <= _WIDE else "channels_last"


class BandedConvolutions(TorchFunctionMode):
    """Inside, plain two-dimensional convolutions are a copy and a product instead of a convolution.

    Images are unfolded along their rows only, and multiplied by the band matrix of the kernel: several times
    the arithmetic and a fraction of the memory traffic, which is what small networks wait for. Under
    `torch.vmap` it becomes one batched product over all networks, where the library's grouped convolutions
    have a group per network with a handful of channels each. Other convolutions run as usual.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace conv2d."""
        return (_banded if func is torch.conv2d else func)(*args, **(kwargs or {}))


def _banded(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """Σ_{c,i,j} W[o, c, i, j] x[b, c, h+i, w+j], as (b·h, i·c·w) @ (i·c·w, o·w′).

    Whole rows of the image times the kernel's band matrix.
    """
    if input.dim() != 4 or groups != 1 or isinstance(padding, str) or _two(dilation) != (1, 1):
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    (down, right), (above, left) = _two(stride), _two(padding)
    x = F.pad(input, (left, left, above, above)) if above or left else input
    band = _band(weight, x.shape[-1], right)  # (o, c, i, w′, w)
    strips = x.unfold(2, weight.shape[2], down).permute(0, 2, 4, 1, 3)  # (b, h, i, c, w), a view
    samples, height = strips.shape[:2]
    matrix = band.permute(2, 1, 4, 0, 3).flatten(0, 2).flatten(1)
    product = strips.flatten(2).flatten(0, 1) @ matrix
    product = product.unflatten(1, (len(weight), -1)).unflatten(0, (samples, height))
    if bias is not None:
        product = product + bias.unsqueeze(1)
    return product.transpose(1, 2)


def _two(value: Any) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    return (pair[0], pair[0]) if len(pair) == 1 else pair


def _band(weight: Tensor, width: int, stride: int) -> Tensor:
    """(…, j) → (…, w′, w): row w′ is the kernel's row, begun at column stride·w′, with zeros around.

    Rows one stride too long, laid end to end and cut again at `width`, move by a stride each.
    """
    rows = (width - weight.shape[-1]) // stride + 1
    longer = F.pad(weight, (0, width + stride - weight.shape[-1]))
    laid = longer.unsqueeze(-2).expand(*weight.shape[:-1], rows, width + stride).flatten(-2)
    return laid[..., : rows * width].unflatten(-1, (rows, width))
