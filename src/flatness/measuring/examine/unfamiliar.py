"""Modules whose code is not torch's: do they compute what their class says, for all samples and weights?

A layer is measured as z = WΦ + b. A subclass with a forward of its own, a replaced forward or a hook may
compute that for some samples only, for the weight's present values only (a mask over entries that are zero),
or with other derivatives (a detached weight). So it is tried with other weights, and on all of the data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules import module as torch_module

from flatness.network import attention
from flatness.network.affine import AffineModule
from flatness.network.layers import Layer
from flatness.network.memory import ran_out
from flatness.problem import batches
from flatness.problem.problem import Problem

View = Layer | AffineModule
# Where code is that is known: torch's modules, the projections of opened attention, and GPT-2's Conv1D.
_TORCH = os.path.dirname(nn.modules.__file__) + os.sep
_CONV1D = os.sep + os.path.join("transformers", "pytorch_utils.py")
# What a module calls on itself, and a user may replace in one module.
_CALLED = ("forward", "_conv_forward", "_call_impl", "_wrapped_call_impl")


def is_familiar(view: View) -> bool:
    """Whether what the module computes is known: no own code, no hook on its output, no replaced method.

    Such modules are taken at their word. Their features can be large: patches of a video, for one.
    """
    module = view.module
    kind = type(module)
    known = all(_is_known(getattr(kind, name)) for name in _CALLED if hasattr(kind, name))
    replaced = any(name in vars(module) for name in _CALLED)
    hooked = module._forward_hooks or torch_module._global_forward_hooks
    return known and not replaced and not hooked


def _is_known(method: Any) -> bool:
    # The file, not the name: a decorated method may bear the name of the one it replaces.
    code = getattr(method, "__code__", None)
    file = "" if code is None else code.co_filename
    return file.startswith(_TORCH) or file == attention.__file__ or file.endswith(_CONV1D)


@contextmanager
def held_against_views(
    views: Mapping[str, View], agrees: Callable[[View, Any, Any, Tensor, Tensor], bool]
) -> Iterator[list[str]]:
    """A context in which every call of some modules is looked at, and the names of those that disagree.

    Args:
        views: The modules, as they are seen.
        agrees: Called with the view, what its module was called with, without and by name, its input and its
            output; what it calls itself is not looked at.
    """
    misread: list[str] = []

    def hook(name: str, view: View) -> Any:
        def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if name in misread:
                return
            misread.append(name)
            x: Any = args[0] if args else kwargs.get("input")
            both = isinstance(x, Tensor) and isinstance(output, Tensor)
            if both and agrees(view, args, kwargs, x, output):
                misread.remove(name)

        return view.module.register_forward_hook(check, with_kwargs=True)

    with ExitStack() as hooks:
        for name, view in views.items():
            hooks.enter_context(hook(name, view))
        yield misread


def follows_weights(view: View, args: tuple[Any, ...], kwargs: dict[str, Any], z: Tensor) -> bool:
    """Whether a module computes what its view says with other weights too, and with those derivatives.

    For z affine in the parameters θ, z(θ′) − z(θ) is the derivative at θ′ along θ′ − θ. Weights that are made
    from other parameters are left as they are.

    Args:
        view: How the module is seen.
        args: What it is called with.
        kwargs: What it is called with by name.
        z: What it returns.
    """
    own = {
        key: value for key in ("weight", "bias") if (value := view.module._parameters.get(key)) is not None
    }
    if "weight" not in own:
        return True
    moved = {key: _elsewhere(value) for key, value in own.items()}
    try:
        with torch.enable_grad(), held_against_views({view.name: view}, _explained_alone) as misread:
            given, named = batches.map_tensors((args, kwargs), lambda tensor: tensor.detach().clone())
            there = functional_call(view.module, moved, given, named)
            signal = _elsewhere(torch.zeros_like(z)).detach()
            slopes = torch.autograd.grad(there, list(moved.values()), signal, materialize_grads=True)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        if ran_out(error):
            raise
        return False
    steps = [moved[key].detach() - value.detach() for key, value in own.items()]
    pairs = zip(slopes, steps, strict=True)
    along = sum(float((slope * step).sum(dtype=torch.float64)) for slope, step in pairs)
    there = there.detach()
    change = float((signal * (there - z)).sum(dtype=torch.float64))
    size = float((signal.abs() * (there.abs() + z.abs())).sum(dtype=torch.float64))
    return not misread and abs(along - change) <= torch.finfo(z.dtype).eps ** 0.5 * size


def _explained_alone(view: View, args: Any, kwargs: Any, x: Tensor, z: Tensor) -> bool:
    return view.explains(x.detach(), z.detach(), 1)


def _elsewhere(value: Tensor) -> Tensor:
    """Other numbers of the same size; made on the device, as a weight may be large."""
    held = value.detach()
    waves = torch.arange(1, held.numel() + 1, device=held.device, dtype=torch.float32).mul_(0.7).cos_()
    size = held.square().mean().sqrt().clamp(min=1e-2)
    return (held + waves.to(held.dtype).reshape(held.shape) * size).requires_grad_()


def misread_samples(problem: Problem, views: Mapping[str, View]) -> list[str]:
    """Unfamiliar modules that do not compute what their view says for all of the data: one forward pass.

    Args:
        problem: The model, data and loss.
        views: The modules to look at; without unfamiliar ones there is no pass.
    """
    unfamiliar = {name: view for name, view in views.items() if not is_familiar(view)}
    if not unfamiliar:
        return []
    samples = 0

    def step(batch: Any) -> None:
        nonlocal samples
        samples = batches.size_of(batch)
        with torch.no_grad():
            problem.outputs(batch)

    def explained(view: View, args: Any, kwargs: Any, x: Tensor, z: Tensor) -> bool:
        return view.explains(x, z, samples)

    with held_against_views(unfamiliar, explained) as misread:
        problem.stream(step, "layers")
    return misread
