"""Attention, recurrence and weights that are used twice."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from property.steps import Composed, Draw, Shape, among, anything, chance, divisors, of_rank, step, width


def _attention(draw: Draw, shape: Shape) -> dict[str, Any]:
    return {
        "heads": among(draw, *divisors(shape[-1])),
        "bias": chance(draw),
        "causal": chance(draw),
        "need_weights": chance(draw),
        "add_bias_kv": chance(draw) and chance(draw),
        "cross": chance(draw) and chance(draw),
    }


@step(of_rank(2), _attention)
def multihead_attention(shape, options, parts):
    module = nn.MultiheadAttention(
        shape[-1],
        options["heads"],
        bias=options["bias"],
        add_bias_kv=options["add_bias_kv"],
        kdim=1 if options["cross"] else None,
        vdim=2 if options["cross"] else None,
        batch_first=True,
    )

    def attend(own, x):
        key, value = (x[..., :1], torch.cat([x[..., :1], x[..., -1:]], -1)) if options["cross"] else (x, x)
        T = x.shape[1]
        mask = torch.ones(T, T, dtype=torch.bool).triu(1) if options["causal"] else None
        return own.inner(x, key, value, attn_mask=mask, need_weights=options["need_weights"])[0]

    return Composed(attend, inner=module)


@step(
    of_rank(2),
    lambda draw, shape: {
        "heads": among(draw, *divisors(shape[-1])),
        "how": among(draw, "written", "sdpa", "linear"),
    },
)
def written_attention(shape, options, parts):
    """Attention from Linear layers, as language models write it."""
    E, heads = shape[-1], options["heads"]

    def attend(own, x):
        n, T, _ = x.shape
        q, k, v = (one.view(n, T, heads, E // heads).transpose(1, 2) for one in own.qkv(x).chunk(3, -1))
        if options["how"] == "sdpa":
            mixed = F.scaled_dot_product_attention(q, k, v)
        elif options["how"] == "linear":
            mixed = (q @ k.mT) @ v / T
        else:
            mixed = (q @ k.mT / math.sqrt(E // heads)).softmax(-1) @ v
        return own.out(mixed.transpose(1, 2).reshape(n, T, E))

    return Composed(attend, qkv=nn.Linear(E, 3 * E), out=nn.Linear(E, E))


@step(of_rank(2), lambda draw, shape: {"norm_first": chance(draw), "activation": among(draw, "relu", "gelu")})
def transformer_layer(shape, options, parts):
    return nn.TransformerEncoderLayer(shape[-1], 1, 2, dropout=0.0, batch_first=True, **options)


@step(
    of_rank(2),
    lambda draw, shape: {"kind": among(draw, "RNN", "RNN relu", "GRU", "LSTM"), "out": draw.randint(1, 2)},
)
def recurrent(shape, options, parts):
    kind = {
        "RNN": nn.RNN,
        "GRU": nn.GRU,
        "LSTM": nn.LSTM,
        "RNN relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
    }[options["kind"]]
    return Composed(lambda own, x: own.inner(x)[0], inner=kind(shape[-1], options["out"], batch_first=True))


@step(
    of_rank(2),
    lambda draw, shape: {"out": draw.randint(1, 3), "activation": among(draw, "tanh", "relu", "none")},
)
def written_recurrence(shape, options, parts):
    """The same weights at every position."""
    act = {"tanh": torch.tanh, "relu": torch.relu, "none": lambda h: h}[options["activation"]]

    def run(own, x):
        h = x.new_zeros(len(x), options["out"])
        for token in x.unbind(1):
            h = act(own.enter(token) + own.stay(h))
        return h

    return Composed(
        run,
        enter=nn.Linear(shape[-1], options["out"]),
        stay=nn.Linear(options["out"], options["out"], bias=False),
    )


@step(anything, lambda draw, shape: {"width": width(draw), "activation": among(draw, "relu", "tanh", "none")})
def tied_autoencoder(shape, options, parts):
    """A weight used as it is and transposed."""
    act = {"tanh": torch.tanh, "relu": torch.relu, "none": lambda h: h}[options["activation"]]
    return Composed(
        lambda own, x: F.linear(act(own.down(x)), own.down.weight.T),
        down=nn.Linear(shape[-1], options["width"]),
    )


@step(anything, lambda draw, shape: {"activation": among(draw, "relu", "tanh", "none")})
def tied_layers(shape, options, parts):
    """Two modules with one weight."""
    act = {"tanh": torch.tanh, "relu": torch.relu, "none": lambda h: h}[options["activation"]]
    first, second = nn.Linear(shape[-1], shape[-1]), nn.Linear(shape[-1], shape[-1])
    second.weight = first.weight
    return Composed(lambda own, x: own.second(act(own.first(x))), first=first, second=second)
