"""How many Hessian products do Lanczos and the paper's power method need? Figure 1 of rangamani2019.

Network F_1 of the paper, 500 random samples in R^784 with random labels, the norm of the Riemannian Hessian.
Both start from the same vector. Counted are the products until the value is within 1e-6 of the converged one,
and stays there. `--figure FILE` draws the course of both.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F

import flatness
from flatness.show.charts import Chart, Mark
from flatness.show.plots.charts import save_chart
from flatness.zoo.models import rangamani2019_f1

SAMPLES = 500


def trained(x, y, steps):
    model = rangamani2019_f1(seed=0).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def settled(history, value, tolerance=1e-6):
    """Products after which the course stays within the tolerance."""
    close = [abs(one - value) <= tolerance * abs(value) for one in history]
    return len(close) - next((i for i, fine in enumerate(reversed(close)) if not fine), len(close)) + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figure")
    given = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 784, generator=generator, dtype=torch.float64)
    y = torch.randint(10, (SAMPLES,), generator=generator)
    ratios = []
    print(f"{'training steps':>15} {'norm':>10} {'Lanczos':>9} {'power':>7} {'ratio':>6}   products to 1e-6")
    for steps in (10, 30, 100):
        model = trained(x, y, steps)
        truth = flatness.network_spectrum(model, (x, y), metric="layerwise", tolerance=1e-10)
        courses = {}
        for solver, tolerance in (("lanczos", 1e-7), ("power", 1e-7)):
            found = flatness.network_spectrum(
                model, (x, y), metric="layerwise", solver=solver, tolerance=tolerance, max_products=3000
            )
            courses[solver] = found.history
        lanczos, power = (settled(courses[solver], truth.largest) for solver in ("lanczos", "power"))
        ratios.append(power / lanczos)
        print(f"{steps:15d} {truth.largest:10.4g} {lanczos:9d} {power:7d} {ratios[-1]:6.1f}")
        if given.figure and steps == 30:
            errors = {
                "Lanczos": [abs(v / truth.largest - 1) for v in courses["lanczos"]],
                "power method": [abs(v / truth.largest - 1) for v in courses["power"]],
            }
            # Errors below 1e-12 are rounding, and drawn there.
            series = {
                name: [Mark(product, max(error, 1e-12)) for product, error in enumerate(course, 1)]
                for name, course in errors.items()
            }
            title = "rangamani2019, Figure 1: network F_1"
            labels = "products with the Hessian", "relative error"
            save_chart(given.figure, Chart(title, *labels, series, joined=True, scales=("linear", "log")))
    print(f"\nthe power method needs at least {min(ratios):.1f} times the products of Lanczos")


if __name__ == "__main__":
    main()
