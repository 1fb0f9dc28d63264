"""What does every measure of the catalogue cost together, and what does each cost alone?

A trained LeNet-5 on CIFAR-10 images: `measures="all"` in one call, then each measure that takes more than the
shared pass on its own. Measures that share passes share them, so the sum of the parts is more than the whole.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from harness import machine, show

import flatness
from flatness.zoo import data as datasets
from flatness.zoo.models import build


def trained(x, y, epochs):
    """A LeNet-5 after some epochs of Adam."""
    torch.manual_seed(0)
    model = build("lenet5").to(x.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        order = torch.randperm(len(x), device=x.device)
        for part in order.split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
    return model.eval()


def seconds(model, data, measures):
    if data[0].is_cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    report = flatness.measure(model, data, measures=measures, progress=False)
    return time.perf_counter() - started, report


def run(device, samples):
    loaded = datasets.load("cifar10", limit=samples)
    x = torch.as_tensor(loaded.inputs).to(device)
    y = torch.as_tensor(loaded.targets).to(device)
    model = trained(x, y, 20)
    seconds(model, (x[:200], y[:200]), "all")  # warm up
    total, report = seconds(model, (x, y), "all")
    rows = [("all, in one call", f"{total:.1f} s", f"{len(report.results)} rows")]
    default, _ = seconds(model, (x, y), "default")
    rows.append(("default, in one call", f"{default:.1f} s", ""))
    costs = {
        measure.name: seconds(model, (x, y), measure.name)[0]
        for measure in flatness.measures()
        if not measure.one_pass
    }
    rows += [(name, f"{cost:.1f} s", "") for name, cost in sorted(costs.items(), key=lambda item: -item[1])]
    show(f"LeNet-5, {samples:,} images ({machine(device)})", ("measures", "time", ""), rows)
    print(f"\nratio: all together {total:.1f} s, one by one {sum(costs.values()):.1f} s")
    for note in report.notes:
        print("note:", note)
    for row in report.results:
        if not row.converged:
            print("not converged:", row)
    return {"all": total, "default": default, **costs}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=2000)
    given = parser.parse_args()
    run(torch.device(given.device), given.samples)
