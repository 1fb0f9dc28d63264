"""How long do the largest eigenvalues of every layer's Hessian take, and of every row block H_ss?

LeNet-5 after a few steps of training on noisy class means of CIFAR-10's shape, cross-entropy. The peers
multiply by the Hessian of one weight at a time: curvlinops with scipy's eigsh, hessian-eigenthings with
Lanczos, PyHessian with power iteration. Each runs at the loosest setting (tolerance, or steps of Lanczos)
with which the worst layer's eigenvalue is within 1e-4 of the one in float64.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from harness import (
    arguments,
    duration,
    full_precision,
    image_problem,
    machine,
    peer,
    race,
    show,
    undisturbed,
)
from torch import Tensor, nn

import flatness

ACCURACY = 1e-4
TOLERANCES = (1e-2, 1e-3, 1e-4, 1e-5)
STEPS = (8, 16, 32, 64)
LAYERS = ("conv1", "conv2", "fc1", "fc2", "fc3")
WHOLE, ROWS = "hessian_top_eigenvalue", "maximal_relative_flatness"
Eigenvalues = dict[str, float]


def trained(samples: int, device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    model, x, y = image_problem(samples, device)
    means = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(1)).to(device)
    x = x + 0.3 * means[y]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.zero_grad()
    return model, x, y


def by_flatness(model: nn.Module, x: Tensor, y: Tensor, name: str, **arguments: Any) -> Eigenvalues:
    report = flatness.measure(model, (x, y), measures=name, progress=False, **arguments)
    if not all(report.result(name, layer=layer).converged for layer in LAYERS):
        raise SystemExit(f"flatness, {name}: not converged")
    return {layer: report.value(name, layer=layer) for layer in LAYERS}


def by_curvlinops(curvlinops: Any, model: nn.Module, x: Tensor, y: Tensor, steps: int) -> Eigenvalues:
    return {
        layer: top_eigenvalue(curvlinops_operator(curvlinops, model, layer, x, y).to_scipy(), steps)
        for layer in LAYERS
    }


def curvlinops_operator(curvlinops: Any, model: nn.Module, layer: str, x: Tensor, y: Tensor) -> Any:
    weight = [model.get_submodule(layer).weight]
    return curvlinops.HessianLinearOperator(
        model, nn.CrossEntropyLoss(), weight, [(x, y)], check_deterministic=False, num_data=len(x)
    )


def top_eigenvalue(operator: Any, steps: int) -> float:
    from scipy.sparse.linalg import eigsh

    start = np.random.default_rng(0).standard_normal(operator.shape[0]).astype(operator.dtype)
    values = eigsh(operator, k=1, which="LA", ncv=steps, tol=1e-2, v0=start, return_eigenvectors=False)
    return float(values[0])


def curvlinops_rows(
    curvlinops: Any, model: nn.Module, x: Tensor, y: Tensor, steps: int, device: torch.device
) -> float:
    """Seconds that the row blocks of all layers would take, from one row of every layer."""
    total = 0.0
    for layer in LAYERS:
        W = model.get_submodule(layer).weight
        whole = curvlinops_operator(curvlinops, model, layer, x, y)
        size = W[0].numel()
        for row in range(len(W)):
            indices = list(range(row * size, (row + 1) * size))
            block = curvlinops.SubmatrixLinearOperator(whole, indices, indices).to_scipy()
            if np.any(block @ np.ones(size, dtype=block.dtype)):  # not a dead unit, whose block is zero
                total += len(W) * undisturbed(lambda block=block: top_eigenvalue(block, steps), device)[0]
                break
    return total


def by_eigenthings(eigenthings: Any, model: nn.Module, x: Tensor, y: Tensor, steps: int) -> Eigenvalues:
    loss = eigenthings.supervised_loss(F.cross_entropy)
    found = {}
    for layer in LAYERS:
        weight = eigenthings.match_names(f"{layer}.weight")
        operator = eigenthings.HessianOperator(model, [(x, y)], loss, param_filter=weight)
        result = eigenthings.lanczos(operator, k=1, max_iter=steps, which="LA", reorthogonalize=True, seed=0)
        found[layer] = float(result.eigenvalues[0])
    return found


def by_pyhessian(pyhessian: Any, model: nn.Module, x: Tensor, y: Tensor, tolerance: float) -> Eigenvalues:
    found = {}
    for layer in LAYERS:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name == f"{layer}.weight")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about backward(create_graph=True), which PyHessian calls
            operator = pyhessian.hessian(model, nn.CrossEntropyLoss(), data=(x, y), cuda=x.is_cuda)
            values, _ = operator.eigenvalues(maxIter=1000, tol=tolerance, top_n=1)
        found[layer] = float(values[0])
        model.zero_grad()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return found


def worst_error(values: Eigenvalues, reference: Eigenvalues) -> float:
    return max(abs(values[layer] / reference[layer] - 1) for layer in LAYERS)


def accurate_enough(
    way: Callable[[float], Eigenvalues], settings: Sequence[float], reference: Eigenvalues
) -> tuple[float, float]:
    """The loosest setting that meets the accuracy, and its error."""
    for setting in settings:
        error = worst_error(way(setting), reference)
        if error <= ACCURACY:
            return setting, error
    raise SystemExit(f"no setting out of {settings} is accurate enough: {error:.1e}")


def run(device: torch.device, samples: int) -> dict[str, Any]:
    full_precision()
    model, x, y = trained(samples, device)
    strict = {"dtype": torch.float64, "options": {WHOLE: {"tolerance": 1e-9, "max_products": 1000}}}
    reference = by_flatness(model, x, y, WHOLE, **strict)

    def own(tolerance: float, name: str = WHOLE) -> Eigenvalues:
        return by_flatness(model, x, y, name, options={name: {"tolerance": tolerance}})

    ways: dict[str, tuple[Callable[[Any], Eigenvalues], Sequence[float]]] = {"flatness": (own, TOLERANCES)}
    if curvlinops := peer("curvlinops"):
        ways["curvlinops"] = (lambda steps: by_curvlinops(curvlinops, model, x, y, steps), STEPS)
    if eigenthings := peer("hessian_eigenthings"):
        ways["hessian-eigenthings"] = (lambda steps: by_eigenthings(eigenthings, model, x, y, steps), STEPS)
    if pyhessian := peer("pyhessian"):
        ways["PyHessian"] = (lambda setting: by_pyhessian(pyhessian, model, x, y, setting), TOLERANCES)
    chosen = {name: accurate_enough(way, settings, reference) for name, (way, settings) in ways.items()}
    contenders = {name: lambda way=way, name=name: way(chosen[name][0]) for name, (way, _) in ways.items()}
    contenders["flatness, row blocks"] = lambda: own(chosen["flatness"][0], ROWS)
    times = {name: t.best for name, t in race(contenders, device, turns=4, budget=10.0).items()}
    own_rows = times.pop("flatness, row blocks")
    count = sum(len(model.get_submodule(layer).weight) for layer in LAYERS)
    rows = [
        (f"layers: {name}", duration(t), f"{chosen[name][0]:g}", f"{chosen[name][1]:.0e}")
        for name, t in times.items()
    ]
    rows.append((f"{count} row blocks: flatness", duration(own_rows), f"{chosen['flatness'][0]:g}", ""))
    ratios = {name: t / times["flatness"] for name, t in times.items() if name != "flatness"}
    if curvlinops:
        steps = int(chosen["curvlinops"][0])
        theirs = curvlinops_rows(curvlinops, model, x, y, steps, device)
        label = f"{count} row blocks: curvlinops, extrapolated from one row a layer"
        rows.append((label, duration(theirs), f"{steps}", ""))
        ratios["curvlinops, row blocks"] = theirs / own_rows
    title = f"Largest eigenvalues, {len(LAYERS)} layers of LeNet-5, n = {samples:,} ({machine(device)})"
    show(title, ("", "best", "tolerance or steps", "relative error"), rows)
    faster = ", ".join(f"{ratio:.1f} ({name})" for name, ratio in ratios.items())
    print(f"ratio: flatness is faster by {faster}" if faster else "ratio: no peer to compare with")
    return {"seconds": times | {"row blocks": own_rows}, "times faster than": ratios}


if __name__ == "__main__":
    given = arguments(__doc__, cpu=500, cuda=5_000)
    run(given.device, given.samples)
