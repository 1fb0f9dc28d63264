"""Does the norm of the Riemannian Hessian notice a rescaling? Tables 2 and 3 of Rangamani et al. 2019.

Networks F_1 and C_1 of their Table 1, 500 random samples in R^784 with random labels, and both settings of λ.
As in the
paper: float32 and the power method. Beside it: float64 and Lanczos. And the Euclidean Hessian, which does
    notice.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

import flatness
from flatness.models import rangamani2019_c1, rangamani2019_f1

SAMPLES = 500
TABLES = (
    ("F_1", rangamani2019_f1, (784,), ("fc1", "fc2", "fc3"), (5, 4, 1 / 20), "1.7e-07"),
    ("F_1", rangamani2019_f1, (784,), ("fc1", "fc2", "fc3"), (100, 30, 1 / 3000), "7.17e-07"),
    (
        "C_1",
        rangamani2019_c1,
        (1, 28, 28),
        ("conv1", "conv2", "fc1", "fc2", "fc3"),
        (5, 4, 3, 2, 1 / 120),
        "1.28e-07",
    ),
    (
        "C_1",
        rangamani2019_c1,
        (1, 28, 28),
        ("conv1", "conv2", "fc1", "fc2", "fc3"),
        (50, 24, 30, 1 / 6, 1 / 6000),
        "5.1e-06",
    ),
)


def trained(build, x, y, steps=30):
    """A few full-batch steps towards a minimum: the paper does not say how far it trained."""
    model = build(seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model


def difference(model, changed, data, dtype, **arguments):
    """|σ − σ′| / σ before and after the rescaling."""
    values = [
        flatness.network_spectrum(network, data, dtype=dtype, **arguments).largest
        for network in (model, changed)
    ]
    return abs(values[0] - values[1]) / values[0]


def main() -> None:
    torch.manual_seed(0)
    heads = f"{'network':8} {'λ':34} {'paper':>9} {'float32, power':>15}"
    print(f"{heads} {'float64, Lanczos':>17} {'Euclidean':>10}")
    worst = 0.0
    for name, build, shape, layers, factors, paper in TABLES:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(SAMPLES, *shape, generator=generator)
        y = torch.randint(10, (SAMPLES,), generator=generator)
        model = trained(build, x, y)
        double = copy.deepcopy(model).double()
        given = dict(zip(layers, factors, strict=True))
        changed = flatness.rescale(model, x[:4], factors=given)
        changed_double = flatness.rescale(double, x[:4], factors=given)
        power = {"metric": "layerwise", "solver": "power", "max_products": 2000}
        lanczos = {"metric": "layerwise", "tolerance": 1e-9}
        single = difference(model, changed, (x, y), torch.float32, **power)
        exact = difference(double, changed_double, (x, y), torch.float64, **lanczos)
        euclidean = difference(double, changed_double, (x, y), torch.float64, tolerance=1e-9)
        shown = ", ".join(f"{factor:.4g}" for factor in factors)
        print(f"{name:8} {shown:34} {paper:>9} {single:15.2e} {exact:17.2e} {euclidean:10.2e}")
        worst = max(worst, single / float(paper))
    print(f"\nlargest ratio of our float32 difference to the paper's: {worst:.2f}")


if __name__ == "__main__":
    main()
