"""The losses that a study trains with, and a step of a whole stack: on a GPU a recorded CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatness.study.training.augmentation import moved
from flatness.study.training.optimizers import SAM, Optimizer
from flatness.study.training.stack import Stack

_BATCH = 1000  # samples at a time when a trained network is evaluated
_WARM_UP = 3  # steps before one is recorded


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


def _squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.reshape(output.shape)).square().flatten(1).sum(1)


def _mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.reshape(output.shape)).square().flatten(1).mean(1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": _cross_entropy,
    "mse": _mse,
    "squared_error": _squared_error,
}
"""By name as in `flatness.measure`: functions of outputs (samples, …) and targets to (samples,)."""


def correct(output: Tensor, target: Tensor) -> Tensor:
    """1 for each sample whose largest output is its class, else 0; 0 for all without classes."""
    if target.is_floating_point() or output.dim() != 2:
        return output.new_zeros(len(output))
    return (output.argmax(1) == target).to(output.dtype)


@torch.no_grad()
def _losses_and_accuracy(model: nn.Module, data: tuple[Tensor, Tensor], loss: str) -> tuple[Tensor, float]:
    """The loss of each sample, and the share of samples classified right (NaN without classes)."""
    losses, right = [], 0.0
    for x, y in zip(*(part.split(_BATCH) for part in data), strict=True):
        output = model(x)
        losses.append(LOSSES[loss](output, y).double())
        right += float(correct(output, y).sum())
    return torch.cat(losses), float("nan") if data[1].is_floating_point() else right / len(data[0])


def risk_and_accuracy(model: nn.Module, data: tuple[Tensor, Tensor], loss: str) -> tuple[float, float]:
    """Mean loss, in float64, and the share of samples classified right (NaN without classes)."""
    losses, accuracy = _losses_and_accuracy(model, data, loss)
    return float(losses.mean()), accuracy


def evaluation(
    model: nn.Module, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], loss: str
) -> dict[str, float]:
    """What the gap is computed from, and how far test losses differ from sample to sample.

    `train` has the targets that the network was trained on.
    """
    model.eval()
    train_loss, train_accuracy = risk_and_accuracy(model, train, loss)
    test_losses, test_accuracy = _losses_and_accuracy(model, test, loss)
    return {
        "train_loss": train_loss,
        "test_loss": float(test_losses.mean()),
        "test_loss_deviation": float(test_losses.std(correction=0)),
        "train_accuracy": train_accuracy,
        "test_accuracy": test_accuracy,
        "train_samples": len(train[0]),
        "test_samples": len(test[0]),
    }


class Program:
    """Steps of a stack over data that stay on the device.

    Args:
        stack: The networks.
        optimizer: Theirs.
        inputs: All training inputs, (samples, …).
        targets: All training targets, (samples, …); with `own_targets` (networks, samples).
        loss: A key of `LOSSES`.
        own_targets: Whether every network has targets of its own.
        augmented: Whether images are moved by `moves`.
        bfloat16: Whether forward passes multiply in bfloat16, as `torch.autocast` does.

    Attributes:
        moves: How each network sees each sample in this epoch (`augmentation`), (networks, samples); or None.
        sums: Of its samples' losses, and of those that are classified right, for each network: (2, networks);
            since they were last set to zero.
        graphed: Whether the step is recorded as a CUDA graph; on a CPU there is none.
    """

    def __init__(
        self,
        stack: Stack,
        optimizer: Optimizer,
        inputs: Tensor,
        targets: Tensor,
        loss: str,
        own_targets: bool = False,
        augmented: bool = False,
        bfloat16: bool = False,
    ) -> None:
        self.stack, self.optimizer, self.inputs, self.targets = stack, optimizer, inputs, targets
        self._own_targets, self._bfloat16 = own_targets, bfloat16
        shape = (len(stack), len(inputs))
        self.moves = torch.zeros(shape, dtype=torch.int64, device=inputs.device) if augmented else None
        self._loss = LOSSES[loss]
        self.graphed = stack.flat.is_cuda
        self._begin()

    def _begin(self) -> None:
        rows, device = len(self.stack), self.stack.flat.device
        self.sums = torch.zeros(2, rows, dtype=torch.float64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._index: Tensor | None = None
        self._warm = self._full = 0

    def keep(self, rows: Tensor) -> None:
        """Keep the networks in these rows, everywhere, and begin new sums."""
        self.stack.keep(rows)
        self.optimizer.keep(rows)
        if self._own_targets:
            self.targets = self.targets[rows]
        if self.moves is not None:
            self.moves = self.moves[rows]
        self._begin()

    def losses(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Losses of the samples that `index` (networks, samples) names, and which are classified right."""
        rows, samples = index.shape
        x = self.inputs.index_select(0, index.reshape(-1))
        if self.moves is not None:
            x = moved(x, self.moves.gather(1, index).reshape(-1))
        y = (
            self.targets.gather(1, index).reshape(-1)
            if self._own_targets
            else self.targets.index_select(0, index.reshape(-1))
        )
        # No cache of rounded weights: a recorded step could not keep it.
        with torch.autocast(x.device.type, torch.bfloat16, self._bfloat16, cache_enabled=False):
            output = self.stack.forward(x.unflatten(0, (rows, samples))).flatten(0, 1).float()
        return self._loss(output, y).view(rows, samples), correct(output.detach(), y).view(rows, samples)

    def step(self, index: Tensor) -> None:
        """Train every network on the samples that its row of `index` names."""
        if not self.graphed:
            self._step(index)
        elif self._graph is not None and self._index is not None and self._index.shape == index.shape:
            self._index.copy_(index)
            self._graph.replay()
        elif self._warm < _WARM_UP or index.shape[1] < self._full:
            # The first steps, which allocate what is allocated lazily, and a shorter last batch.
            self._warm += 1
            self._full = max(self._full, index.shape[1])
            self._step(index)
        else:
            self._capture(index)

    def _step(self, index: Tensor) -> None:
        losses, right = self.losses(index)
        gradient = self.stack.gradient(losses.mean(1))
        if isinstance(self.optimizer, SAM):
            gradient = self._gradient_above(index, self.optimizer.ascent(gradient))
        with torch.no_grad():
            self.optimizer.update(self.stack.flat, gradient)
            self.sums += torch.stack([losses.detach().sum(1), right.sum(1)])

    def _gradient_above(self, index: Tensor, ascent: Tensor) -> Tensor:
        """The gradient one step up from θ; running statistics are those of θ."""
        buffers = {name: value.clone() for name, value in self.stack.buffers.items()}
        start = self.stack.flat.clone()
        self.stack.flat.add_(ascent)
        gradient = self.stack.gradient(self.losses(index)[0].mean(1))
        self.stack.flat.copy_(start)
        for name, value in buffers.items():
            self.stack.buffers[name].copy_(value)
        return gradient

    def _capture(self, index: Tensor) -> None:
        """Record the step, then run it once."""
        static = index.clone()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # a graph has memory of its own, and cannot take what the first steps left
        with torch.cuda.graph(graph):
            self._step(static)
        self._graph, self._index = graph, static
        graph.replay()

    def check_engine(self, index: Tensor) -> None:
        """Continue with one network at a time if a model cannot run as a stack, such as one with branches.

        Forward or backward: kernels of attention, for one, refuse what `torch.vmap` lays out for them.
        """
        buffers = {name: value.clone() for name, value in self.stack.buffers.items()}
        try:
            self.stack.gradient(self.losses(index)[0].mean(1))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, NotImplementedError):
            self.stack.engine = "looped"  # what is wrong with the model itself shows there too
        for name, value in buffers.items():
            self.stack.buffers[name].copy_(value)
