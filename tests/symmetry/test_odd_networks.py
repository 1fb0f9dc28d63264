"""Odd networks: each is rewritten into an equal one, or what stands in the way is reported.

The check that `rescale` makes before it returns anything is left out here: what was found has to be right by
itself.
"""

import copy
import math
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flatness.errors import ModelError, OptionError
from flatness.symmetry.flow.groups import symmetries
from flatness.symmetry.flow.rules import RULES
from flatness.symmetry.rewriting.base import Draw
from flatness.symmetry.rewriting.kinds import KINDS
from flatness.symmetry.rewriting.rescaling import make_rescaling, rescale
from transformer_models import Compute

LINEAR = {"fc1": (4, 6), "fc2": (6, 3), "gate": (4, 2), "other": (4, 6)}


def linears(**shapes):
    return {name: nn.Linear(*shape) for name, shape in {**LINEAR, **shapes}.items()}


def after(formula):
    """fc2 ∘ formula ∘ relu ∘ fc1."""
    return lambda self, x: self.fc2(formula(self, self.fc1(x).relu()))


def experts(self, x):
    return torch.stack([self.fc1(x).relu(), self.other(x).relu()], 1)


def choice(self, x):
    return self.gate(x).argmax(-1)


def by_mask(self, x):
    out, chosen = torch.zeros(len(x), 6, dtype=x.dtype), choice(self, x)
    for number, expert in enumerate((self.fc1, self.other)):
        out[chosen == number] = expert(x[chosen == number]).relu()
    return self.fc2(out)


def by_rows(self, x):
    out, chosen = torch.zeros(len(x), 6, dtype=x.dtype), choice(self, x)
    for number, expert in enumerate((self.fc1, self.other)):
        rows = (chosen == number).nonzero()[:, 0]
        if len(rows):
            out.index_put_((rows,), expert(x[rows]).relu())
    return self.fc2(out)


def by_if(self, x):
    rows = [self.fc1(row) if self.gate(row).argmax().item() == 0 else self.other(row) for row in x]
    return self.fc2(torch.stack(rows).relu())


def by_branch_on_the_input(self, x):
    return self.fc2((self.fc1(x) if x.mean() > 0 else self.other(x)).relu())


def index_put(self, x):
    out = torch.zeros(len(x), 2, 6, dtype=x.dtype)
    out = out.index_put((torch.arange(len(x)), choice(self, x)), self.fc1(x).relu())
    return self.fc2(out.sum(1))


def scattered(self, x):
    index = choice(self, x)[:, None, None].expand(-1, 1, 6)
    out = torch.zeros(len(x), 2, 6, dtype=x.dtype).scatter(1, index, self.fc1(x).relu()[:, None])
    return self.fc2(out[:, 0] + out[:, 1])


def weighted_by_one_hot(self, x):
    hot = F.one_hot(choice(self, x), 2).to(x.dtype)
    return self.fc2((experts(self, x) * hot[:, :, None]).sum(1))


def hot_written(self, x):
    hot = torch.zeros(len(x), 2, dtype=x.dtype)
    hot[torch.arange(len(x)), choice(self, x)] = 1.0
    return self.fc2((experts(self, x) * hot[:, :, None]).sum(1))


def top_one_weight(self, x):
    weight, chosen = self.gate(x).softmax(-1).topk(1)
    return self.fc2(weight * experts(self, x)[torch.arange(len(x)), chosen[:, 0]])


def channel_by_argmax(self, h):
    return torch.cat([h, h.gather(1, h.argmax(1, keepdim=True))], 1)[:, :6]


def written_view(self, h):
    out = h.new_zeros(len(h), 6)
    out[:, :3].copy_(h[:, :3])
    out[:, 3:].add_(h[:, 3:])
    return out


def data_view(self, h):
    doubled = h * 1
    doubled.data.clamp_(max=0.3)
    return doubled


def kept_on_self(self, h):
    self.kept = h.detach()
    return h + self.kept.round()


def out_given(self, h):
    out = torch.empty_like(h)
    torch.add(h, 1.0, out=out)
    return out


def through_numpy(self, h):
    return h * torch.from_numpy(np.asarray(h.detach())).mean()


def loop_of_rows(self, h):
    return torch.stack([row.relu() * 2 for row in h])


ROUTING = {
    "stack and argmax": lambda m, x: m.fc2(experts(m, x)[torch.arange(len(x)), choice(m, x)]),
    "gather": lambda m, x: m.fc2(experts(m, x).gather(1, choice(m, x)[:, None, None].expand(-1, 1, 6))[:, 0]),
    "take_along_dim": lambda m, x: m.fc2(
        experts(m, x).take_along_dim(choice(m, x)[:, None, None], 1).squeeze(1)
    ),
    "masks": by_mask,
    "rows": by_rows,
    "index_put": index_put,
    "scatter": scattered,
    "item": by_if,
    "branch on the input": by_branch_on_the_input,
    "one_hot": weighted_by_one_hot,
    "one hot written": hot_written,
    "top-1 with its weight": top_one_weight,
    "where by another network": lambda m, x: m.fc2(
        torch.where(m.gate(x)[:, :1] > 0, m.fc1(x), m.other(x)).relu()
    ),
    "where by channels of another": lambda m, x: m.fc2(torch.where(m.other(x) > 0.1, m.fc1(x), 0.0).relu()),
    "where as a method": lambda m, x: m.fc2((h := m.fc1(x)).where(h > 0, m.other(x) * 0)),
    "weights by argmax": lambda m, x: m.fc2((m.tables[choice(m, x)] @ m.fc1(x).relu()[:, :, None])[:, :, 0]),
    "embedding of argmax": lambda m, x: m.fc2(m.table(m.gate(x).argmax(-1)) + m.fc1(x).relu()),
    "channel by argmax": after(channel_by_argmax),
    "masked_select": after(lambda m, h: h + h.masked_select(h > 0.2).sum()),
    "index_select by the data": after(lambda m, h: h.index_select(1, h.sum(0).argsort())),
    "unique": after(lambda m, h: h * len(h.round().unique())),
    "nonzero": after(lambda m, h: h[(h.sum(1) > 0.5).nonzero()[:, 0]].sum(0) + h),
    "bincount": after(lambda m, h: h + torch.bincount(h.argmax(1), minlength=6).to(h.dtype)),
    "slice by a tensor": after(lambda m, h: h + h[: (h.sum() > 1).long() + 1].mean(0)),
}
NUMBERS = {
    "float()": after(lambda m, h: h + float(h.sum())),
    "float() beside it": lambda m, x: m.fc2(m.other(x).relu() * float(m.fc1(x).relu().sum())),
    "int()": after(lambda m, h: h * int(h.sum())),
    "bool()": after(lambda m, h: h if h.sum() > 3 else h.tanh()),
    "tolist": after(lambda m, h: h + torch.tensor(h.sum(0).tolist(), dtype=h.dtype)),
    "numpy": after(through_numpy),
    "torch.tensor": after(lambda m, h: h + h.clone().detach().round()),
    "to int": after(lambda m, h: (5 * h).to(torch.int64).double()),
    "to by keyword": after(lambda m, h: (5 * h).to(dtype=torch.int32).double()),
    "type": after(lambda m, h: (5 * h).type(torch.int64).double()),
    "long": after(lambda m, h: h * (3 * h).long()),
    "int and back": after(lambda m, h: (5 * h).int().double()),
    "bool and back": after(lambda m, h: h + h.bool()),
    "half and back": after(lambda m, h: h.half().double()),
    "bfloat16 and back": after(lambda m, h: h + h.bfloat16()),
    "type_as": after(lambda m, h: (5 * h).type_as(m.whole).double()),
    "copied into whole numbers": after(
        lambda m, h: torch.zeros(h.shape, dtype=torch.int64).copy_(5 * h).double()
    ),
    "copied into halves": after(lambda m, h: torch.zeros(h.shape, dtype=torch.float16).copy_(h).double()),
    "bits": after(lambda m, h: h + h.contiguous().view(torch.int64).bitwise_and(1)),
    "div floor": after(lambda m, h: h.div(0.3, rounding_mode="floor")),
    "div trunc": after(lambda m, h: torch.div(h, 0.3, rounding_mode="trunc") + h),
    "floor_divide": after(lambda m, h: h // 0.3),
    "remainder": after(lambda m, h: h % 0.3),
    "fmod": after(lambda m, h: h.fmod(0.3)),
    "round": after(lambda m, h: h.round(decimals=1)),
    "floor": after(lambda m, h: h + h.floor()),
    "frac": after(lambda m, h: h.frac()),
    "bucketize": after(lambda m, h: h + torch.bucketize(h, torch.tensor([0.1, 0.5], dtype=h.dtype))),
    "clamp by a tensor": after(lambda m, h: h.clamp(max=h.mean(1, keepdim=True) + 0.1)),
    "clamp by a parameter": after(lambda m, h: torch.clamp(h, max=m.bound)),
    "pow by a tensor": after(lambda m, h: h ** m.bound.abs()),
    "cat with whole numbers": lambda m, x: m.wide(torch.cat([m.fc1(x).relu(), (x[:, :2] > 0).long()], 1)),
    "in place on data": after(data_view),
    "data set anew": after(lambda m, h: (setattr(k := h * 1, "data", h.round()), k)[1]),
    "kept on self": after(kept_on_self),
    "out": after(out_given),
    "written views": after(written_view),
    "filled": after(lambda m, h: torch.empty_like(h).fill_(0.5) + h),
    "filled by a value": after(lambda m, h: h + torch.full_like(h, float(h.max()))),
    "std of all": after(lambda m, h: h + h.std(False)),
    "tril": after(lambda m, h: h.reshape(-1, 2, 3).tril().flatten(1)),
    "diagonal": lambda m, x: m.fc2(
        (m.fc1(x).relu()[:, :, None] * m.fc1.weight.new_ones(6, 6).cumsum(1)).diagonal(0, 1, 2)
    ),
    "a channel written over": after(lambda m, h: (h.index_fill(1, torch.tensor([0]), 0.0), h)[0]),
    "a channel set to zero": after(lambda m, h: (k := h.clone(), k.__setitem__((slice(None), 0), 0.0))[0]),
    "half of the channels": lambda m, x: m.fc2(torch.cat([(h := m.fc1(x))[:, 3:], h[:, :3].relu()], 1)),
    "places that move": lambda m, x: m.tall(m.seq(x[:, None, :].mT).flatten(1).roll(1, 1)),
    "rows that are turned": lambda m, x: m.tall(
        (s := m.seq(x[:, None, :].mT)).mT.reshape(s.shape).tanh().flip(1).flatten(1)
    ),
    "tokens of which a part is turned": lambda m, x: m.tall(
        torch.cat([(s := m.mixed(m.seq(x[:, None, :].mT).mT).mT)[..., :3].flip(1), s[..., 3:]], 2).flatten(1)
    ),
    "all rolled": after(lambda m, h: h.roll(1)),
    "a channel cut off": lambda m, x: m.fc2(F.pad(m.fc1(x).relu(), (-1, 1))),
    "beside the logits": lambda m, x: torch.cat([z := m.fc1(x), m.fc2(z.relu())], 1),
    "softmax in groups": after(lambda m, h: h.reshape(-1, 2, 3).softmax(-1).flatten(1)),
    "rows": after(loop_of_rows),
    "TorchScript": after(lambda m, h: h * scripted(h)),
    "vmap": after(lambda m, h: h * torch.func.vmap(torch.tanh)(h)),
    "extension": after(lambda m, h: h * torch.ops.aten.tanh.default(h)),
    "own gradient": after(lambda m, h: h * Rounded.apply(h)),
    "running statistics read elsewhere": lambda m, x: m.fc2((m.norm(m.fc1(x)) + m.norm.running_mean).relu()),
}


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


with warnings.catch_warnings():
    warnings.simplefilter("ignore")

    @torch.jit.script
    def scripted(x):
        return torch.tanh(x)


def attention(**options):
    return lambda: Heads(**options)


class Heads(nn.Module):
    """Attention as it is written out of Linear layers."""

    def __init__(self, heads=2, shared=None, packed=False, explicit=True, width=6, per_head=None):
        super().__init__()
        self.heads, self.shared, self.explicit = heads, shared or heads, explicit
        self.size = per_head or width // heads
        inner, fewer = heads * self.size, self.shared * self.size
        self.embed, self.head = nn.Linear(4, width), nn.Linear(width, 3)
        self.qkv = nn.Linear(width, inner + 2 * fewer) if packed else None
        self.q, self.k, self.v = (
            None if packed else nn.Linear(width, size) for size in (inner, fewer, fewer)
        )
        self.out = nn.Linear(inner, width)

    def forward(self, x):
        h = self.embed(x.reshape(len(x), -1, 4))
        sizes = [self.heads * self.size, *[self.shared * self.size] * 2]
        parts = (
            self.qkv(h).split(sizes, -1) if self.qkv is not None else [f(h) for f in (self.q, self.k, self.v)]
        )
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        if self.explicit:
            k, v = (part.repeat_interleave(self.heads // self.shared, 1) for part in (k, v))
            mixed = (q @ k.mT / math.sqrt(self.size)).softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.shared < self.heads)
        return self.head((h + self.out(mixed.transpose(1, 2).flatten(2))).mean(1))


class Torchs(nn.Module):
    """Attention of torch."""

    def __init__(self, **options):
        super().__init__()
        self.attn, self.head = nn.MultiheadAttention(4, 2, batch_first=True, **options), nn.Linear(4, 3)

    def forward(self, x):
        x = x.reshape(len(x), -1, 4)
        return self.head(self.attn(x, x, x, need_weights=False)[0].mean(1))


ATTENTION = {
    "two heads": attention(),
    "three heads of one pair": attention(heads=3),
    "heads of one channel": attention(heads=6),
    "packed": attention(packed=True),
    "grouped queries": attention(heads=4, shared=2, per_head=3),
    "one head of keys and values": attention(heads=3, shared=1),
    "fused": attention(explicit=False),
    "fused, grouped, packed": attention(heads=4, shared=2, per_head=2, packed=True, explicit=False),
    "torch's": Torchs,
    "torch's with keys of their own size": lambda: Torchs(kdim=4, vdim=4),
    "torch's with further keys": lambda: Torchs(add_bias_kv=True, add_zero_attn=True),
    "torch's encoder layer": lambda: nn.Sequential(
        nn.Unflatten(1, (-1, 4)),
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        nn.Flatten(),
        nn.Linear(12, 3),
    ),
}


def built(formula):
    parts = {
        **linears(wide=(8, 3), seq=(1, 6), tall=(24, 3), mixed=(4, 4)),
        "table": nn.Embedding(2, 6),
        "norm": nn.BatchNorm1d(6),
        "tables": nn.Parameter(torch.randn(2, 6, 6)),
        "bound": nn.Parameter(torch.rand(6)),
    }
    model = Compute(formula, **parts)
    nn.init.normal_(model.norm.running_mean)
    model.register_buffer("whole", torch.zeros(1, dtype=torch.int64))
    return model


def prepared(build):
    torch.manual_seed(0)
    return build().double().eval()


def inputs(rows, width=4):
    return torch.randn(rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))


def drifts(model, example):
    """How far outputs on other data move under every kind of rewriting that is not refused."""
    found, moved = symmetries(model, example), {}
    width = example.shape[1]
    data = [example, *inputs(48, width).split(8), inputs(1, width)]
    with torch.no_grad():
        before = [model(x) for x in data]
    for kind in KINDS:
        try:
            rescaling = make_rescaling(found, kind, Draw(seed=3))
        except ModelError:
            continue
        changed = copy.deepcopy(model)
        rescaling.apply(changed)
        with torch.no_grad():
            pairs = [(rescaling.expected(old), changed(x)) for x, old in zip(data, before, strict=True)]
        moved[kind] = max(float((old - new).abs().max() / old.abs().max()) for old, new in pairs)
    return moved


@pytest.mark.parametrize("name", [*ROUTING, *NUMBERS])
def test_networks_that_look_at_values_are_rewritten_into_equal_ones_or_not_at_all(name):
    formula = (ROUTING | NUMBERS)[name]
    for rows in (1, 5):
        moved = drifts(prepared(lambda: built(formula)), inputs(rows))
        assert all(drift < 1e-10 for drift in moved.values()), (rows, moved)


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_rewritten_into_equal_attention(name):
    for rows in (1, 5):
        moved = drifts(prepared(ATTENTION[name]), inputs(rows, 12))
        assert set(moved) == set(KINDS)
        assert all(drift < 1e-10 for drift in moved.values()), (rows, moved)


def test_what_is_equal_under_every_kind_stays_free():
    free = {
        "where by channels of another",
        "where by another network",
        "cat with whole numbers",
        "a channel set to zero",
        "rows",
    }
    for name in free:
        model = prepared(partial(built, (ROUTING | NUMBERS)[name]))
        assert set(drifts(model, inputs(5))) == set(KINDS) - {"attention"}, name


REASONS = {
    "stack and argmax": ("fc1, other", "getitem picks by an index that depends on the data"),
    "gather": ("fc1, other", "gather picks by an index that depends on the data"),
    "take_along_dim": ("fc1, other", "take_along_dim picks by an index that depends on the data"),
    "scatter": ("fc1", "scatter is not known to keep channels apart"),
    "index_put": ("fc1", "index_put is not known to keep channels apart"),
    "branch on the input": (
        "other",
        "Python code reads the data (bool()), so other data may take another path",
    ),
    "embedding of argmax": ("gate", "argmax turns it into whole numbers"),
    "float() beside it": ("fc1", "Python code reads its values (float())"),
    "to int": ("fc1", "to turns it into whole numbers"),
    "type": ("fc1", "type turns it into whole numbers"),
    "half and back": ("fc1", "half rounds it to fewer digits"),
    "div floor": ("fc1", "div is not known to keep channels apart"),
    "clamp by a parameter": ("fc1", "clamp is not positively homogeneous"),
    "TorchScript": ("fc1", "aten::tanh is not known to keep channels apart"),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_stands_in_the_way_is_said(name):
    layer, reason = REASONS[name]
    found = symmetries(prepared(lambda: built((ROUTING | NUMBERS)[name])), inputs(5))
    for part in layer.split(", "):
        group = next(group for group in found.fixed if part in group.name.split(", "))
        assert reason in group.reasons, group.reasons


def test_errors_in_what_follows_an_operator_are_errors(monkeypatch):
    def broken(flow, call):
        raise AttributeError("no such thing")

    monkeypatch.setitem(RULES, "homogeneous", broken)
    with pytest.raises(AttributeError, match="no such thing"):
        symmetries(prepared(lambda: built(after(lambda m, h: h))), inputs(2))


def test_channels_change_places_within_their_head_only():
    model, x = prepared(Torchs), inputs(2, 12)
    changed = rescale(model, x, "permutation", factors={"attn.v": [1, 0, 3, 2]})
    torch.testing.assert_close(changed(inputs(40, 12)), model(inputs(40, 12)), rtol=1e-12, atol=1e-12)
    order = torch.tensor([1, 0, 3, 2])
    torch.testing.assert_close(changed.attn.in_proj_weight[8:], model.attn.in_proj_weight[8:][order])
    torch.testing.assert_close(changed.attn.in_proj_weight[:8], model.attn.in_proj_weight[:8])
    torch.testing.assert_close(changed.attn.out_proj.weight, model.attn.out_proj.weight[:, order])
    with pytest.raises(OptionError) as raised:
        rescale(model, x, "permutation", factors={"attn.v": [2, 1, 0, 3]})
    assert str(raised.value) == (
        "Expected rows of 'attn.v' that may change places but 0 and 2 may not: they lead to different "
        "layers or groups."
    )
