"""Experts of a mixture that the first samples do not reach: samples that do are looked for in the data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flatness.measuring.examine.examined import Examined
from flatness.problem import batches
from flatness.problem.problem import Problem

_FOUND = "looking for samples of every expert"


def unreached_experts(model: nn.Module, examined: Examined) -> list[str]:
    """Layers that did not run though their counterparts in other items of the same list of modules did."""
    lists = [(f"{name}." if name else "", module) for name, module in model.named_modules()]
    lists = [(prefix, m) for prefix, m in lists if isinstance(m, (nn.ModuleList, nn.ModuleDict))]

    def has_counterpart(name: str) -> bool:
        for prefix, items in lists:
            if name.startswith(prefix):
                _, dot, inner = name.removeprefix(prefix).partition(".")
                others = (f"{prefix}{key}{dot}{inner}" for key, _ in items.named_children())
                if any(other in examined.recorded for other in others):
                    return True
        return False

    return [name for name in examined.unused if has_counterpart(name)]


def with_samples_of(problem: Problem, example: Any, names: list[str]) -> Any | None:
    """The example together with samples that reach these layers; None where the data has none.

    One pass over the data, and a few samples of a batch in which a layer runs for the first time.

    Args:
        problem: The model, data and loss.
        example: The first samples.
        names: The layers.
    """
    wanted, found = set(names), [example]

    def step(batch: Any) -> None:
        while wanted and (reached := _reached(problem, batch, wanted)):
            sample = _first_that_reaches(problem, batch, next(name for name in names if name in reached))
            wanted.difference_update(_reached(problem, sample, wanted))
            if _alike(example, sample):
                found.append(batches.copied(sample))

    problem.stream(step, _FOUND)
    return _joined(found) if len(found) > 1 else None


def _reached(problem: Problem, batch: Any, names: set[str]) -> set[str]:
    """Which of these layers run for a batch."""
    with _noting(problem.model, names) as reached, torch.no_grad():
        problem.outputs(batch)
    return reached


@contextmanager
def _noting(model: nn.Module, names: set[str]) -> Iterator[set[str]]:
    reached: set[str] = set()
    with ExitStack() as hooks:
        for name in names:
            module = model.get_submodule(name)
            hooks.enter_context(module.register_forward_pre_hook(lambda *_, name=name: reached.add(name)))
        yield reached


def _first_that_reaches(problem: Problem, batch: Any, name: str) -> Any:
    """The first sample of a batch for which a layer runs, by halving: every sample goes its own way."""
    first, last = 0, batches.size_of(batch)
    while last - first > 1:
        middle = (first + last) // 2
        if _reached(problem, batches.rows(batch, first, middle), {name}):
            last = middle
        else:
            first = middle
    return batches.rows(batch, first, last)


def _alike(example: Any, sample: Any) -> bool:
    """Whether samples can stand in one batch: those of another length cannot."""
    pairs = zip(batches.tensors_in(example), batches.tensors_in(sample), strict=False)
    return all(one.shape[1:] == other.shape[1:] for one, other in pairs)


def _joined(parts: list[Any]) -> Any:
    """One batch of several; what is no row per sample stays as in the first."""
    rows = [iter(list(batches.tensors_in(part))) for part in parts]
    n = batches.size_of(parts[0])

    def join(_: Tensor) -> Tensor:
        own = [next(tensors) for tensors in rows]
        return torch.cat(own) if own[0].dim() and len(own[0]) == n else own[0]

    return batches.map_tensors(parts[0], join)
