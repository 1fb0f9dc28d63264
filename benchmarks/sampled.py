"""How long until the trace of every layer's Hessian, and of the whole network's, is known to 1 %?

Networks are trained before they are measured: LeNet-5 and ResNet-18 on CIFAR-10 (FLATNESS_DATA says where it
lies), a small transformer with GELU, layer norm and softmax attention on scikit-learn's digits. The true
values are flatness's exact ones in float64 for the piecewise-linear two, and the dense Hessian of
tests/oracle.py for the transformer.

Every contender's error is measured at a small budget and carried to 1 %: as 1/√k for Hutchinson and for
BackPACK's Monte Carlo, with the slope seen between two budgets (at least 1/√k) for Hutch++ and XTrace. Peers
that multiply by one layer's Hessian at a time get for each layer the products that this layer needs. The
error of a contender is that of its worst layer, as a root mean square over repetitions.

With --cap PyHessian and BackPACK go on until they are at 1 % or have used so many seconds; then the table
says what they reached, and what 1/√k would make of it stands beside it as such.

    PYTHONPATH=src python benchmarks/sampled.py --network lenet5
    PYTHONPATH=src:carry/peers python benchmarks/sampled.py --network resnet18 --device cuda --cap 45 \
        --only "flatness, auto" PyHessian BackPACK

Answers are kept in --store and not computed again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import duration, full_precision, machine, seconds, show
from sampled_peers import GOAL, Traces, errors, peers
from torch import Tensor, nn

import flatness
from flatness.zoo.data import load
from flatness.zoo.models import lenet5, resnet18

# Networks


class SmallTransformer(nn.Module):
    """One block of attention and one of GELU on eight tokens of eight pixels."""

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.place = nn.Linear(8, width, bias=False)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(len(x), 8, 8)
        ones = torch.eye(8, dtype=x.dtype, device=x.device).expand(len(x), 8, 8)
        h = self.embed(tokens) + self.place(ones)
        a = self.norm1(h)
        q, k, v = self.query(a), self.key(a), self.value(a)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        h = h + self.out(weights @ v)
        h = h + self.narrow(F.gelu(self.wide(self.norm2(h))))
        return self.head(h.mean(1))


def cifar(samples: int, device: torch.device) -> tuple[Tensor, Tensor]:
    data = load("cifar10", split="train", limit=samples, standardize=True)
    return data.inputs.to(device), data.targets.to(device)


def digits(device: torch.device) -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.data / 16, dtype=torch.float32, device=device), torch.tensor(
        found.target, device=device
    )


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, rate: float, size: int) -> nn.Module:
    model.train()
    steps = epochs * (len(x) // size)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for part in torch.randperm(len(x), generator=generator).to(x.device).split(size)[: len(x) // size]:
            optimizer.zero_grad()
            F.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
            schedule.step()
    model.zero_grad()
    return model.eval()


def problem(name: str, device: torch.device, samples: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A trained network and the samples to measure on; trained once, then read from a file."""
    torch.manual_seed(0)
    model, (x, y) = {
        "lenet5": lambda: (lenet5(seed=0), cifar(10_000, device)),
        "resnet18": lambda: (resnet18(seed=0), cifar(50_000, device)),
        "transformer": lambda: (SmallTransformer(), digits(device)),
    }[name]()
    file = Path(f"sampled-{name}.pt")
    model = model.to(device)
    if file.exists():
        model.load_state_dict(torch.load(file, weights_only=True, map_location=device))
    else:
        epochs, rate, size = {
            "lenet5": (6, 0.05, 128),
            "resnet18": (8, 0.1, 512),
            "transformer": (60, 0.1, 64),
        }[name]
        train(model, x, y, epochs, rate, size)
        torch.save(model.state_dict(), file)
    return model.eval(), x[:samples], y[:samples]


# Truth


def weights_of(model: nn.Module) -> list[str]:
    kinds = (nn.Linear, nn.Conv2d)
    return [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, kinds)]


def truth(name: str, model: nn.Module, x: Tensor, y: Tensor) -> Traces:
    """Tr H of every layer by the name of its weight, and of all parameters as "network"."""
    import copy

    double, x = copy.deepcopy(model).double(), x.double()
    if name == "transformer":
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
        import oracle

        risk = oracle.mean_risk(x.cpu(), y.cpu(), F.cross_entropy)
        double = double.cpu()
        found = {
            key: float(oracle.hessian(double, risk, [key]).trace()) for key, _ in double.named_parameters()
        }
        return {key: found[key] for key in weights_of(model)} | {"network": sum(found.values())}
    report = flatness.measure(double, (x, y), measures="hessian_trace", method="exact", progress=False)
    layers = {f"{layer}.weight": report.value("hessian_trace", layer=layer) for layer in report.layers()}
    return layers | {"network": report.value("hessian_trace", layer=None, reduction=None)}


# Contenders: seconds to the goal for the layers (the worst counts, or all in turn) and for the network


def by_flatness(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    true: Traces,
    device: torch.device,
    method: str,
    precision: float = GOAL,
) -> Any:
    found: list[Traces] = []
    taken = []
    for seed in range(4):
        report: list[Any] = []

        def run(seed: int = seed, report: list[Any] = report) -> None:
            report.append(
                flatness.measure(
                    model,
                    (x, y),
                    measures="hessian_trace",
                    method=method,
                    precision=precision,
                    seed=seed,
                    progress=False,
                )
            )

        taken.append(seconds(run, device))
        rows = {
            f"{layer}.weight": report[0].value("hessian_trace", layer=layer) for layer in report[0].layers()
        }
        found.append(rows | {"network": report[0].value("hessian_trace", layer=None, reduction=None)})
    error = errors(found, true)
    worst = max(value for key, value in error.items() if key != "network")
    best = min(taken[1:])
    return {
        "layers": best * max(1.0, (worst / GOAL) ** 2),
        "network": best * max(1.0, (error["network"] / GOAL) ** 2),
        "note": f"{best:.3g} s a run, worst layer {worst:.2%}, network {error['network']:.2%}",
    }


def own(
    model: nn.Module, x: Tensor, y: Tensor, true: Traces, device: torch.device
) -> dict[str, Callable[[], Any]]:
    return {
        "flatness, auto": lambda: by_flatness(model, x, y, true, device, "auto"),
        "flatness, sampled": lambda: by_flatness(model, x, y, true, device, "sampled"),
        # The network's trace is known far better than each layer's: for it alone fewer probes do.
        "flatness, precision 0.1": lambda: by_flatness(model, x, y, true, device, "auto", 0.1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="lenet5", choices=("lenet5", "resnet18", "transformer"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--store", default="sampled-results.json")
    parser.add_argument("--only", nargs="+", default=[""], help="contenders whose names contain one of these")
    parser.add_argument("--cap", type=float, help="seconds that PyHessian and BackPACK get each")
    parser.add_argument("--seconds", type=float, default=450, help="start no contender after this long")
    given = parser.parse_args()
    started = time.monotonic()
    device = torch.device(given.device)
    full_precision()
    samples = given.samples or {"lenet5": 500, "resnet18": 1000, "transformer": 300}[given.network]
    store = Path(given.store)
    kept = json.loads(store.read_text()) if store.exists() else {}
    key = f"{given.network}, n = {samples}, {machine(device)}"
    answers: dict[str, Any] = kept.setdefault(key, {})

    def keep() -> None:
        store.write_text(json.dumps(kept, indent=1))

    model, x, y = problem(given.network, device, samples)
    if "truth" not in answers:
        answers["truth"] = truth(given.network, model, x, y)
        answers["risk"] = float(F.cross_entropy(model(x), y).detach())
        keep()
    small = given.network != "resnet18"
    found = own(model, x, y, answers["truth"], device)
    found |= peers(model, x, y, answers["truth"], device, small, given.cap)
    for name, run in found.items():
        wanted = any(part in name for part in given.only)
        if name in answers or not wanted or time.monotonic() - started > given.seconds:
            continue
        try:
            answers[name] = run()
        except Exception as error:  # a peer that cannot do this network is an answer too
            answers[name] = {"note": f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"}
        print(name, answers[name], flush=True)
        keep()
    tell(key, answers)


def tell(key: str, answers: dict[str, Any]) -> None:
    runs = {name: value for name, value in answers.items() if isinstance(value, dict) and name != "truth"}

    def text(run: dict[str, Any], what: str) -> str:
        if what in run:
            return duration(run[what])
        return f"> {duration(run['cap'])}" if "cap" in run else "–"

    show(
        f"Seconds to 1 %: {key}, risk {answers['risk']:.3g}",
        ("", "every layer", "network", ""),
        [
            (name, text(run, "layers"), text(run, "network"), run.get("note", ""))
            for name, run in runs.items()
        ],
    )
    for what in ("layers", "network"):
        own = [run[what] for name, run in runs.items() if name.startswith("flatness") and what in run]
        others = {name: run for name, run in runs.items() if not name.startswith("flatness")}
        reached = {name: run[what] for name, run in others.items() if what in run}
        # What a peer that did not get there has used at least.
        used = {name: run["cap"] for name, run in others.items() if what not in run and "cap" in run}
        bar = " (bar 20 on ResNet-18)" if what == "layers" else ""
        if own and reached:
            best = min(reached, key=reached.__getitem__)
            print(f"{what}: {reached[best] / min(own):.3g} times faster than {best}{bar}")
        for name, seconds_used in used.items() if own else ():
            print(f"{what}: more than {seconds_used / min(own):.3g} times faster than {name}")


if __name__ == "__main__":
    main()
