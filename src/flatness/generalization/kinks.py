"""How much of a layer's reaction to small changes comes from kinks that no Hessian sees.

A piecewise-linear network has a Hessian almost everywhere, but a finite step crosses kinks, and they bend the
loss too, by an amount of the same order α². For random orthogonal A, changing W to W ± αWA raises the risk by
α²/(2m) κ_Tr on average where the network is smooth; what comes on top is due to kinks (petzka2021, §3).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from flatness.curvature.parameters.parameter_products import entries_of, own_parameter
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.errors import OptionError, listed
from flatness.measuring.measure import measure
from flatness.network.layers import Layer, find_layers
from flatness.problem.forward import Forward
from flatness.problem.problem import Problem
from flatness.report.report import Report, Result


def kink_share(
    model: nn.Module,
    data: Any,
    loss: Any = "cross_entropy",
    *,
    layers: str | Iterable[str] | None = None,
    alpha: float = 0.01,
    trials: int = 8,
    forward: Forward | None = None,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = torch.float64,
    seed: int = 0,
    progress: bool = True,
) -> Report:
    """The share of the risk's rise under random feature changes that the Hessian does not explain.

    For every layer, 1 − (α²/2m) κ_Tr / rise, where the rise of the risk is averaged over random orthogonal A
    and both signs of α. About 0 in smooth networks and last layers; at α = 0.01 a few per cent in hidden
    layers of trained ReLU networks, more before training.

    Args:
        model: The network.
        data: As for `flatness.measure`.
        loss: As for `flatness.measure`.
        layers: None for every supported layer, "last", a name, or a list of names.
        alpha: Size of the changes relative to the features.
        trials: Random matrices per layer; each takes two passes over the data.
        forward: As for `flatness.measure`.
        batch_size: Samples per micro-batch.
        device: Measure on a copy of the model there.
        dtype: Precision; differences of risks this small want float64, the default.
        seed: Seed of the matrices.
        progress: Whether to show a bar on long work.

    Returns:
        A `Report` with one row a layer, its standard error from the trials.

    Example:
        >>> import torch, flatness
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> report = flatness.kink_share(model, (torch.randn(50, 4), torch.randint(3, (50,))), trials=2)
        >>> report.layers()
        ['0', '2']
    """
    if not alpha > 0 or not trials >= 2:
        raise OptionError(
            f"Expected alpha > 0 and at least 2 trials but got alpha={alpha!r} and trials={trials!r}. For "
            "example alpha=0.01, trials=8."
        )
    setting: dict[str, Any] = {
        "forward": forward,
        "batch_size": batch_size,
        "device": device,
        "dtype": dtype,
        "seed": seed,
        "progress": progress,
    }
    flat = measure(model, data, loss, measures="relative_flatness", layers=layers, **setting)
    problem = Problem(model, data, loss, **setting)
    rows, left_out = [], []
    with problem.guarded():
        available = find_layers(problem.model)
        parameters = dict(problem.model.named_parameters())
        for name in flat.layers():
            layer = available[name]
            own = own_parameter(problem.model, layer)
            if own is None:
                left_out.append(name)
                continue
            space = ParameterSpace(problem, [own])
            rises = _rises(space, layer, entries_of(layer, parameters[own]), alpha, trials, seed)
            expected = alpha**2 / (2 * layer.matrix().shape[2]) * flat.value("relative_flatness", layer=name)
            rows.append(_row(name, rises, expected, alpha, flat.meta["loss"], space.risk()))
    notes = (f"left out, as their weights are computed from other parameters: {listed(left_out)}",)
    return Report(tuple(rows), flat.meta, flat.notes + (notes if left_out else ()))


def _rises(
    space: ParameterSpace, layer: Layer, entries: Tensor, alpha: float, trials: int, seed: int
) -> Tensor:
    """½[E(W + αWA) + E(W − αWA)] − E for random orthogonal A; entries are those of W in the parameter."""
    generator = torch.Generator().manual_seed(seed)
    at, W = space.risk(), layer.matrix()
    rises = []
    for _ in range(trials):
        step = torch.zeros_like(space.theta, dtype=torch.float64)
        step[entries.flatten()] = alpha * (W.double() @ _orthogonal(W, generator)).flatten()
        rises.append((space.risk(step) + space.risk(-step)) / 2 - at)
    return torch.tensor(rises, dtype=torch.float64, device="cpu")


def _orthogonal(W: Tensor, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix (Haar) for every group: (G, m, m)."""
    G, _, m = W.shape
    normal = torch.randn(G, m, m, generator=generator, dtype=torch.float64, device="cpu")
    Q, R = torch.linalg.qr(normal)
    # Without the signs of R's diagonal the distribution is not uniform.
    return (Q * R.diagonal(dim1=1, dim2=2).sign()[:, None]).to(W.device)


def _row(name: str, rises: Tensor, expected: float, alpha: float, loss: str, risk: float) -> Result:
    rise, spread = float(rises.mean()), float(rises.std()) / len(rises) ** 0.5
    if abs(rise) <= 4 * torch.finfo(rises.dtype).eps * abs(risk):
        note = f"changes of size {alpha:g} raise the risk by no more than rounding: there is nothing to share"
        return Result(
            "kink_share",
            "layer",
            float("nan"),
            layer=name,
            method="sampled",
            loss=loss,
            converged=False,
            notes=(note,),
        )
    return Result(
        "kink_share",
        "layer",
        1 - expected / rise,
        layer=name,
        stderr=abs(expected) * spread / rise**2,
        method="sampled",
        loss=loss,
        notes=(
            f"changes of size {alpha:g} raise the risk by {rise:.4g} ± {spread:.1g}, of which the Hessian "
            f"explains {expected:.4g}",
        ),
    )
