"""Networks of one shape as one: their parameters in one tensor, their forward passes in one program."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from flatness.errors import ModelError
from flatness.problem.convolutions import AsProducts
from flatness.problem.pool_first import MANY_CHANNELS, pool_first, pooling_sequences
from flatness.problem.pooling import FastPooling

ENGINES = ("looped", "channels_last", "grouped", "unfolded", "banded", "windowed")
"""How a stack runs forward. ``looped``: one network after the other. ``channels_last``: the same with the
channels of images beside each other in memory, as large convolutions on a GPU want them. ``grouped``: all
at once through `torch.vmap`, which makes a batch of products out of linear layers and a grouped convolution
out of convolutions. ``unfolded``: the same with convolutions written as products over unfolded images.
``banded``: the same as products of whole image rows with the band matrix of the kernel. ``windowed``: banded,
with convolutions that are pooled computed for whole windows at once, as `pool_first` does."""
_PRODUCTS = ("unfolded", "banded", "windowed")


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
        named = [dict(network.named_parameters()) for network in networks]
        rows = [
            torch.cat([own[name].detach().reshape(-1).float().cpu() for name in trained]) for own in named
        ]
        self.flat = torch.stack(rows).to(device)
        fixed = [name for name in named[0] if name not in trained]
        held = [
            {**dict(network.named_buffers()), **{name: own[name].detach() for name in fixed}}
            for network, own in zip(networks, named, strict=True)
        ]
        self.buffers = {name: torch.stack([own[name] for own in held]).to(device) for name in held[0]}
        self.skeleton = copy.deepcopy(first).to("meta").train()
        self._sequences = pooling_sequences(self.skeleton)
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
        if self.engine in ("looped", "channels_last"):
            return torch.stack([self._alone(i, each) for i, each in enumerate(x)])
        with ExitStack() as rewritten:
            if self.engine in _PRODUCTS:
                rewritten.enter_context(AsProducts(banded=self.engine != "unfolded"))
                rewritten.enter_context(FastPooling(derivatives=True))
            return torch.vmap(self._one, randomness="different")(self.parameters, self.buffers, x)

    def _one(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        windows = MANY_CHANNELS if self.engine == "windowed" else 0
        with pool_first(self._sequences, windows=windows, derivatives=True):
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


def usual_engine(model: nn.Module, device: torch.device) -> str:
    """The engine to start with.

    A CPU works on one convolution with all its cores and gains nothing from several at once (measured: a
    third of the speed), while small products do profit. A GPU wants everything at once.
    """
    if device.type == "cpu":
        slow = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        return "looped" if any(isinstance(module, slow) for module in model.modules()) else "grouped"
    return "grouped"
