"""Before and after: checks that a model can be measured, and the promise that it comes back as it was."""

from __future__ import annotations

import copy
import inspect
import math
import random
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

from flatness.attention import math_attention, open_attention
from flatness.autocast import Suppressed, autocast_off
from flatness.errors import ModelError, NotFiniteError, listed
from flatness.parts import buffers, modules, named_modules, named_parameters, parameters
from flatness.weight_normalization import plain_weight_norm


def unwrap(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """The model inside DataParallel, DistributedDataParallel, torch.compile and Lightning Fabric; notes."""
    notes: list[str] = []
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            notes.append(f"unwrapped {type(model).__name__}")
            model = model.module
        elif _is_compiled(model):
            notes.append("unwrapped torch.compile")
            model = model._orig_mod  # type: ignore[assignment]
        elif _is_of_fabric(model):
            notes.append("unwrapped Lightning Fabric")
            model = model._original_module  # type: ignore[assignment]
        else:
            return model, notes


def _is_of_fabric(module: nn.Module) -> bool:
    """Whether Lightning Fabric set the module up: then it casts inputs as only autocast understands."""
    package = type(module).__module__.split(".")[0]
    return type(module).__name__ == "_FabricModule" and package in ("lightning", "lightning_fabric")


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules


def check_model(model: object) -> None:
    """Refuse what cannot be measured, with the reason."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"Expected a torch.nn.Module but got {type(model).__name__}. Pass the model itself, with its "
            "weights loaded."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            "Expected an eager torch.nn.Module but got a TorchScript module, whose layers cannot be "
            "recorded. Pass the model before scripting."
        )
    if any(type(module).__module__.split(".")[0] == "peft" for module in modules(model)):
        raise ModelError(
            "Expected plain layers but got a PEFT model, whose adapters change what a layer's weight is. "
            "Call model.merge_and_unload() and measure the merged model."
        )
    parameters = named_parameters(model)
    if not parameters:
        raise ModelError(
            f"Expected a model with parameters but {type(model).__name__} has none. Pass the network whose "
            "weights were trained."
        )
    _check_kinds(parameters)
    _check_batch_norm(model)
    _check_finite(parameters)


def _check_kinds(parameters: dict[str, nn.Parameter]) -> None:
    lazy = [name for name, value in parameters.items() if isinstance(value, UninitializedParameter)]
    if lazy:
        raise ModelError(
            f"Expected initialised parameters but got lazy ones: {listed(lazy)}. Run one forward pass first."
        )
    meta = [name for name, value in parameters.items() if value.is_meta]
    if meta:
        raise ModelError(
            f"Expected parameters with values but got meta tensors: {listed(meta)}. Load the weights first."
        )
    sharded = [name for name, value in parameters.items() if hasattr(value, "full_tensor")]
    if sharded:
        raise ModelError(
            f"Expected whole parameters but got sharded ones (DTensor): {listed(sharded)}. "
            "Gather them into an unsharded copy of the model and measure that."
        )
    odd = [f"{name} ({value.dtype})" for name, value in parameters.items() if not value.is_floating_point()]
    if odd:
        raise ModelError(
            f"Expected real floating-point parameters but got {listed(odd)}. Second derivatives of complex "
            "or integer parameters are not defined here; dequantise or use a real model."
        )


def _check_batch_norm(model: nn.Module) -> None:
    norms = [(name, module) for name, module in named_modules(model) if isinstance(module, _BatchNorm)]
    without = [name or "the model itself" for name, module in norms if module.running_mean is None]
    if without:
        raise ModelError(
            f"Expected batch norm with running statistics but got none in {listed(without)}: there each "
            "sample's output depends on its batch, and a loss per sample does not exist. Train with "
            "track_running_stats=True, or set running_mean and running_var."
        )


def _check_finite(parameters: dict[str, nn.Parameter]) -> None:
    # Norms first, all in one call and one question to each device: NaN and infinity stay in a norm. Those of
    # large numbers may overflow.
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for value in parameters.values():
        if value.layout is not torch.strided or value.element_size() < 2:
            # Sparse ones and those of eight bits have no norm.
            kinds.setdefault((value.device, torch.float64), []).append(
                value.detach().sum(dtype=torch.float64)
            )
        elif value.numel():
            kinds.setdefault((value.device, value.dtype), []).append(value.detach())
    norms = (torch.stack(torch._foreach_norm(same)).sum(dtype=torch.float64) for same in kinds.values())
    if all(math.isfinite(float(norm)) for norm in norms):
        return
    broken = [name for name, value in parameters.items() if not bool(value.detach().isfinite().all())]
    if broken:
        raise NotFiniteError(
            f"Expected finite weights but got NaN or infinity in {listed(broken)}. "
            "Training diverged, or the checkpoint is damaged: measure an earlier one."
        )


def converted(model: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
    """The model itself when nothing is to change, else a copy on that device and in that dtype.

    Tensors made under `torch.inference_mode` cannot be differentiated through: such a model is copied too.

    Raises:
        ModelError: If the model cannot be copied, or has parameters of several types and none is asked for.
    """
    sample = next(model.parameters())
    types = {value.dtype for value in parameters(model)}
    if dtype is None and len(types) > 1:
        raise _several_types(model)
    same_device = device is None or (sample.device.type, sample.device.index or 0) == (
        device.type,
        device.index or 0,
    )
    inference = any(value.is_inference() for value in (*parameters(model), *buffers(model)))
    if same_device and (dtype is None or types == {dtype}) and not inference:
        return model
    _check_own_forward(model)
    try:
        with torch.inference_mode(False):
            duplicate = copy.deepcopy(model)
    except Exception as error:
        raise ModelError(
            "Expected a model that copy.deepcopy can copy, as device= and dtype= work on a copy, but got: "
            f"{error}. Convert the model yourself and leave device and dtype out."
        ) from error
    return duplicate.to(device=device, dtype=dtype)


def _several_types(model: nn.Module) -> ModelError:
    """The error about weights of several types, which do not meet in one product."""
    first: dict[torch.dtype, str] = {}
    for name, value in named_parameters(model).items():
        first.setdefault(value.dtype, name)
    widest = max(first, key=lambda kind: (torch.finfo(kind).bits, torch.finfo(kind).eps < 1e-2))
    kinds = [f"{str(kind).removeprefix('torch.')} ({name})" for kind, name in first.items()]
    return ModelError(
        f"Expected parameters of one floating-point type but got {listed(kinds)}. Pass dtype={widest}, which "
        "measures a copy of the model in that type."
    )


def _check_own_forward(model: nn.Module) -> None:
    """Refuse to copy a function that stands in for a forward: the copy's would still run the original."""
    replaced = [
        name or "the model itself"
        for name, module in named_modules(model)
        if isinstance(own := vars(module).get("forward"), FunctionType) and _knows_modules(own)
    ]
    if replaced:
        raise ModelError(
            "Expected a model that copy.deepcopy can copy, as device= and dtype= work on a copy, but got a "
            f"function in place of the forward of {listed(replaced)}, which would run the original. Convert "
            "the model yourself and leave device and dtype out."
        )


def _knows_modules(function: FunctionType) -> bool:
    """Whether a function holds anything, or reads a module or a method of one by a global name."""
    names = inspect.getclosurevars(function)
    owners = (getattr(value, "__self__", value) for value in names.globals.values())
    return bool(names.nonlocals) or any(isinstance(owner, nn.Module) for owner in owners)


@contextmanager
def measuring(model: nn.Module, seed: int) -> Iterator[Suppressed]:
    """Evaluation mode, gradients, full precision and seeded randomness inside; everything as it was outside.

    Attributes and modes of all modules, buffers, hooks, random states and precision switches are restored,
    also after an exception, and embeddings with a largest norm, which shorten themselves. Other parameters
    and all gradients are never written to. Backward hooks of the user do not run. Attention and weight
    normalisation run in plain operators, and `nn.MultiheadAttention` through its projections. Autocast is
    off, also where the model turns it on; what is yielded says whether it tried.
    """
    device = next(model.parameters()).device.type
    with ExitStack() as stack:
        # Inference mode first: buffers are copied and restored outside of it.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(_restored_modules(model))
        stack.enter_context(math_attention())
        open_attention(model)
        stack.enter_context(plain_weight_norm(model))
        stack.enter_context(_full_precision())
        stack.enter_context(_own_randomness(model, seed))
        for kind in dict.fromkeys(("cpu", device)):
            stack.enter_context(torch.autocast(kind, enabled=False))
        suppressed = stack.enter_context(autocast_off())
        if any(_is_compiled(module) or module._compiled_call_impl is not None for module in modules(model)):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.enable_grad())
        yield suppressed


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Parameters that all require gradients, so that the graph shows what reads them; set back afterwards."""
    frozen = [parameter for parameter in parameters(model) if not parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@contextmanager
def _restored_modules(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without backward hooks; attributes and buffers as before when it ends."""
    attributes = [(module, dict(vars(module))) for module in modules(model)]
    # Parameters, buffers, submodules and hooks live in dicts, one level deeper; what a network collects, in
    # these and in lists.
    values = [value for _, before in attributes for value in before.values()]
    dicts = [(value, dict(value)) for value in values if isinstance(value, dict)]
    lists = [(value, list(value)) for value in values if type(value) is list]
    tensors = [*buffers(model), *_shortened(model)]
    held = [(tensor, tensor._version, tensor.detach().clone()) for tensor in tensors]
    try:
        if not _switches_as_torch(attributes) or any(module.training for module, _ in attributes):
            model.eval()
        for module, _ in attributes:
            if module._backward_hooks or module._backward_pre_hooks:
                module._backward_hooks, module._backward_pre_hooks = OrderedDict(), OrderedDict()
        yield
    finally:
        for module, before in attributes:
            _set_back(vars(module), before)
        for entries, before in dicts:
            _set_back(entries, before)
        for items, before in lists:
            items[:] = before
        with torch.no_grad():
            for tensor, version, value in held:
                if tensor._version != version:
                    tensor.copy_(value)


def _shortened(model: nn.Module) -> list[torch.Tensor]:
    """Weights that a forward pass writes to: embeddings with a largest norm shorten the rows they look up."""
    embeddings = (module for module in modules(model) if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    return [module.weight for module in embeddings if module.max_norm is not None]


def _switches_as_torch(attributes: list[tuple[nn.Module, dict[str, Any]]]) -> bool:
    """Whether `train` and `eval` set nothing but `training`: neither a class nor a module has its own."""
    kinds = {type(module) for module, _ in attributes}
    if not all(kind.train is nn.Module.train and kind.eval is nn.Module.eval for kind in kinds):
        return False
    return not any("train" in own or "eval" in own for _, own in attributes)


def _set_back(entries: dict[str, Any], before: dict[str, Any]) -> None:
    if not before:
        # Most dicts of a module are empty: its hooks.
        if entries:
            entries.clear()
        return
    for key in [key for key in entries if key not in before]:
        del entries[key]
    for key, value in before.items():
        if key not in entries or entries[key] is not value:
            entries[key] = value


@contextmanager
def _full_precision() -> Iterator[None]:
    """No TensorFloat32 or bfloat16 inside float32 products.

    The switches of each backend are used, not `allow_tf32`: reading that one raises where the user set them.
    """
    backends: list[Any] = [
        torch.backends.cuda.matmul,
        torch.backends.cudnn.conv,  # type: ignore[attr-defined]
        torch.backends.cudnn.rnn,
        torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
        torch.backends.mkldnn.conv,  # type: ignore[attr-defined]
    ]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value


@contextmanager
def _own_randomness(model: nn.Module, seed: int) -> Iterator[None]:
    """Seeded random states of torch, Python and NumPy, set back afterwards; other devices are left alone."""
    devices = sorted({value.device.index or 0 for value in parameters(model) if value.device.type == "cuda"})
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (data sets of others draw from it)
    try:
        with torch.random.fork_rng(devices=devices):
            torch.default_generator.manual_seed(seed)
            for index in devices:
                torch.cuda.default_generators[index].manual_seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
