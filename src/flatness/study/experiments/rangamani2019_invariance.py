"""rangamani2019, Tables 2 and 3: does the spectral norm of the Hessian notice a rescaling of the layers?

Networks F_1 and C_1 of Table 1, 500 random samples with random labels, and layers multiplied by factors whose
product is 1. On the quotient manifold the norm stays, up to rounding; in the Euclidean metric it does not.
The paper works in float32 with its power method; beside that stand float64 and Lanczos.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flatness.errors import SpecError, nearest
from flatness.measuring.spectra import network_spectrum
from flatness.study.experiments.experiment import Experiment, Row, positive, whole
from flatness.symmetry.rewriting.rescaling import rescale
from flatness.zoo.models import MODELS, build

NETWORKS = (
    {"model": "rangamani2019_f1", "shape": [784], "factors": [[5, 4], [100, 30]]},
    {"model": "rangamani2019_c1", "shape": [1, 28, 28], "factors": [[5, 4, 3, 2], [50, 24, 30, 1 / 6]]},
)
"""The paper's networks and factors; the last layer's is the inverse of the product of the others."""

PUBLISHED = {
    ("rangamani2019_f1", (5, 4)): 1.7e-7,
    ("rangamani2019_f1", (100, 30)): 7.17e-7,
    ("rangamani2019_c1", (5, 4, 3, 2)): 1.28e-7,
    ("rangamani2019_c1", (50, 24, 30, 1 / 6)): 5.1e-6,
}
"""The relative differences that Tables 2 and 3 print."""

_CLASSES = 10
_POWER = {"metric": "layerwise", "solver": "power", "max_products": 2000}
_LANCZOS = {"tolerance": 1e-9}


def _trained(unit: Mapping[str, Any], x: Tensor, y: Tensor) -> nn.Module:
    """Full-batch steps of Adam towards a minimum: the paper does not say how far it trained."""
    model = build(unit["model"], **unit["options"], seed=unit["seed"])
    optimizer = torch.optim.Adam(model.parameters(), lr=unit["learning_rate"])
    for _ in range(unit["steps"]):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model.eval()


def _work(unit: Mapping[str, Any]) -> list[Row]:
    """Norms before and after, in the manner of the paper, in float64, and in the Euclidean metric."""
    generator = torch.Generator().manual_seed(unit["seed"])
    x = torch.randn(unit["samples"], *unit["shape"], generator=generator)
    y = torch.randint(_CLASSES, (unit["samples"],), generator=generator)
    model = _trained(unit, x, y)
    layers = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    factors = [*unit["factors"], 1 / math.prod(unit["factors"])]
    given = dict(zip(layers, factors, strict=True))
    pair, double = _pair(model, given, x), _pair(copy.deepcopy(model).double(), given, x.double())
    data = (x, y)
    before, after = _norms(pair, data, torch.float32, **_POWER)
    exact = _norms(double, data, torch.float64, metric="layerwise", **_LANCZOS)
    euclidean = _norms(double, data, torch.float64, **_LANCZOS)
    shown = ", ".join(f"{factor:.4g}" for factor in factors)
    row: Row = {"network": unit["model"], "factors": shown, "seed": unit["seed"]}
    row |= {"norm": before, "norm_after": after}
    row["published"] = PUBLISHED.get((unit["model"], tuple(unit["factors"])))
    for name, (one, other) in (
        ("difference", (before, after)),
        ("difference_float64", exact),
        ("difference_euclidean", euclidean),
    ):
        row[name] = abs(one - other) / one
    return [row]


def _pair(model: nn.Module, factors: Mapping[str, float], x: Tensor) -> tuple[nn.Module, nn.Module]:
    return model, rescale(model, x[:4], factors=dict(factors))


def _norms(pair: Sequence[nn.Module], data: Any, dtype: torch.dtype, **asked: Any) -> tuple[float, float]:
    one, other = (network_spectrum(net, data, dtype=dtype, progress=False, **asked).largest for net in pair)
    return one, other


def _units(options: Mapping[str, Any]) -> list[Row]:
    whole(options, "samples", "steps", "repetitions")
    positive(options, "learning_rate")
    shared = {name: options[name] for name in ("samples", "steps", "learning_rate")}
    seeds = range(options["seed"], options["seed"] + options["repetitions"])
    found = []
    if not options["networks"]:
        raise SpecError("Expected at least one network in [[experiment.networks]] but got an empty list.")
    for network in options["networks"]:
        _check(network)
        for factors in network["factors"]:
            for seed in seeds:
                own = {"options": {}, **network, "factors": list(factors), "seed": seed}
                found.append({**own, **shared})
    return found


def _check(network: Any) -> None:
    """Refuse a network that could not be built, or factors that do not fit its layers."""
    keys = ("model", "shape", "factors")
    if not isinstance(network, Mapping) or set(network) - {"options"} != set(keys):
        raise SpecError(
            f"Expected {', '.join(keys)} in [[experiment.networks]] but got {network!r}. For example "
            '{ model = "rangamani2019_f1", shape = [784], factors = [[5, 4]] }.'
        )
    if network["model"] not in MODELS:
        raise SpecError(
            f"Expected model in [[experiment.networks]] to be one of flatness.models but got "
            f"{network['model']!r}.{nearest(str(network['model']), MODELS)} Known: {', '.join(MODELS)}."
        )
    modules = build(network["model"], **network.get("options", {}), seed=0).modules()
    layers = sum(isinstance(module, (nn.Linear, nn.Conv2d)) for module in modules)
    for factors in network["factors"]:
        if len(factors) != layers - 1 or not all(factor > 0 for factor in factors):
            raise SpecError(
                f"Expected {layers - 1} positive factors for {network['model']}, for its layers but the "
                f"last, whose factor is the inverse of their product, but got {list(factors)}."
            )


def _summary(rows: Sequence[Row]) -> list[Row]:
    """A row per network and factors: the largest differences over the repetitions."""
    table: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        table.setdefault((row["network"], row["factors"]), []).append(row)
    return [
        {
            "rescaling": f"{network.removeprefix('rangamani2019_')}: {factors}",
            "n": len(own),
            "norm": sum(row["norm"] for row in own) / len(own),
            "published": own[0]["published"],
            **{
                name: max(row[name] for row in own)
                for name in ("difference", "difference_float64", "difference_euclidean")
            },
        }
        for (network, factors), own in table.items()
    ]


def _verdict(table: Sequence[Row]) -> str:
    worst = {name: max(row[f"difference{name}"] for row in table) for name in ("", "_float64", "_euclidean")}
    least = min(row["difference_euclidean"] for row in table)
    return (
        "The paper: differences of 1.3e-07 to 5.1e-06, so the norm on the manifold is invariant. Here at "
        f"most {worst['']:.1e} in float32 with the power method and {worst['_float64']:.1e} in float64 with "
        f"Lanczos; the Euclidean norm changes by {least:.1e} to {worst['_euclidean']:.1e}. All relative to "
        "the norm before."
    )


INVARIANCE = Experiment(
    name="rangamani2019_invariance",
    options={
        "networks": NETWORKS,
        "samples": 500,
        "steps": 30,
        "learning_rate": 1e-3,
        "repetitions": 5,
        "seed": 0,
    },
    scales={"smoke": {"samples": 100, "repetitions": 1}, "small": {"repetitions": 2}},
    counted="comparisons",
    units=_units,
    work=_work,
    summary=_summary,
    verdict=_verdict,
)
"""Tables 2 and 3 as a study."""
