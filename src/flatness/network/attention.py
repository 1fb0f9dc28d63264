"""`nn.MultiheadAttention` opened: its projections called as modules, so that they are layers like any other.

Torch computes attention in one function: the query, key and value projections are thirds of one packed weight
and never run as modules, and hooks on ``out_proj`` do not fire. While a model is measured, every such module
computes the same through submodules ``q``, ``k``, ``v`` and ``out_proj``, samples first whatever its own
layout is. `flatness.guard` takes all of that off again.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_SEQUENCES = ("src", "tgt", "memory")


class Projection(nn.Module):
    """The query, key or value projection of an attention module; it owns no parameter.

    Args:
        owner: The attention module.
        key: Which of them: "q", "k" or "v".
        third: Its place, from 0, among those that are packed into one parameter.

    Attributes:
        weight_key: Name of the parameter that holds the weight, in the owner.
    """

    def __init__(self, owner: nn.MultiheadAttention, key: str, third: int) -> None:
        super().__init__()
        # In a tuple: the owner is not a submodule of its own part.
        self._owner = (owner,)
        self._packed = owner.in_proj_weight is not None
        self.weight_key = "in_proj_weight" if self._packed else f"{key}_proj_weight"
        self._rows = slice(third * owner.embed_dim, (third + 1) * owner.embed_dim)

    @property
    def weight(self) -> Tensor:
        """The weight, (d, m): a view of the parameter."""
        weight = cast(Tensor, getattr(self._owner[0], self.weight_key))
        return weight[self._rows] if self._packed else weight

    @property
    def bias(self) -> Tensor | None:
        """The bias, (d,), or None."""
        packed = cast("Tensor | None", self._owner[0].in_proj_bias)
        return None if packed is None else packed[self._rows]

    def forward(self, input: Tensor) -> Tensor:
        """Input (…, m) to (…, d)."""
        return F.linear(input, self.weight, self.bias)


def open_attention(model: nn.Module) -> None:
    """Open every `nn.MultiheadAttention` of a model; the caller sets modules back."""
    for module in list(model.modules()):
        if isinstance(module, nn.MultiheadAttention) and _is_stock(module, nn.MultiheadAttention):
            for third, key in enumerate("qkv"):
                module.add_module(key, Projection(module, key, third))
            vars(module)["forward"] = partial(_attend, module)
        for kind in _LAYERS:
            if isinstance(module, kind) and _is_stock(module, kind):
                vars(module)["forward"] = partial(_samples_first, module, module.forward)


def _is_stock(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether the module computes what torch wrote."""
    return type(module).forward is kind.forward and "forward" not in vars(module)


def stacked_projections(model: nn.Module) -> set[str]:
    """Names of the parameters that hold the query, key and value projections, one above the other."""
    own = [module for _, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    stacked = {id(value) for module in own for value in (module.in_proj_weight, module.in_proj_bias)}
    return {name for name, value in model.named_parameters() if id(value) in stacked}


def _samples_first(layer: nn.Module, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """A transformer layer on sequences (L, n, E), run as (n, L, E) inside: samples come first in its Linears.

    Masks do not depend on the layout.
    """
    given = inspect.signature(forward).bind(*args, **kwargs)
    sequences = {key: value for key, value in given.arguments.items() if key in _SEQUENCES}
    attention = [module for module in layer.children() if isinstance(module, nn.MultiheadAttention)]
    if attention[0].batch_first or any(x.dim() != 3 for x in sequences.values()):
        return forward(*args, **kwargs)
    given.arguments.update({key: value.transpose(0, 1) for key, value in sequences.items()})
    with ExitStack() as stack:
        for module in attention:
            stack.callback(setattr, module, "batch_first", False)
            module.batch_first = True
        return forward(*given.args, **given.kwargs).transpose(0, 1)


def _attend(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What `nn.MultiheadAttention.forward` computes, through the submodules q, k, v and out_proj."""
    samples = 0 if module.batch_first else 1
    single = query.dim() == 2
    if single:
        query, key, value = (sequence.unsqueeze(samples) for sequence in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    parts = cast(Any, module)
    given = ((parts.q, query), (parts.k, key), (parts.v, value))
    q, k, v = (projection(sequence.transpose(0, samples)) for projection, sequence in given)
    mask = _joined_mask(attn_mask, key_padding_mask, len(q), module.num_heads, q.dtype)
    k, v, mask = _extended(module, k, v, mask)
    q, k, v = (tensor.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for tensor in (q, k, v))
    mixed, weights = _mixed(q, k, v, mask, need_weights)
    weights = weights if weights is None or not average_attn_weights else weights.mean(1)
    output = module.out_proj(mixed.transpose(1, 2).flatten(2)).transpose(0, samples)
    if single:
        return output.squeeze(samples), None if weights is None else weights.squeeze(0)
    return output, weights


def _mixed(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """The values (n, heads, L, E) as every query weighs them, and the weights where they are asked for."""
    if not need_weights:
        return F.scaled_dot_product_attention(q, k, v, mask), None
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    return weights @ v, weights


def _joined_mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, n: int, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """Both masks as one that is added to the scores (n, heads, L, S); None where there is none.

    A causal attention comes with its mask: torch's module asks for it even when it is told `is_causal`.
    """
    mask = None if attn_mask is None else _additive(attn_mask, dtype)
    if mask is not None and mask.dim() == 3:
        mask = mask.unflatten(0, (n, heads))
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, dtype)[:, None, None, :]
        mask = padding if mask is None else mask + padding
    return mask


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)


def _extended(
    module: nn.MultiheadAttention, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values with the learned one and the zero that the module may add at the end."""
    for bias_k, bias_v in (
        (module.bias_k, module.bias_v),
        (k.new_zeros(1, 1, k.shape[2]),) * 2 if module.add_zero_attn else (None, None),
    ):
        if bias_k is not None and bias_v is not None:
            k = torch.cat([k, bias_k.expand(len(k), 1, -1)], 1)
            v = torch.cat([v, bias_v.expand(len(v), 1, -1)], 1)
            mask = None if mask is None else F.pad(mask, (0, 1))
    return k, v, mask
