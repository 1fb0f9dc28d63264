"""How long do the largest eigenvalues of every layer's Hessian take, and of every row block H_ss?

LeNet-5 after a few steps of training on noisy class means of CIFAR-10's shape, cross-entropy. The peers
multiply by the Hessian of one weight at a time: curvlinops with scipy's eigsh; hessian-eigenthings' Lanczos
with the fewest steps, out of 16, 32, 64, that meet the tolerance (only that run counts); PyHessian's power
iteration. All stop at a relative residual of 1e-5, PyHessian at that relative change. Errors are those of
the worst layer, against float64.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
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
    seconds,
    show,
)
from torch import Tensor, nn

import flatness

TOLERANCE = 1e-5
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


def by_curvlinops(curvlinops: Any, model: nn.Module, x: Tensor, y: Tensor) -> Eigenvalues:
    return {
        layer: top_eigenvalue(curvlinops_operator(curvlinops, model, layer, x, y).to_scipy())
        for layer in LAYERS
    }


def curvlinops_operator(curvlinops: Any, model: nn.Module, layer: str, x: Tensor, y: Tensor) -> Any:
    weight = [model.get_submodule(layer).weight]
    return curvlinops.HessianLinearOperator(
        model, nn.CrossEntropyLoss(), weight, [(x, y)], check_deterministic=False, num_data=len(x)
    )


def top_eigenvalue(operator: Any) -> float:
    from scipy.sparse.linalg import eigsh

    start = np.random.default_rng(0).standard_normal(operator.shape[0]).astype(operator.dtype)
    values = eigsh(operator, k=1, which="LA", tol=TOLERANCE, v0=start, return_eigenvectors=False)
    return float(values[0])


def curvlinops_rows(curvlinops: Any, model: nn.Module, x: Tensor, y: Tensor, device: torch.device) -> float:
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
                total += len(W) * seconds(lambda block=block: top_eigenvalue(block), device)
                break
    return total


def by_eigenthings(
    eigenthings: Any, model: nn.Module, x: Tensor, y: Tensor, steps: dict[str, int]
) -> Eigenvalues:
    found = {}
    for layer in LAYERS:
        operator = eigenthings.HessianOperator(
            model,
            [(x, y)],
            eigenthings.supervised_loss(nn.functional.cross_entropy),
            param_filter=eigenthings.match_names(f"{layer}.weight"),
        )
        chosen = (steps[layer],) if layer in steps else (16, 32, 64)
        for count in chosen:
            result = eigenthings.lanczos(
                operator, k=1, max_iter=count, tol=TOLERANCE, which="LA", reorthogonalize=True, seed=0
            )
            steps[layer] = count
            if bool(torch.as_tensor(result.converged).all()):
                break
        found[layer] = float(result.eigenvalues[0])
    return found


def by_pyhessian(pyhessian: Any, model: nn.Module, x: Tensor, y: Tensor) -> Eigenvalues:
    found = {}
    for layer in LAYERS:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name == f"{layer}.weight")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about backward(create_graph=True), which PyHessian calls
            operator = pyhessian.hessian(model, nn.CrossEntropyLoss(), data=(x, y), cuda=x.is_cuda)
            values, _ = operator.eigenvalues(maxIter=1000, tol=TOLERANCE, top_n=1)
        found[layer] = float(values[0])
        model.zero_grad()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return found


def worst_error(values: Eigenvalues, reference: Eigenvalues) -> float:
    return max(abs(values[layer] / reference[layer] - 1) for layer in LAYERS)


def run(device: torch.device, samples: int) -> dict[str, Any]:
    full_precision()
    model, x, y = trained(samples, device)
    strict = {"dtype": torch.float64, "options": {WHOLE: {"tolerance": 1e-9, "max_products": 1000}}}
    reference = by_flatness(model, x, y, WHOLE, **strict)
    ways: dict[str, Callable[[], Eigenvalues]] = {"flatness": lambda: by_flatness(model, x, y, WHOLE)}
    curvlinops, eigenthings, pyhessian = (
        peer(name) for name in ("curvlinops", "hessian_eigenthings", "pyhessian")
    )
    if curvlinops:
        ways["curvlinops, eigsh"] = lambda: by_curvlinops(curvlinops, model, x, y)
    if eigenthings:
        steps: dict[str, int] = {}
        ways["hessian-eigenthings, Lanczos"] = lambda: by_eigenthings(eigenthings, model, x, y, steps)
    if pyhessian:
        ways["PyHessian, power iteration"] = lambda: by_pyhessian(pyhessian, model, x, y)
    errors = {name: worst_error(way(), reference) for name, way in ways.items()}
    times = {name: t.best for name, t in race(ways, device, turns=3, budget=8.0).items()}
    rows_way = {"flatness": lambda: by_flatness(model, x, y, ROWS)}
    own_rows = race(rows_way, device, turns=2, budget=8.0)["flatness"].best
    their_rows = curvlinops_rows(curvlinops, model, x, y, device) if curvlinops else None
    count = sum(len(model.get_submodule(layer).weight) for layer in LAYERS)
    show(
        f"Largest eigenvalues, {len(LAYERS)} layers of LeNet-5, n = {samples:,} ({machine(device)})",
        ("", "best", "relative error"),
        [
            *((f"layers: {name}", duration(t), f"{errors[name]:.0e}") for name, t in times.items()),
            (f"all {count} row blocks: flatness", duration(own_rows), ""),
            *(
                [
                    (
                        f"all {count} row blocks: curvlinops, from one row a layer",
                        duration(their_rows),
                        "",
                    )
                ]
                if their_rows
                else []
            ),
        ],
    )
    ratios = {name: t / times["flatness"] for name, t in times.items() if name != "flatness"}
    if their_rows:
        ratios["curvlinops, row blocks"] = their_rows / own_rows
    print(
        "ratio: flatness is faster by "
        + (", ".join(f"{r:.1f} ({name})" for name, r in ratios.items()) or "no peer here")
    )
    return {"seconds": times | {"row blocks": own_rows}, "errors": errors, "times faster than": ratios}


if __name__ == "__main__":
    given = arguments(__doc__, cpu=500, cuda=5_000)
    run(given.device, given.samples)
