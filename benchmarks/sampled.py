"""How long until the trace of every layer's Hessian, and of the whole network's, is known to 1 %?

Networks are trained before they are measured: LeNet-5 and ResNet-18 on CIFAR-10 (FLATNESS_DATA says where it
lies), a small transformer with GELU, layer norm and softmax attention on scikit-learn's digits. The true
values are flatness's exact ones in float64 for the piecewise-linear two, and the dense Hessian of
tests/oracle.py for the transformer.

Every contender's error is measured at a small budget and carried to 1 %: as 1/√k for Hutchinson and for
BackPACK's Monte Carlo, with the slope seen between two budgets (at least 1/√k) for Hutch++ and XTrace. Peers
that multiply by one layer's Hessian at a time get for each layer the products that this layer needs. The
error of a contender is that of its worst layer, as a root mean square over repetitions.

    PYTHONPATH=src python benchmarks/sampled.py --network lenet5
    PYTHONPATH=src:carry/peers python benchmarks/sampled.py --network resnet18 --device cuda

Answers are kept in --store and not computed again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import duration, full_precision, machine, peer, seconds, show
from torch import Tensor, nn

import flatness
from flatness.data import load
from flatness.models import lenet5, resnet18

GOAL = 0.01
Traces = dict[str, float]


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


def errors(found: list[Traces], true: Traces) -> Traces:
    """Root mean square of relative errors, by name."""
    return {
        key: math.sqrt(sum((one[key] / true[key] - 1) ** 2 for one in found) / len(found))
        for key in true
        if key in found[0]
    }


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


class Products:
    """Traces from products with one parameter's Hessian at a time, by a peer's own estimator."""

    def __init__(
        self, make: Callable[[list[str]], Callable[[int, int], float]], device: torch.device
    ) -> None:
        self.make, self.device = make, device

    def hutchinson(self, names: list[str], true: float, probes: int) -> float:
        """Seconds to the goal, from the scatter of single probes."""
        estimate = self.make(names)
        estimate(1, 0)
        values = []
        taken = seconds(lambda: values.extend(estimate(1, 1 + seed) for seed in range(probes)), self.device)
        variance = sum((value / true - 1) ** 2 for value in values) / len(values)
        return taken / probes * max(1.0, variance / GOAL**2)

    def steep(self, names: list[str], true: float, budgets: tuple[int, int], repeats: int) -> float:
        """Seconds to the goal, from the errors at two budgets."""
        estimate = self.make(names)
        seen = []
        for budget in budgets:
            values: list[float] = []
            taken = seconds(
                lambda budget=budget, values=values: values.extend(
                    estimate(budget, s) for s in range(repeats)
                ),
                self.device,
            )
            seen.append((math.sqrt(sum((v / true - 1) ** 2 for v in values) / repeats), taken / repeats))
        (first, _), (second, time_second) = seen
        slope = math.log(max(first, 1e-12) / max(second, 1e-12)) / math.log(budgets[1] / budgets[0])
        slope = min(max(slope, 0.5), 2.0)
        return time_second * max(1.0, second / GOAL) ** (1 / slope) if second > GOAL else time_second

    def all(self, model: nn.Module, true: Traces, one: Callable[[list[str], float], float]) -> Any:
        layers = sum(one([name], true[name]) for name in true if name != "network")
        return {"layers": layers, "network": one([n for n, _ in model.named_parameters()], true["network"])}


def contenders(
    model: nn.Module, x: Tensor, y: Tensor, true: Traces, device: torch.device, small: bool
) -> dict[str, Callable[[], Any]]:
    probes, budgets, repeats = (6, (9, 27), 2) if small else (4, (9, 18), 1)
    size = len(x) if small else 250
    batches = list(zip(x.split(size), y.split(size), strict=True))
    named = dict(model.named_parameters())
    found: dict[str, Callable[[], Any]] = {
        "flatness, auto": lambda: by_flatness(model, x, y, true, device, "auto"),
        "flatness, sampled": lambda: by_flatness(model, x, y, true, device, "sampled"),
    }
    # The network's trace is known far better than each layer's: for it alone fewer probes do.
    found["flatness, precision 0.1"] = lambda: by_flatness(model, x, y, true, device, "auto", 0.1)
    curvlinops = peer("curvlinops")
    if curvlinops is not None:

        def curved(estimator: Any) -> Callable[[list[str]], Callable[[int, int], float]]:
            def make(names: list[str]) -> Callable[[int, int], float]:
                operator = curvlinops.HessianLinearOperator(
                    model, nn.CrossEntropyLoss(), [named[name] for name in names], batches,
                    check_deterministic=False, num_data=len(x),
                )  # fmt: skip

                def estimate(budget: int, seed: int) -> float:
                    torch.manual_seed(seed)
                    return float(estimator(operator, budget))

                return estimate

            return make

        by_h = Products(curved(curvlinops.hutchinson_trace), device)
        found["curvlinops, Hutchinson"] = lambda: by_h.all(
            model, true, lambda names, t: by_h.hutchinson(names, t, probes)
        )
        for label, estimator in (("Hutch++", curvlinops.hutchpp_trace), ("XTrace", curvlinops.xtrace)):
            by = Products(curved(estimator), device)
            # XTrace wants even budgets, Hutch++ multiples of three.
            chosen = (10, 30 if small else 20) if label == "XTrace" else budgets
            found[f"curvlinops, {label}"] = lambda by=by, chosen=chosen: by.all(
                model, true, lambda names, t: by.steep(names, t, chosen, repeats)
            )
    eigenthings = peer("hessian_eigenthings")
    if eigenthings is not None:

        def thing(names: list[str]) -> Callable[[int, int], float]:
            loss = eigenthings.supervised_loss(F.cross_entropy)
            chosen = eigenthings.match_names(*names)
            operator = eigenthings.HessianOperator(model, batches, loss, param_filter=chosen)
            return lambda budget, seed: float(
                eigenthings.hutch_plus_plus(operator, num_matvecs=budget, seed=seed).estimate
            )

        by_thing = Products(thing, device)
        found["hessian-eigenthings, Hutch++"] = lambda: by_thing.all(
            model, true, lambda names, t: by_thing.steep(names, t, budgets, 1)
        )
    pyhessian = peer("pyhessian")
    if pyhessian is not None:

        def power(names: list[str]) -> Callable[[int, int], float]:
            for name, parameter in named.items():
                parameter.requires_grad_(name in names)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                one = {"data": batches[0]} if len(batches) == 1 else {"dataloader": batches}
                operator = pyhessian.hessian(model, nn.CrossEntropyLoss(), cuda=x.is_cuda, **one)

            def estimate(budget: int, seed: int) -> float:
                torch.manual_seed(seed)
                # A tolerance of 0: its own stopping rule ends when the running mean stalls.
                return sum(operator.trace(maxIter=budget, tol=0)) / budget

            return estimate

        def run_pyhessian() -> Any:
            by = Products(power, device)
            try:
                return by.all(model, true, lambda names, t: by.hutchinson(names, t, probes))
            finally:
                for parameter in named.values():
                    parameter.requires_grad_(True)
                model.zero_grad()

        found["PyHessian, trace"] = run_pyhessian
    backpack = peer("backpack")
    if backpack is not None:
        for label in ("DiagGGNMC", "DiagHessian"):
            found[f"BackPACK, {label}"] = lambda label=label: by_backpack(
                backpack, label, model, batches, true, device
            )
    return found


def by_backpack(
    backpack: Any, label: str, model: nn.Module, batches: Any, true: Traces, device: torch.device
) -> Any:
    """BackPACK's diagonals: one Monte Carlo sample of the label, or the exact Hessian diagonal."""
    import copy

    from backpack import extensions

    extended = backpack.extend(copy.deepcopy(model), use_converter=not isinstance(model, nn.Sequential))
    loss = backpack.extend(nn.CrossEntropyLoss(reduction="mean"))
    field = {"DiagGGNMC": "diag_ggn_mc", "DiagHessian": "diag_h"}[label]
    samples = sum(len(part) for part, _ in batches)
    owners = {id(b): a for (a, _), b in zip(model.named_parameters(), extended.parameters(), strict=True)}

    def estimate() -> Traces:
        total = dict.fromkeys(owners.values(), 0.0)
        for x, y in batches:
            with warnings.catch_warnings(), backpack.backpack(getattr(extensions, label)()):
                warnings.simplefilter("ignore")
                loss(extended(x), y).backward()
            for parameter in extended.parameters():
                total[owners[id(parameter)]] += float(getattr(parameter, field).sum()) * len(x) / samples
                delattr(parameter, field)
                parameter.grad = None
        return {key: total[key] for key in true if key != "network"} | {"network": sum(total.values())}

    found: list[Traces] = []
    estimate()
    repeats = 6 if label == "DiagGGNMC" else 1
    taken = seconds(lambda: found.extend(estimate() for _ in range(repeats)), device) / repeats
    error = errors(found, true)
    worst = max(value for key, value in error.items() if key != "network")
    random = label == "DiagGGNMC"
    note = f"worst layer {worst:.2%} after {duration(taken)}"
    if not random and worst > GOAL:
        return {"note": note + ": not the Hessian's"}
    return {
        "layers": taken * (max(1.0, (worst / GOAL) ** 2) if random else 1.0),
        "network": taken * (max(1.0, (error["network"] / GOAL) ** 2) if random else 1.0),
        "note": note,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="lenet5", choices=("lenet5", "resnet18", "transformer"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--store", default="sampled-results.json")
    parser.add_argument("--only", nargs="+", default=[""], help="contenders whose names contain one of these")
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
    for name, run in contenders(model, x, y, answers["truth"], device, small).items():
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
    text = lambda value: duration(value) if value is not None else "–"  # noqa: E731
    show(
        f"Seconds to 1 %: {key}, risk {answers['risk']:.3g}",
        ("", "every layer", "network", ""),
        [
            (name, text(run.get("layers")), text(run.get("network")), run.get("note", ""))
            for name, run in runs.items()
        ],
    )
    own = [run for name, run in runs.items() if name.startswith("flatness") and "layers" in run]
    others = [run for name, run in runs.items() if not name.startswith("flatness") and "layers" in run]
    if own and others:
        ratios = {
            what: min(r[what] for r in others) / min(r[what] for r in own) for what in ("layers", "network")
        }
        print(f"ratio: {ratios['layers']:.3g} times faster than the best peer for all layers, "
              f"{ratios['network']:.3g} for the network (bar 20 for the layers of ResNet-18)")  # fmt: skip


if __name__ == "__main__":
    main()
