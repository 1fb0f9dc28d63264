"""`nn.MultiheadAttention` opened: its projections called as modules, so that they are layers like any other.

Torch computes attention in one function: the query, key and value projections are thirds of one packed weight
and never run as modules, and hooks on ``out_proj`` do not fire. While a model is measured, every such module
computes the same through submodules ``q``, ``k``, ``v`` and ``out_proj``, samples first whatever its own
layout is. `flatness.guard` takes all of that off again.
"""

from __future__ import annotations

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
        weight: Name of the parameter that holds the weight.
        rows: Which rows of it; None for all.
        bias_rows: Which entries of the packed bias.
    """

    def __init__(self, owner: nn.Module, weight: str, rows: slice | None, bias_rows: slice) -> None:
        super().__init__()
        # In a tuple: the owner is not a submodule of its own part.
        self._owner = (owner,)
        self.weight_key, self._rows, self._bias_rows = weight, rows, bias_rows

    @property
    def weight(self) -> Tensor:
        """The weight, (d, m): a view of the parameter."""
        weight = cast(Tensor, getattr(self._owner[0], self.weight_key))
        return weight if self._rows is None else weight[self._rows]

    @property
    def bias(self) -> Tensor | None:
        """The bias, (d,), or None."""
        packed = cast("Tensor | None", self._owner[0].in_proj_bias)
        return None if packed is None else packed[self._bias_rows]

    @property
    def bias_key(self) -> str:
        """Name of the parameter that holds the bias, in the owner."""
        return "in_proj_bias"

    def forward(self, input: Tensor) -> Tensor:
        """Input (…, m) to (…, d)."""
        return F.linear(input, self.weight, self.bias)


def open_attention(model: nn.Module) -> list[str]:
    """Open every `nn.MultiheadAttention` of a model, and say which ones; the caller sets modules back."""
    opened = []
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and _is_stock(module, nn.MultiheadAttention):
            for key, projection in _projections(module).items():
                module.add_module(key, projection)
            vars(module)["forward"] = partial(_attend, module)
            opened.append(name)
        for kind in _LAYERS:
            if isinstance(module, kind) and _is_stock(module, kind):
                vars(module)["forward"] = partial(_samples_first, module, module.forward)
    return opened


def _is_stock(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether the module computes what torch wrote."""
    return type(module).forward is kind.forward and "forward" not in vars(module)


def _projections(module: nn.MultiheadAttention) -> dict[str, Projection]:
    E = module.embed_dim
    thirds = {key: slice(i * E, (i + 1) * E) for i, key in enumerate("qkv")}
    if module.in_proj_weight is not None:
        return {key: Projection(module, "in_proj_weight", rows, rows) for key, rows in thirds.items()}
    return {key: Projection(module, f"{key}_proj_weight", None, rows) for key, rows in thirds.items()}


def stacked_projections(model: nn.Module) -> set[str]:
    """Names of the parameters that hold the query, key and value projections, one above the other."""
    own = [module for _, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    stacked = {id(value) for module in own for value in (module.in_proj_weight, module.in_proj_bias)}
    return {name for name, value in model.named_parameters() if id(value) in stacked}


def _samples_first(layer: nn.Module, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """A transformer layer on sequences (L, n, E), run as (n, L, E) inside: samples come first in its Linears.

    Masks do not depend on the layout.
    """
    attention = [module for module in layer.children() if isinstance(module, nn.MultiheadAttention)]
    sequences = 2 if isinstance(layer, nn.TransformerDecoderLayer) else 1
    x = next(value for value in (*args, *(kwargs.get(key) for key in _SEQUENCES)) if value is not None)
    if x.dim() != 3 or any(module.batch_first for module in attention):
        return forward(*args, **kwargs)
    args = tuple(value.transpose(0, 1) if i < sequences else value for i, value in enumerate(args))
    kwargs = {key: value.transpose(0, 1) if key in _SEQUENCES else value for key, value in kwargs.items()}
    with ExitStack() as stack:
        for module in attention:
            stack.callback(setattr, module, "batch_first", False)
            module.batch_first = True
        return forward(*args, **kwargs).transpose(0, 1)


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
    single, swapped = query.dim() == 2, query.dim() == 3 and not module.batch_first
    given = [query, key, value]
    if single:
        given = [tensor.unsqueeze(0) for tensor in given]
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    elif swapped:
        given = [tensor.transpose(0, 1) for tensor in given]
    parts = cast(Any, module)
    q, k, v = parts.q(given[0]), parts.k(given[1]), parts.v(given[2])
    n, heads = len(q), module.num_heads
    mask = _joined_mask(attn_mask, key_padding_mask, n, heads, q.dtype)
    k, v, mask = _extended(module, k, v, mask)
    q, k, v = (tensor.unflatten(-1, (heads, -1)).transpose(1, 2) for tensor in (q, k, v))
    weights = None
    if need_weights:
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
        weights = (scores if mask is None else scores + mask).softmax(-1)
        mixed = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask)
    output = module.out_proj(mixed.transpose(1, 2).flatten(2))
    if single:
        return output.squeeze(0), None if weights is None else weights.squeeze(0)
    return output.transpose(0, 1) if swapped else output, weights


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
