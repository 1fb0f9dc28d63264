"""What random networks are asked to do: a head, targets, a loss, and the same loss in torch's own words.

The reference risk of a task is one number of the whole data set, from torch's functions alone: what
`flatness.measure` gets as its loss may be a name, a module or a function that means the same.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Reference = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Task:
    """A kind of task.

    Attributes:
        output: "classes" (logits), "log classes" (log-probabilities), "values" or "log values".
        target: "indices", "soft", "values", "bits", "signs" or "counts".
        loss: K → what `flatness.measure` is given.
        reference: (K, output with classes last and positions flattened, target) → the mean over everything.
    """

    output: str
    target: str
    loss: Callable[[int], Any]
    reference: Callable[[int, Tensor, Tensor], Tensor]


def weights(K: int) -> Tensor:
    return torch.linspace(0.3, 2.0, K, dtype=torch.float64)


def log_cosh(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).cosh().log().flatten(1).sum(1)


def focal(output: Tensor, target: Tensor) -> Tensor:
    logp = output.log_softmax(1).gather(1, target.unsqueeze(1)).flatten(1)
    return -((1 - logp.exp()).square() * logp).mean(1)


def hinge(output: Tensor, target: Tensor) -> Tensor:
    return (0.7 - output * target).relu().flatten(1).sum(1)


def _normalized(K: int, f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f / f.std(1, correction=0, keepdim=True), y)


CLASSES: dict[str, Task] = {
    "cross_entropy": Task(
        "classes", "indices", lambda K: "cross_entropy", lambda K, f, y: F.cross_entropy(f, y)
    ),
    "cross_entropy function": Task(
        "classes", "indices", lambda K: F.cross_entropy, lambda K, f, y: F.cross_entropy(f, y)
    ),
    "soft labels": Task("classes", "soft", lambda K: "cross_entropy", lambda K, f, y: F.cross_entropy(f, y)),
    "class weights": Task(
        "classes",
        "indices",
        lambda K: nn.CrossEntropyLoss(weights(K)),
        lambda K, f, y: F.cross_entropy(f, y, weights(K)),
    ),
    "weights, smoothing, ignored": Task(
        "classes",
        "indices",
        lambda K: nn.CrossEntropyLoss(weights(K), ignore_index=1, label_smoothing=0.2),
        lambda K, f, y: F.cross_entropy(f, y, weights(K), ignore_index=1, label_smoothing=0.2),
    ),
    "ignored": Task(
        "classes",
        "masked indices",
        lambda K: nn.CrossEntropyLoss(),
        lambda K, f, y: F.cross_entropy(f, y),
    ),
    "smoothing": Task(
        "classes",
        "indices",
        lambda K: nn.CrossEntropyLoss(label_smoothing=0.3),
        lambda K, f, y: F.cross_entropy(f, y, label_smoothing=0.3),
    ),
    "soft, weights, smoothing": Task(
        "classes",
        "soft",
        lambda K: nn.CrossEntropyLoss(weights(K), label_smoothing=0.1),
        lambda K, f, y: F.cross_entropy(f, y, weights(K), label_smoothing=0.1),
    ),
    "normalized": Task("classes", "indices", lambda K: "normalized_cross_entropy", _normalized),
    "nll": Task("log classes", "indices", lambda K: "nll", lambda K, f, y: F.nll_loss(f, y)),
    "nll of scores": Task("classes", "indices", lambda K: nn.NLLLoss(), lambda K, f, y: F.nll_loss(f, y)),
    "nll weights": Task(
        "log classes",
        "masked indices",
        lambda K: nn.NLLLoss(weights(K)),
        lambda K, f, y: F.nll_loss(f, y, weights(K)),
    ),
    "cross_entropy of log classes": Task(
        "log classes", "indices", lambda K: nn.CrossEntropyLoss(), lambda K, f, y: F.cross_entropy(f, y)
    ),
    "multi margin": Task(
        "classes", "indices", lambda K: nn.MultiMarginLoss(), lambda K, f, y: F.multi_margin_loss(f, y)
    ),
    "focal": Task("classes", "indices", lambda K: focal, lambda K, f, y: focal(f, y).mean()),
}

VALUES: dict[str, Task] = {
    "mse": Task("values", "values", lambda K: "mse", lambda K, f, y: F.mse_loss(f, y)),
    "squared_error": Task(
        "values",
        "values",
        lambda K: "squared_error",
        lambda K, f, y: (f - y).square().flatten(1).sum(1).mean(),
    ),
    "MSELoss": Task("values", "values", lambda K: nn.MSELoss(), lambda K, f, y: F.mse_loss(f, y)),
    "bce": Task("values", "bits", lambda K: "bce", lambda K, f, y: F.binary_cross_entropy_with_logits(f, y)),
    "bce soft": Task(
        "values",
        "probabilities",
        lambda K: nn.BCEWithLogitsLoss(),
        lambda K, f, y: F.binary_cross_entropy_with_logits(f, y),
    ),
    "bce weights": Task(
        "values",
        "bits",
        lambda K: nn.BCEWithLogitsLoss(weights(K).flip(0), pos_weight=weights(K)),
        lambda K, f, y: F.binary_cross_entropy_with_logits(f, y, weights(K).flip(0), pos_weight=weights(K)),
    ),
    "huber": Task("values", "values", lambda K: nn.HuberLoss(), lambda K, f, y: F.huber_loss(f, y)),
    "smooth l1": Task(
        "values", "values", lambda K: nn.SmoothL1Loss(), lambda K, f, y: F.smooth_l1_loss(f, y)
    ),
    "l1": Task("values", "values", lambda K: nn.L1Loss(), lambda K, f, y: F.l1_loss(f, y)),
    "poisson": Task(
        "values", "counts", lambda K: nn.PoissonNLLLoss(), lambda K, f, y: F.poisson_nll_loss(f, y)
    ),
    "soft margin": Task(
        "values", "signs", lambda K: nn.SoftMarginLoss(), lambda K, f, y: F.soft_margin_loss(f, y)
    ),
    "kl": Task(
        "values",
        "probabilities",
        lambda K: nn.KLDivLoss(reduction="batchmean"),
        lambda K, f, y: F.kl_div(f, y, reduction="batchmean"),
    ),
    "log cosh": Task("values", "values", lambda K: log_cosh, lambda K, f, y: log_cosh(f, y).mean()),
    "hinge": Task("values", "signs", lambda K: hinge, lambda K, f, y: hinge(f, y).mean()),
    "multilabel": Task(
        "values",
        "bits",
        lambda K: nn.MultiLabelSoftMarginLoss(),
        lambda K, f, y: F.multilabel_soft_margin_loss(f, y),
    ),
}

TASKS = CLASSES | VALUES


class Head(nn.Module):
    """From a value (n, *shape) to a task's outputs.

    Args:
        form: "single" (n, K), "tokens" (n, …, K) or "dense" (n, K, …).
        shape: Shape of what arrives, without samples.
        K: Number of outputs.
        ending: None, "log_softmax" over the classes, "flat log_softmax" (over groups: another function),
            "twice" (a log-softmax of a log-softmax) or "scaled".
    """

    def __init__(self, form: str, shape: tuple[int, ...], K: int, ending: str | None) -> None:
        super().__init__()
        self.form, self.ending = form, ending
        if form == "dense":
            self.classify = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(shape) - 2](shape[0], K, 1)
        else:
            self.classify = nn.Linear(math.prod(shape) if form == "single" else shape[-1], K)

    def forward(self, x: Tensor) -> Tensor:
        z = self.classify(x.flatten(1) if self.form == "single" else x)
        classes = 1 if self.form == "dense" else -1
        if self.ending == "log_softmax":
            return F.log_softmax(z, classes)
        if self.ending == "twice":
            return F.log_softmax(F.log_softmax(z, classes), classes)
        if self.ending == "flat log_softmax":
            return F.log_softmax(z.flatten(1), 1).reshape(z.shape)
        if self.ending == "scaled":
            return 2 * z + 1
        if self.ending == "tanh":
            return z.tanh()
        return z


def flat(form: str, output: Tensor, target: Tensor, target_kind: str) -> tuple[Tensor, Tensor]:
    """Outputs (N, K) and targets (N,) or (N, K) of all positions of all samples."""
    f = output.movedim(1, -1) if form == "dense" else output
    y = target
    if target_kind == "soft":
        y = (target.movedim(1, -1) if form == "dense" else target).flatten(0, -2)
    else:
        y = y.flatten()
    return f.flatten(0, -2), y


def make_target(
    kind: str, form: str, shape: tuple[int, ...], K: int, n: int, generator: torch.Generator
) -> Tensor:
    """Targets for outputs (n, *shape)."""
    values = torch.randn(n, *shape, generator=generator, dtype=torch.float64)
    classes = 1 if form == "dense" else -1
    if kind in ("indices", "masked indices"):
        y = values.argmax(classes)
        if kind == "masked indices":
            y[torch.rand(y.shape, generator=generator) < 0.3] = -100
        return y
    return {
        "soft": values.softmax(classes),
        "probabilities": values.sigmoid(),
        "values": values,
        "bits": (values > 0).double(),
        "signs": values.sign(),
        "counts": values.abs().round(),
    }[kind]
