"""What other libraries take until traces of Hessians are known to 1 %; `sampled.py` asks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from harness import duration, peer, seconds
from torch import Tensor, nn

GOAL = 0.01
Traces = dict[str, float]
# BackPACK's diagonals, and where it leaves them. The exact Gauss-Newton one is the Hessian's for networks
# that are piecewise linear after every layer.
FIELDS = {"DiagGGNMC": "diag_ggn_mc", "DiagGGNExact": "diag_ggn_exact", "DiagHessian": "diag_h"}
# Estimates that a scatter is taken from, at least.
_FEWEST = 4


def errors(found: list[Traces], true: Traces) -> Traces:
    """Root mean square of relative errors, by name."""
    return {
        key: math.sqrt(sum((one[key] / true[key] - 1) ** 2 for one in found) / len(found))
        for key in true
        if key in found[0]
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

    def until(self, model: nn.Module, true: Traces, cap: float) -> Any:
        """One probe of every layer and of the network in turn, until all are at the goal or time is up."""
        targets = {"network": [name for name, _ in model.named_parameters()]}
        targets |= {key: [key] for key in true if key != "network"}
        estimates = {key: self.make(names) for key, names in targets.items()}
        values: dict[str, list[float]] = {key: [] for key in targets}
        spent = dict.fromkeys(targets, 0.0)
        left = set(targets)
        while left and sum(spent.values()) < cap:
            for key in [key for key in targets if key in left]:
                seed = len(values[key])
                spent[key] += seconds(
                    lambda key=key, seed=seed: values[key].append(estimates[key](1, seed)), self.device
                )
                if len(values[key]) >= _FEWEST and _error(values[key], true[key]) <= GOAL:
                    left.discard(key)
                if sum(spent.values()) >= cap:
                    break
        return _reached(values, spent, true, left, cap)

    def all(self, model: nn.Module, true: Traces, one: Callable[[list[str], float], float]) -> Any:
        layers = sum(one([name], true[name]) for name in true if name != "network")
        return {"layers": layers, "network": one([n for n, _ in model.named_parameters()], true["network"])}


def peers(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    true: Traces,
    device: torch.device,
    small: bool,
    cap: float | None,
) -> dict[str, Callable[[], Any]]:
    """What each library does, by name; those that are not installed are left out."""
    probes, budgets, repeats = (6, (9, 27), 2) if small else (4, (9, 18), 1)
    size = len(x) if small else 250
    batches = list(zip(x.split(size), y.split(size), strict=True))
    named = dict(model.named_parameters())
    found: dict[str, Callable[[], Any]] = {}
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
                for name, parameter in named.items():
                    parameter.requires_grad_(name in names)
                # A tolerance of 0: its own stopping rule ends when the running mean stalls.
                return sum(operator.trace(maxIter=budget, tol=0)) / budget

            return estimate

        def run_pyhessian() -> Any:
            by = Products(power, device)
            try:
                if cap is not None:
                    return by.until(model, true, cap)
                return by.all(model, true, lambda names, t: by.hutchinson(names, t, probes))
            finally:
                for parameter in named.values():
                    parameter.requires_grad_(True)
                model.zero_grad()

        found["PyHessian, trace"] = run_pyhessian
    backpack = peer("backpack")
    if backpack is not None:
        # Exact diagonals keep all output directions of all samples at once.
        short = list(zip(x.split(50), y.split(50), strict=True))
        for label in FIELDS:
            found[f"BackPACK, {label}"] = lambda label=label: by_backpack(
                backpack, label, model, batches if label == "DiagGGNMC" or small else short, true, device, cap
            )
    return found


def by_backpack(
    backpack: Any,
    label: str,
    model: nn.Module,
    batches: Any,
    true: Traces,
    device: torch.device,
    cap: float | None,
) -> Any:
    """BackPACK's diagonals, with one label drawn per sample or exact, until the goal or the cap."""
    import copy

    from backpack import extensions

    # Blocks with a shortcut are no modules that BackPACK knows: its converter takes the network apart.
    known = all(type(part).__module__.startswith("torch.nn") for part in model.modules())
    extended = backpack.extend(copy.deepcopy(model), use_converter=not known)
    loss = backpack.extend(nn.CrossEntropyLoss(reduction="mean"))
    field = FIELDS[label]
    samples = sum(len(part) for part, _ in batches)
    owners = {id(b): a for (a, _), b in zip(model.named_parameters(), extended.parameters(), strict=True)}

    def one(x: Tensor, y: Tensor, total: Traces) -> None:
        with warnings.catch_warnings(), backpack.backpack(getattr(extensions, label)()):
            warnings.simplefilter("ignore")
            loss(extended(x), y).backward()
        for parameter in extended.parameters():
            total[owners[id(parameter)]] += float(getattr(parameter, field).sum()) * len(x) / samples
            delattr(parameter, field)
            parameter.grad = None

    limit = math.inf if cap is None else cap
    most = 1 if label != "DiagGGNMC" else (6 if cap is None else 10**6)
    one(batches[0][0][:2], batches[0][1][:2], dict.fromkeys(owners.values(), 0.0))
    found: list[Traces] = []
    taken = 0.0
    while len(found) < most and taken < limit:
        total = dict.fromkeys(owners.values(), 0.0)
        for number, (x, y) in enumerate(batches):
            taken += seconds(lambda x=x, y=y, total=total: one(x, y, total), device)
            if taken >= limit and number + 1 < len(batches) and not found:
                return {"cap": cap, "note": f"{number + 1} of {len(batches)} batches within the cap"}
        found.append({key: total[key] for key in true if key != "network"} | {"network": sum(total.values())})
        if cap is not None and len(found) >= _FEWEST and max(_errors(found, true).values()) <= GOAL:
            break
    return _told(found, taken, true, label, cap)


def _told(found: list[Traces], taken: float, true: Traces, label: str, cap: float | None) -> Any:
    if label != "DiagGGNMC":
        worst = max(value for key, value in errors(found, true).items() if key != "network")
        note = f"worst layer {worst:.2%}"
        return {"layers": taken, "network": taken, "note": note} if worst <= GOAL else {
            "note": f"{note} after {duration(taken)}: not the Hessian's"
        }  # fmt: skip
    each = taken / len(found)
    single = errors(found, true)
    worst = max(value for key, value in single.items() if key != "network")
    note = f"one pass {duration(each)}, worst layer {worst:.2%}; carried to 1 % as 1/√k"
    answer: dict[str, Any] = {
        "layers": each * max(1.0, (worst / GOAL) ** 2),
        "network": each * max(1.0, (single["network"] / GOAL) ** 2),
        "note": note,
    }
    if cap is None:
        return answer
    reached = _errors(found, true)
    carried = {key: answer[key] for key in ("layers", "network")}
    values = {
        "layers": max(value for key, value in reached.items() if key != "network"),
        "network": reached["network"],
    }
    over = [key for key, value in values.items() if value > GOAL]
    return {
        **{key: carried[key] for key in carried if key not in over},
        **({"cap": cap} if over else {}),
        "note": f"after {len(found)} passes, {duration(taken)}: worst layer {values['layers']:.2%}, network "
        f"{values['network']:.2%}; 1/√k would take {duration(carried['layers'])} and "
        f"{duration(carried['network'])}",
    }


def _error(values: list[float], true: float) -> float:
    """Relative standard error of the mean of these estimates, from their scatter around the truth."""
    return math.sqrt(sum((value / true - 1) ** 2 for value in values) / len(values) / len(values))


def _errors(found: list[Traces], true: Traces) -> Traces:
    return {key: _error([one[key] for one in found], true[key]) for key in true if key in found[0]}


def _reached(
    values: dict[str, list[float]], spent: Traces, true: Traces, left: set[str], cap: float
) -> dict[str, Any]:
    """Seconds to the goal where it was reached, else what was reached within the cap."""
    layers = [key for key in values if key != "network"]
    reached = {key: _error(found, true[key]) for key, found in values.items() if found}
    carried = {key: spent[key] * max(1.0, (reached[key] / GOAL) ** 2) for key in reached}
    answer: dict[str, Any] = {}
    if not left & set(layers):
        answer["layers"] = sum(spent[key] for key in layers)
    if "network" not in left:
        answer["network"] = spent["network"]
    if left:
        answer["cap"] = cap
    fewest = min(len(found) for found in values.values())
    worst = max((reached[key] for key in layers if key in reached), default=math.nan)
    of_layers = duration(sum(carried[key] for key in layers if key in carried))
    answer["note"] = (
        f"at least {fewest} probes: worst layer {worst:.2%}, network {reached['network']:.2%}; 1/√k would "
        f"take {of_layers} for the layers and {duration(carried['network'])} for the network"
    )
    return answer
