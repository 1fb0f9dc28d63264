"""One sample run alone: what its layers see then, and which modules do not compute what their class says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from flatness.measuring.examine.probe import first_sample
from flatness.measuring.examine.unfamiliar import follows_weights, is_familiar
from flatness.network.affine import AffineModule
from flatness.network.layers import Layer
from flatness.problem.problem import Problem


@dataclass
class Alone:
    """What the first sample shows when it runs alone.

    Attributes:
        logits: Its output, laid out as predictions.
        inputs: The inputs that modules saw, by name, call by call.
        misread: Modules whose output is not what their view says.
    """

    logits: Tensor
    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    misread: list[str] = field(default_factory=list)


def run_alone(
    problem: Problem, example: Any, views: Mapping[str, Layer | AffineModule], *, copy_inputs: bool = False
) -> Alone:
    """Run the first sample of the example, and hold every module's output against its view.

    Inputs that the network overwrites later on are not what modules saw: with such, it is run once more.

    Args:
        problem: The model, data and loss.
        example: A few samples.
        views: The modules to look at.
        copy_inputs: Whether to copy what they see.
    """
    inputs: dict[str, list[Tensor]] = {}
    versions: list[tuple[Tensor, int]] = []
    misread: list[str] = []

    def hook(name: str, view: Layer | AffineModule) -> Any:
        familiar = is_familiar(view)
        # The size of a transposed convolution's output is an argument of the call.
        known = isinstance(view, Layer) and familiar and not isinstance(view.module, _ConvTransposeNd)
        own = dict(view.module._parameters)
        nested = False

        def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            nonlocal nested
            if nested:
                return
            x = args[0] if args else kwargs.get("input")
            if isinstance(x, Tensor) and _is_transformed(x):
                misread.append(name)
            elif isinstance(x, Tensor) and isinstance(output, Tensor):
                if any(module._parameters.get(key) is not value for key, value in own.items()):
                    misread.append(name)  # torch.func.functional_call: it runs with other weights
                copied = copy_inputs or x.is_inference()
                inputs.setdefault(name, []).append(x.detach().clone() if copied else x.detach())
                if not copied:
                    versions.append((inputs[name][-1], x._version))
                if known or name in misread:
                    return
                nested = True
                fine = view.explains(x, output, 1)
                if not fine or not (familiar or follows_weights(view, args, kwargs, output)):
                    misread.append(name)
                nested = False

        return check

    made = {name: hook(name, view) for name, view in views.items()}
    handles = [
        view.module.register_forward_hook(made[name], with_kwargs=True) for name, view in views.items()
    ]
    try:
        # The example's targets have been looked at already.
        items = first_sample(problem, example, look=False)
    finally:
        for handle in handles:
            handle.remove()
    if any(x._version != version for x, version in versions):
        return run_alone(problem, example, views, copy_inputs=True)
    return Alone(items.logits, inputs, misread)


def _is_transformed(x: Tensor) -> bool:
    """Whether a tensor belongs to `torch.func`: it stands for one sample, or carries a derivative along."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)  # type: ignore[attr-defined]
