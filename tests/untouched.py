"""What measuring must leave as it was: the model, its gradients and hooks, the data, and the process."""

import random
import signal
from collections import deque
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
        state[name, "contents"] = {key: content(value) for key, value in vars(module).items()}
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


def content(value, outer=()):
    """A value as something that can be compared: what it is, and what it holds, all the way down."""
    if id(value) in outer or isinstance(value, nn.Module):
        return id(value)
    outer = (*outer, id(value))
    if isinstance(value, nn.parameter.UninitializedParameter):
        return id(value)
    if isinstance(value, torch.Tensor):
        return id(value), tuple(value.shape), value.requires_grad, _copy(value)
    if isinstance(value, np.ndarray):
        return id(value), value.shape, value.tobytes()
    if isinstance(value, torch.Generator):
        return id(value), value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return id(value), str(value.bit_generator.state)
    if isinstance(value, random.Random):
        return id(value), value.getstate()
    if isinstance(value, dict):
        return id(value), [(repr(key), content(held, outer)) for key, held in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return id(value), [content(held, outer) for held in value]
    if isinstance(value, set):
        return id(value), sorted(map(repr, value))
    if hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        return id(value), content(vars(value), outer)
    slots = getattr(type(value), "__slots__", ())
    if slots and not callable(value):
        return id(value), [(name, content(getattr(value, name, None), outer)) for name in slots]
    return value if isinstance(value, (int, float, str, bool, type(None))) else id(value)


def _process():
    hooks = vars(nn.modules.module)
    cuda = torch.backends.cuda
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": np.random.get_state()[1].tobytes(),  # noqa: NPY002
        "python": random.getstate(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled("cpu"), torch.set_autocast_enabled],
        "precision": [
            backend.fp32_precision
            for backend in (
                cuda.matmul,
                torch.backends.cudnn.conv,
                torch.backends.cudnn.rnn,
                torch.backends.mkldnn.matmul,
                torch.backends.mkldnn.conv,
            )
        ],
        "attention": [
            torch.backends.mha.get_fastpath_enabled(),
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
            cuda.math_sdp_enabled(),
        ],
        "modes": [torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()],
        "vmap": torch._C._functorch.get_dynamic_layer_stack_depth(),
        "global hooks": {name: list(hooks[name]) for name in hooks if name.endswith("hooks")},
        "threads": torch.get_num_threads(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
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
