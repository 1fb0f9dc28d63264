"""How much faster do many networks train together than one after another?

LeNet-5 on images of CIFAR-10's shape that lie on the device, SGD, cross-entropy, float32. A turn is a number
of steps of every network; the throughput counts steps of single networks. Contenders: the stack of
`flatness.study` in each of its ways of running; one network after another as one usually writes it; and,
on a GPU, one network after another with the whole step recorded as a CUDA graph, and with --compile the stack
under torch.compile. Before anything is timed, a network of the stack is checked against the same
trained alone.

    PYTHONPATH=src python benchmarks/study_training.py --device cuda
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from harness import close, full_precision, machine, race, show
from torch import Tensor

from flatness.study.training.optimizers import SGD
from flatness.study.training.program import Program
from flatness.study.training.stack import Stack, usual_engine
from flatness.zoo.models import lenet5

SAMPLES, RATE = 10_000, 0.02


def data(device: torch.device, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 3, 32, 32, generator=generator).to(device)
    return x, torch.randint(10, (samples,), generator=generator).to(device)


def order(networks: int, batch: int, steps: int, device: torch.device) -> Tensor:
    """Samples of every step of every network, (steps, networks, batch): each network has its own."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(SAMPLES, (steps, networks, batch), generator=generator).to(device)


def stacked(engine: str, networks: int, x: Tensor, y: Tensor, compiled: bool = False) -> Program:
    models = [lenet5(seed=seed) for seed in range(networks)]
    stack = Stack(models, x.device, engine)
    if compiled:
        stack.forward = torch.compile(stack.forward)  # type: ignore[method-assign]
    settings = {
        name: torch.full((networks, 1), value)
        for name, value in (("learning_rate", RATE), ("momentum", 0.0), ("weight_decay", 0.0))
    }
    return Program(stack, SGD(settings, stack.flat, {}), x, y, "cross_entropy")


def train_stacked(program: Program, indices: Tensor) -> None:
    for index in indices:
        program.step(index)


def train_in_tf32(program: Program, indices: Tensor) -> None:
    """As a study trains by default: factors rounded to ten bits, everything else float32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    train_stacked(program, indices)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def train_one_by_one(models: list[Any], optimizers: list[Any], x: Tensor, y: Tensor, indices: Tensor) -> None:
    for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        for index in indices[:, i]:
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()


def graphed_one_by_one(networks: int, x: Tensor, y: Tensor, batch: int) -> Callable[[Tensor], None]:
    """One network after another, each step a replay of one CUDA graph; weights are swapped in between."""
    model = lenet5(seed=0).to(x.device)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    others = [[p.detach().clone() for p in lenet5(seed=s).to(x.device).parameters()] for s in range(networks)]
    static = torch.zeros(batch, dtype=torch.int64, device=x.device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x[static]), y[static]).backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    @torch.no_grad()
    def train(indices: Tensor) -> None:
        for i, weights in enumerate(others):
            torch._foreach_copy_(list(model.parameters()), weights)
            for index in indices[:, i]:
                static.copy_(index)
                graph.replay()
            torch._foreach_copy_(weights, list(model.parameters()))

    return train


def check(x: Tensor, y: Tensor, batch: int, engine: str) -> None:
    """A stack of three takes the steps of its second network alone."""
    indices = order(3, batch, 8, x.device)
    program = stacked(engine, 3, x, y)
    train_stacked(program, indices)
    model = lenet5(seed=1).to(x.device)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    train_one_by_one([model], [optimizer], x, y, indices[:, 1:2])
    close(engine, program.stack.weights(1)["fc3.weight"], model.get_submodule("fc3").weight, 1e-3)


def contenders(
    networks: int, batch: int, steps: int, x: Tensor, y: Tensor, compiled: bool
) -> dict[str, Callable[[], Any]]:
    indices = order(networks, batch, steps, x.device)
    models = [lenet5(seed=seed).to(x.device) for seed in range(networks)]
    optimizers = [torch.optim.SGD(model.parameters(), RATE) for model in models]
    found: dict[str, Callable[[], Any]] = {
        "one after another": lambda: train_one_by_one(models, optimizers, x, y, indices)
    }
    engines = ("channels_last", "grouped", "banded") if x.is_cuda else ("looped", "grouped")
    for engine in engines:
        program = stacked(engine, networks, x, y)
        found[f"stack, {engine}"] = lambda program=program: train_stacked(program, indices)
    if x.is_cuda:
        graphed = graphed_one_by_one(networks, x, y, batch)
        found["one after another, CUDA graph"] = lambda: graphed(indices)
        rounded = stacked("banded", networks, x, y)
        found["stack, banded, TF32"] = lambda: train_in_tf32(rounded, indices)
        if compiled:
            program = stacked("grouped", networks, x, y, compiled=True)
            found["stack, grouped, compiled"] = lambda: train_stacked(program, indices)
    return found


def run(device: torch.device, networks: int, batch: int, steps: int, compiled: bool) -> dict[str, float]:
    full_precision()
    x, y = data(device)
    for engine in ("grouped", "banded"):
        check(x, y, batch, engine)
    # On a GPU the stack records its graph during the turn that warms up.
    times = race(contenders(networks, batch, max(steps, 5), x, y, compiled), device, turns=5, budget=30.0)
    single = times["one after another"].best
    rate = {name: networks * max(steps, 5) / t.best for name, t in times.items()}
    show(
        f"Training {networks} LeNet-5 together, batch {batch} ({machine(device)})",
        ("", "network-steps per second", "images per second", "times one after another"),
        [
            (name, f"{rate[name]:,.0f}", f"{rate[name] * batch:,.0f}", f"{single / t.best:.2f}")
            for name, t in times.items()
        ],
    )
    ours = {name: t.best for name, t in times.items() if name.startswith("stack")}
    usual = f"stack, {usual_engine(lenet5(), device)}"
    best = min(ours, key=ours.__getitem__) if device.type == "cuda" else usual
    ratios = {"one after another": single / ours[best]}
    if "one after another, CUDA graph" in times:
        ratios["CUDA graph"] = times["one after another, CUDA graph"].best / ours[best]
    told = ", ".join(f"{value:.2f} times {name}" for name, value in ratios.items())
    print(f"ratio at batch {batch} with {networks} networks: {best} has {told}")
    return ratios


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--networks", type=int)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--steps", type=int, help="of every network, per turn")
    parser.add_argument("--compile", action="store_true", help="also time the stack under torch.compile")
    given = parser.parse_args()
    place = torch.device(given.device)
    gpu = place.type == "cuda"
    bars = {64: 12.0, 512: 4.0}
    networks, steps = given.networks or (100 if gpu else 4), given.steps or (20 if gpu else 2)
    for size in given.batches:
        found = run(place, networks, size, steps, given.compile)
        if gpu and size in bars:
            verdict = "met" if found["one after another"] >= bars[size] else "missed"
            print(f"bar of {bars[size]:g} at batch {size}: {verdict}")
