"""What measuring must leave as it was: the model, its gradients and hooks, the data, and the process."""

import random
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

import flatness


def snapshot(model, *tensors):
    """Everything as comparable values, by name; tensors as copies together with their identity."""
    state = {}
    for name, module in model.named_modules():
        state[name, "attributes"] = sorted(vars(module))
        state[name, "training"] = module.training
        state[name, "simple"] = {
            k: v for k, v in vars(module).items() if isinstance(v, (int, float, str, bool))
        }
        state[name, "hooks"] = {
            k: list(v) for k, v in vars(module).items() if "hooks" in k and isinstance(v, dict)
        }
        state[name, "submodules"] = [id(child) for child in module.children()]
    for kind, found in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, value in found:
            state[kind, name] = (id(value), value.requires_grad, value.dtype, value.device, _copy(value))
            state[kind, name, "gradient"] = (
                None if value.grad is None else (id(value.grad), _copy(value.grad))
            )
    for index, tensor in enumerate(tensors):
        state["data", index] = (id(tensor), tensor.requires_grad, _copy(tensor))
    return state | _process()


def _process():
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": np.random.get_state()[1].tobytes(),  # noqa: NPY002
        "python": random.getstate(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "precision": torch.backends.mkldnn.matmul.fp32_precision,
        "default dtype": torch.get_default_dtype(),
    }


def _copy(value):
    if isinstance(value, nn.parameter.UninitializedParameter) or value.is_meta:
        return None
    return value.detach().cpu().clone().contiguous().flatten().view(torch.uint8).numpy().tobytes()


@contextmanager
def untouched(model, *tensors):
    """Assert that a block, whether it ends well or with an exception, changes nothing."""
    before = snapshot(model, *tensors)
    try:
        yield
    finally:
        after = snapshot(model, *tensors)
        assert before.keys() == after.keys()
        assert [key for key in before if before[key] != after[key]] == []


def refusal(error, model, data, *arguments, **options):
    """The whole message with which `flatness.measure` refuses; nothing may have changed."""
    options.setdefault("progress", False)
    tensors = (
        [part for part in data if isinstance(part, torch.Tensor)] if isinstance(data, (tuple, list)) else []
    )
    watched = model if isinstance(model, nn.Module) else nn.Module()
    with untouched(watched, *tensors), pytest.raises(error) as caught:
        flatness.measure(model, data, *arguments, **options)
    assert isinstance(caught.value, flatness.FlatnessError)
    assert type(caught.value) is error
    return str(caught.value)
