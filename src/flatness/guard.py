"""Before and after: checks that a model can be measured, and the promise that it comes back as it was."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

from flatness.errors import ModelError, NotFiniteError, listed


def unwrap(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """The model inside DataParallel, DistributedDataParallel and torch.compile, and a note about each."""
    notes: list[str] = []
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            notes.append(f"unwrapped {type(model).__name__}")
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            notes.append("unwrapped torch.compile")
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model, notes


def check_model(model: object) -> None:
    """Refuse what cannot be measured, with the reason."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"Expected a torch.nn.Module but got {type(model).__name__}. Pass the model itself, with its weights loaded.")
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError("Expected an eager torch.nn.Module but got a TorchScript module, whose layers cannot be recorded. Pass the model before scripting.")
    if any(type(module).__module__.split(".")[0] == "peft" for module in model.modules()):
        raise ModelError(
            "Expected plain layers but got a PEFT model, whose adapters change what a layer's weight is. "
            "Call model.merge_and_unload() and measure the merged model."
        )
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ModelError(f"Expected a model with parameters but {type(model).__name__} has none.")
    _check_kinds(parameters)
    _check_batch_norm(model)
    _check_finite(parameters)


def _check_kinds(parameters: dict[str, nn.Parameter]) -> None:
    lazy = [name for name, value in parameters.items() if isinstance(value, UninitializedParameter)]
    if lazy:
        raise ModelError(f"Expected initialised parameters but got lazy ones: {listed(lazy)}. Run one forward pass first.")
    meta = [name for name, value in parameters.items() if value.is_meta]
    if meta:
        raise ModelError(f"Expected parameters with values but got meta tensors: {listed(meta)}. Load the weights first.")
    odd = [f"{name} ({value.dtype})" for name, value in parameters.items() if not value.is_floating_point()]
    if odd:
        raise ModelError(
            f"Expected real floating-point parameters but got {listed(odd)}. "
            "Second derivatives of complex or integer parameters are not defined here; dequantise or use a real model."
        )


def _check_batch_norm(model: nn.Module) -> None:
    without = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.running_mean is None]
    if without:
        raise ModelError(
            f"Expected batch norm with running statistics but got none in {listed(without)}: there each sample's output depends on its "
            "batch, and a loss per sample does not exist. Train with track_running_stats=True, or set running_mean and running_var."
        )


def _check_finite(parameters: dict[str, nn.Parameter]) -> None:
    flags = torch.stack([value.detach().isfinite().all().cpu() for value in parameters.values()])
    if not bool(flags.all()):
        broken = [name for name, fine in zip(parameters, flags.tolist(), strict=True) if not fine]
        raise NotFiniteError(
            f"Expected finite weights but got NaN or infinity in {listed(broken)}. Training diverged, or the checkpoint is damaged."
        )


def converted(model: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
    """The model itself when nothing is to change, else a copy on that device and in that dtype."""
    sample = next(model.parameters())
    if (device is None or sample.device == device) and (dtype is None or sample.dtype == dtype):
        return model
    try:
        duplicate = copy.deepcopy(model)
    except Exception as error:
        raise ModelError(
            f"Expected a model that copy.deepcopy can copy, as device= and dtype= work on a copy, but got: {error}. "
            "Convert the model yourself and leave device and dtype out."
        ) from error
    return duplicate.to(device=device, dtype=dtype)


@contextmanager
def measuring(model: nn.Module, seed: int) -> Iterator[None]:
    """Evaluation mode, full float32 precision and a seeded generator inside; everything as it was outside.

    Modes of all modules, buffers, the random state and the TF32 switches are restored, also after an exception. Parameters,
    their gradients and `requires_grad` are never written to.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer._version, buffer.detach().clone()) for buffer in model.buffers()]
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        model.eval()
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            torch.manual_seed(seed)
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, version, value in buffers:
                if buffer._version != version:
                    buffer.copy_(value)
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32
