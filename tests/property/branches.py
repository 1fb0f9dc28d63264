"""Several branches that meet, repeat or are chosen from."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from property.steps import Chain, Composed, among, anything, chance, of_rank, step

COMBINATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "weighted": lambda a, b: 0.3 * a + 0.7 * b,
    "mul": torch.mul,
    "gate": lambda a, b: a * b.sigmoid(),
    "relu gate": lambda a, b: a * b.relu(),
    "div": lambda a, b: a / (1 + b.abs()),
    "maximum": torch.maximum,
    "where": lambda a, b: torch.where(a > b, a, b),
    "where sign": lambda a, b: torch.where(a > 0, a, b),
    "route": lambda a, b: torch.stack([a, b], 1)[
        torch.arange(len(a)), (b.flatten(1).sum(1) > a.flatten(1).sum(1)).long()
    ],
    "mixture": lambda a, b: (
        torch.stack([a, b], -1) * torch.stack([a.sum(-1, True), b.sum(-1, True)], -1).softmax(-1)
    ).sum(-1),
    "masked write": lambda a, b: _masked(a, b),
    "cat": lambda a, b: torch.cat([a, b], -1),
    "cat channels": lambda a, b: torch.cat([a, b], 1),
    "stack": lambda a, b: torch.stack([a, b], 1).sum(1),
    "inner": lambda a, b: (a * b).sum(-1, keepdim=True),
    "logaddexp": torch.logaddexp,
    "addcmul": lambda a, b: torch.addcmul(a, a, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.25),
    "in place": lambda a, b: (a + 0).add_(b),
    "distance": lambda a, b: (a - b).square(),
    "L1": lambda a, b: (a - b).abs(),
}


def _masked(a: Tensor, b: Tensor) -> Tensor:
    out = torch.zeros_like(a)
    mask = a > 0
    out[mask] = b[mask]
    out[~mask] = a[~mask]
    return out


def _combined(how: str, a: Tensor, b: Tensor) -> Tensor:
    """Branches of different shapes are put side by side."""
    if a.shape == b.shape:
        return COMBINATIONS[how](a, b)
    return torch.cat([a.flatten(1), b.flatten(1)], 1)


@step(anything, lambda draw, shape: {"how": among(draw, *COMBINATIONS)}, parts=2)
def branches(shape, options, parts):
    return Composed(
        lambda own, x: _combined(options["how"], own.one(x), own.other(x)),
        one=Chain(parts[0], shape),
        other=Chain(parts[1], shape),
    )


@step(anything, lambda draw, shape: {"how": among(draw, *COMBINATIONS)}, parts=1)
def residual(shape, options, parts):
    return Composed(lambda own, x: _combined(options["how"], x, own.one(x)), one=Chain(parts[0], shape))


@step(anything, lambda draw, shape: {"how": among(draw, *COMBINATIONS)}, parts=1)
def siamese(shape, options, parts):
    """The same weights for two views of the sample."""
    return Composed(
        lambda own, x: _combined(options["how"], own.one(x), own.one(0.5 - x)), one=Chain(parts[0], shape)
    )


@step(anything, lambda draw, shape: {"times": draw.randint(2, 3)}, parts=1)
def repeated(shape, options, parts):
    """The same weights several times in depth, where shapes allow it."""
    inner = Chain(parts[0], shape)
    times = options["times"] if inner.shape == tuple(shape) else 1

    def run(own, x):
        for _ in range(times):
            x = own.one(x)
        return x

    return Composed(run, one=inner)


@step(of_rank(1), lambda draw, shape: {"hard": chance(draw)}, parts=2)
def experts(shape, options, parts):
    """A router's scores choose between two branches, or mix them."""

    def run(own, x):
        a, b = own.one(x), own.other(x)
        a, b = a.flatten(1), b.flatten(1)
        width = min(a.shape[1], b.shape[1])
        values = torch.stack([a[:, :width], b[:, :width]], 1)
        scores = own.router(x)
        if options["hard"]:
            return values[torch.arange(len(x)), scores.argmax(1)]
        return (values * scores.softmax(1).unsqueeze(-1)).sum(1)

    return Composed(
        run, one=Chain(parts[0], shape), other=Chain(parts[1], shape), router=nn.Linear(shape[0], 2)
    )
