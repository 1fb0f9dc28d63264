"""What a model consists of, by name: as torch's own iterators say, which take several times as long.

They are asked a few dozen times for every measurement, of models of hundreds of modules.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """`model.named_modules()`: every module once, each before its submodules."""
    if type(model).named_modules is not nn.Module.named_modules:
        return list(model.named_modules())
    found: list[tuple[str, nn.Module]] = [("", model)]
    _add_below(model, "", found, {model})
    return found


def _add_below(
    module: nn.Module, prefix: str, found: list[tuple[str, nn.Module]], seen: set[nn.Module]
) -> None:
    for key, child in module._modules.items():
        if child is not None and child not in seen:
            if type(child).named_modules is not nn.Module.named_modules:
                found.extend(child.named_modules(seen, prefix + key))
                continue
            seen.add(child)
            found.append((prefix + key, child))
            if child._modules:
                _add_below(child, f"{prefix}{key}.", found, seen)


def modules(model: nn.Module) -> list[nn.Module]:
    """`model.modules()`."""
    return [module for _, module in named_modules(model)]


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """`model.named_parameters()`: every parameter once, under its first name."""
    if type(model).named_parameters is not nn.Module.named_parameters:
        return dict(model.named_parameters())
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for name, module in named_modules(model):
        if not module._parameters:
            continue
        prefix = f"{name}." if name else ""
        for key, value in module._parameters.items():
            if value is not None and id(value) not in seen:
                seen.add(id(value))
                found[prefix + key] = value
    return found


def parameters(model: nn.Module) -> list[nn.Parameter]:
    """`model.parameters()`."""
    return list(named_parameters(model).values())


def buffers(model: nn.Module) -> list[Tensor]:
    """`model.buffers()`: every buffer once."""
    if (
        type(model).buffers is not nn.Module.buffers
        or type(model).named_buffers is not nn.Module.named_buffers
    ):
        return list(model.buffers())
    held = (value for module in modules(model) if module._buffers for value in module._buffers.values())
    return list({id(value): value for value in held if value is not None}.values())


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold a tensor's numbers: itself, or what a sparse one consists of; none of others."""
    if tensor.layout is torch.strided:
        return [] if tensor.is_nested else [tensor]
    held = tensor.detach()
    if held.layout is torch.sparse_coo:
        return [held._indices(), held._values()]
    if held.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [held.crow_indices(), held.col_indices(), held.values()]
    if held.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [held.ccol_indices(), held.row_indices(), held.values()]
    return []
