"""Which derivatives of a function written in Python a backward pass is asked for."""

from __future__ import annotations

from typing import Any

import torch


def asked(context: Any) -> list[bool]:
    """For every input, whether the pass that runs now goes on from it.

    `context.needs_input_grad` says which inputs require gradients in some pass. Torch's own operators know
    more: where `torch.autograd.grad` is asked for signals at hidden layers they leave gradients of weights
    out.
    """
    nodes = (node for node, _ in context.next_functions if node is not None)
    return [needed and _runs(next(nodes)) for needed in context.needs_input_grad]


def _runs(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # what torch says about a leaf that torch.autograd.grad was asked for
        return True
