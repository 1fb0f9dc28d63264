"""Every operator that lets factors pass is tried in a network: what is found leaves its function as it is.

An operator that is in no row here counts as not free, by construction: the table of the library and the table
of this file hold the same names.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flatness.errors import ModelError
from flatness.network.operators import OPERATORS
from flatness.symmetry.flow.groups import symmetries
from flatness.symmetry.flow.rules import RULES
from flatness.symmetry.rewriting.base import Draw
from flatness.symmetry.rewriting.kinds import KINDS
from flatness.symmetry.rewriting.rescaling import make_rescaling


class Tried(nn.Module):
    """An operator between layers, on vectors h (n, 6), sequences s (n, 7, 4) and images p (n, 4, 5, 5)."""

    def __init__(self, formula):
        super().__init__()
        self.fc, self.seq, self.conv = nn.Linear(4, 6), nn.Linear(7, 4), nn.Conv2d(1, 4, 3)
        self.slope, self.mix = nn.Parameter(torch.rand(4)), nn.Parameter(torch.randn(6, 6))
        self.kernel = nn.Parameter(torch.randn(4, 4, 2, 2))
        self.table = nn.Parameter(torch.randn(3, 6))
        self.norm = nn.BatchNorm2d(4)
        self.scale, self.shift = nn.Parameter(torch.rand(4) + 0.5), nn.Parameter(torch.randn(4))
        self.formula = [formula]
        self.head = nn.Linear(self.features(torch.zeros(2, 49)).shape[1], 3)

    def features(self, x):
        h, s = self.fc(x[:, :4]), self.seq(x.view(-1, 7, 7))
        return self.formula[0](self, h, s, self.conv(x.view(-1, 1, 7, 7))).to(h.dtype).flatten(1)

    def forward(self, x):
        return self.head(self.features(x))


def method(name, *args, **kwargs):
    """A method of the vectors."""
    return lambda m, h, s, p: getattr(h, name)(*args, **kwargs)


def functional(name, *args, of=F, **kwargs):
    """A function of the vectors."""
    return lambda m, h, s, p: getattr(of, name)(h, *args, **kwargs)


def pooled(name, *args, **kwargs):
    """A function of the images, or of their rows, or of them as volumes."""

    def formula(m, h, s, p):
        shaped = {"1": p.flatten(2), "3": p.unsqueeze(-1).expand(-1, -1, -1, -1, 3)}
        out = getattr(F, name)(shaped.get(next(filter(str.isdigit, name), "2"), p), *args, **kwargs)
        return out[0] if isinstance(out, tuple) else out

    return formula


def methods(names, *args):
    return {name: method(name, *args) for name in names.split()}


def functions(names, *args, **kwargs):
    return {name: functional(name, *args, **kwargs) for name in names.split()}


def compared(name):
    """A comparison of the vectors with others."""
    return lambda m, h, s, p: getattr(h, name)(0.5 * h.flip(0))


def reduced(name):
    """A value out of those along the sequence."""
    return lambda m, h, s, p: getattr(s, name)(1).values


def written(m, h, s, p):
    out = torch.zeros_like(h)
    out[:, 1:4] = h[:, :3]
    out[:, 5] = 0.0
    return out


def attended(m, h, s, p):
    heads = s.unflatten(-1, (2, 2)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads.relu(), heads, heads.abs()).transpose(1, 2).flatten(2)


def transposed(dims):
    def formula(m, h, s, p):
        kernel = m.kernel if dims == 2 else m.kernel[..., 0] if dims == 1 else m.kernel[..., None]
        image = p if dims == 2 else p.flatten(2) if dims == 1 else p[..., None]
        return getattr(F, f"conv_transpose{dims}d")(image.relu(), kernel, stride=2, groups=2)

    return formula


def convolved(dims):
    def formula(m, h, s, p):
        kernel = m.kernel if dims == 2 else m.kernel[..., 0] if dims == 1 else m.kernel[..., None]
        image = p if dims == 2 else p.flatten(2) if dims == 1 else p[..., None]
        return getattr(F, f"conv{dims}d")(image.relu(), kernel[:, :2], groups=2)

    return formula


TRIED = {
    **methods("clone contiguous detach double cpu positive relu neg abs"),
    "data": lambda m, h, s, p: h.data,
    "to": method("to", torch.float64),
    "float": method("float"),
    "half": method("half"),
    "bfloat16": method("bfloat16"),
    "type": method("type", torch.float64),
    "type_as": lambda m, h, s, p: h.type_as(m.fc.weight),
    "cuda": None,
    "alias": lambda m, h, s, p: torch.ops.aten.alias(h),
    **functions("leaky_relu rrelu"),
    **functions("dropout alpha_dropout feature_alpha_dropout", 0.5, training=False),
    "feature_dropout": lambda m, h, s, p: torch.feature_dropout(p, 0.5, False),
    **{name: pooled(name, 0.5, training=False) for name in ("dropout1d", "dropout2d", "dropout3d")},
    **methods("tanh sigmoid exp log1p expm1 square sin cos erf round"),
    "log": lambda m, h, s, p: (h.abs() + 1).log(),
    "sqrt": lambda m, h, s, p: h.abs().sqrt(),
    "rsqrt": lambda m, h, s, p: (h.abs() + 1).rsqrt(),
    "log1p": lambda m, h, s, p: h.abs().log1p(),
    "reciprocal": lambda m, h, s, p: (h.abs() + 1).reciprocal(),
    **functions("gelu silu mish elu selu celu softplus softsign hardtanh relu6 hardswish"),
    **functions("hardshrink softshrink tanhshrink"),
    # A guard puts plain operators in the place of its name in F.
    "hardsigmoid": lambda m, h, s, p: torch._C._nn.hardsigmoid(h),
    "log_sigmoid": functional("logsigmoid"),
    "softmax": lambda m, h, s, p: h.reshape(-1, 2, 3).softmax(2),
    "log_softmax": lambda m, h, s, p: s.log_softmax(1),
    "softmin": lambda m, h, s, p: F.softmin(h, -1),
    "clamp": method("clamp", 0),
    "clamp_min": method("clamp_min", 0.0),
    "clamp_max": method("clamp_max", 0.2),
    "threshold": functional("threshold", 0.0, 0.0),
    "pow": method("pow", 1),
    "prelu": lambda m, h, s, p: F.prelu(p, m.slope),
    **methods("sign sgn isnan isinf isfinite"),
    "add": lambda m, h, s, p: torch.add(h, h.relu(), alpha=2),
    "sub": lambda m, h, s, p: h - h.relu().flip(1),
    "rsub": lambda m, h, s, p: 0 - h,
    "maximum": lambda m, h, s, p: torch.maximum(h, 0.5 * h),
    "minimum": lambda m, h, s, p: h.minimum(torch.zeros_like(h)),
    "fmax": lambda m, h, s, p: torch.fmax(h, 0.5 * h),
    "fmin": lambda m, h, s, p: torch.fmin(h, torch.zeros_like(h)),
    "copy": lambda m, h, s, p: torch.zeros_like(h).copy_(h.relu()),
    "fill": lambda m, h, s, p: torch.cat([h, h.clone().fill_(0.0)], 1),
    **{name: compared(name) for name in ("gt", "lt", "ge", "le", "eq", "ne")},
    "logical_and": lambda m, h, s, p: (h > 0).logical_and(h.relu() > 0) * h,
    "logical_or": lambda m, h, s, p: (h > 0).logical_or(h < 0) * h,
    "logical_not": lambda m, h, s, p: (h > 0).logical_not() * h,
    "where": lambda m, h, s, p: torch.where(p.mean((1, 2, 3))[:, None] > 0, h, 0.3 * h),
    "masked_fill": lambda m, h, s, p: h.masked_fill(h < 0, 0.0),
    "mul": lambda m, h, s, p: h * torch.sigmoid(p[:, :1, 0, 0]),
    "div": lambda m, h, s, p: h / (1 + p[:, :1, 0, 0].abs()),
    "view": lambda m, h, s, p: h.view(-1, 2, 3).relu(),
    "reshape": lambda m, h, s, p: h.reshape(-1, 3, 2).relu(),
    "flatten": lambda m, h, s, p: p.relu().flatten(1),
    "unflatten": lambda m, h, s, p: h.unflatten(1, (2, 3)),
    "permute": lambda m, h, s, p: p.permute(0, 2, 3, 1),
    "transpose": lambda m, h, s, p: s.transpose(1, 2),
    "t": lambda m, h, s, p: h.t().relu().t(),
    "T": lambda m, h, s, p: h.T.relu().T,
    "mT": lambda m, h, s, p: s.mT,
    "adjoint": lambda m, h, s, p: s.adjoint(),
    "movedim": lambda m, h, s, p: p.movedim(1, -1),
    "squeeze": lambda m, h, s, p: h[:, None].squeeze(1),
    "unsqueeze": lambda m, h, s, p: h.unsqueeze(2),
    "expand": lambda m, h, s, p: h[:, None].expand(-1, 2, -1),
    "expand_as": lambda m, h, s, p: h[:, :4, None].expand_as(s.mT),
    "view_as": lambda m, h, s, p: h[:, :4].view_as(s[:, 0]),
    "reshape_as": lambda m, h, s, p: h[:, :4].reshape_as(s[:, 0]),
    "narrow": lambda m, h, s, p: h.narrow(1, 1, 3),
    "select": lambda m, h, s, p: p.select(2, 3),
    "split": lambda m, h, s, p: torch.cat(h.split(2, 1)[::-1], 1),
    "chunk": lambda m, h, s, p: sum(h.chunk(2, 1)),
    "unbind": lambda m, h, s, p: torch.stack(s.unbind(2), 1),
    "tensor_split": lambda m, h, s, p: h.tensor_split(3, 1)[1],
    "split_with_sizes": lambda m, h, s, p: h.split_with_sizes([2, 4], 1)[1],
    "cat": lambda m, h, s, p: torch.cat([h.relu(), h, (h > 0).long()], 1),
    "stack": lambda m, h, s, p: torch.stack([h, h.relu()], 2),
    "hstack": lambda m, h, s, p: torch.hstack([h, h.relu()]),
    "vstack": lambda m, h, s, p: torch.vstack([h, h.relu()])[: len(h)],
    "dstack": lambda m, h, s, p: torch.dstack([h, h.relu()]),
    "getitem": lambda m, h, s, p: s[torch.arange(len(s)), (h[:, 0] > 0).long()],
    "index_select": lambda m, h, s, p: h.index_select(1, torch.tensor([3, 1])),
    "gather": lambda m, h, s, p: s.gather(1, (h[:, :4] > 0).long()[:, None]),
    "take_along_dim": lambda m, h, s, p: s.take_along_dim((h[:, :1] > 0).long()[:, None], 1),
    "repeat_interleave": lambda m, h, s, p: h.repeat_interleave(torch.tensor([1, 2, 1, 1, 1, 1]), 1),
    "diagonal": lambda m, h, s, p: p.diagonal(0, 2, 3),
    "flip": method("flip", 1),
    "roll": method("roll", 2, 1),
    "repeat": method("repeat", 1, 2),
    "tile": method("tile", 2),
    "broadcast_to": lambda m, h, s, p: torch.broadcast_to(h[:, None], (len(h), 2, 6)),
    "pixel_shuffle": lambda m, h, s, p: F.pixel_shuffle(p, 2),
    "pixel_unshuffle": lambda m, h, s, p: F.pixel_unshuffle(p[:, :, :4, :4], 2),
    "channel_shuffle": lambda m, h, s, p: F.channel_shuffle(p, 2),
    "rot90": lambda m, h, s, p: p.rot90(1, [2, 3]),
    "ravel": lambda m, h, s, p: h.ravel().reshape(h.shape),
    "hsplit": lambda m, h, s, p: h.hsplit(2)[1],
    "vsplit": lambda m, h, s, p: torch.cat(h.vsplit([1])),
    "unsafe_chunk": lambda m, h, s, p: h.unsafe_chunk(2, 1)[0],
    "unsafe_split": lambda m, h, s, p: h.unsafe_split(2, 1)[0],
    **{name: functional(name, of=torch) for name in ("atleast_1d", "atleast_2d", "atleast_3d")},
    "unfold": lambda m, h, s, p: F.unfold(p, 3, padding=1),
    "tril": lambda m, h, s, p: s.tril(),
    "triu": lambda m, h, s, p: s.triu(1),
    "pad": lambda m, h, s, p: F.pad(h, (1, 2)),
    "setitem": written,
    "zeros_like": lambda m, h, s, p: h + torch.zeros_like(h),
    "ones_like": lambda m, h, s, p: h * torch.ones_like(h),
    "empty_like": lambda m, h, s, p: torch.empty_like(h).copy_(h),
    "full_like": lambda m, h, s, p: torch.maximum(h, torch.full_like(h, 0.0)),
    "rand_like": lambda m, h, s, p: h + 0 * torch.rand_like(h),
    "randn_like": lambda m, h, s, p: h + 0 * torch.randn_like(h),
    "new_zeros": lambda m, h, s, p: h + h.new_zeros(6),
    "new_ones": lambda m, h, s, p: h * h.new_ones(6),
    "new_empty": lambda m, h, s, p: h.new_empty(h.shape).copy_(h),
    "new_full": lambda m, h, s, p: h * h.new_full((6,), 2.0),
    **{name: method(name, 1, True) for name in ("sum", "mean", "amax", "amin", "nansum", "nanmean")},
    **{name: reduced(name) for name in ("max", "min", "median")},
    "std": lambda m, h, s, p: s.std(1),
    "argmax": lambda m, h, s, p: s.argmax(1),
    "argmin": lambda m, h, s, p: h.argmin(1, keepdim=True),
    "sort": lambda m, h, s, p: s.sort(1).values,
    "argsort": lambda m, h, s, p: s.argsort(1),
    "topk": lambda m, h, s, p: s.topk(2, 1).values,
    "kthvalue": lambda m, h, s, p: s.kthvalue(2, 1).values,
    "cumsum": lambda m, h, s, p: s.cumsum(1),
    "cummax": lambda m, h, s, p: s.cummax(1).values,
    "cummin": lambda m, h, s, p: s.cummin(1).values,
    **{
        name: pooled(name, 2)
        for name in (
            "max_pool1d",
            "max_pool2d",
            "avg_pool1d",
            "avg_pool2d",
            "adaptive_avg_pool1d",
            "adaptive_avg_pool2d",
            "adaptive_avg_pool3d",
            "adaptive_max_pool1d",
            "adaptive_max_pool2d",
            "adaptive_max_pool3d",
            "max_pool3d",
            "avg_pool3d",
        )
    },
    **{
        name: pooled(name, 2, return_indices=True)
        for name in (
            "max_pool1d_with_indices",
            "max_pool2d_with_indices",
            "max_pool3d_with_indices",
            "adaptive_max_pool1d_with_indices",
            "adaptive_max_pool2d_with_indices",
            "adaptive_max_pool3d_with_indices",
        )
    },
    "interpolate": lambda m, h, s, p: F.interpolate(p, scale_factor=2, mode="bilinear"),
    "linear": lambda m, h, s, p: F.linear(h.relu(), m.mix).relu(),
    "matmul": lambda m, h, s, p: (h.relu() @ m.mix).relu(),
    "mm": lambda m, h, s, p: h.relu().mm(m.mix),
    "bmm": lambda m, h, s, p: s.softmax(1).mT.bmm(s.relu()),
    "addmm": lambda m, h, s, p: torch.addmm(m.table[0], h.relu(), m.mix),
    **{f"conv{dims}d": convolved(dims) for dims in (1, 2, 3)},
    **{f"conv_transpose{dims}d": transposed(dims) for dims in (1, 2, 3)},
    "embedding": lambda m, h, s, p: F.embedding((s[:, :, 0] > 0).long(), m.table),
    "scaled_dot_product_attention": attended,
    "batch_norm": lambda m, h, s, p: m.norm(p.relu()),
    "layer_norm": lambda m, h, s, p: F.layer_norm(s, (4,), m.scale, m.shift),
    "rms_norm": lambda m, h, s, p: F.rms_norm(s, (4,), m.scale),
    "group_norm": lambda m, h, s, p: F.group_norm(p, 2, m.scale, m.shift),
    "instance_norm": lambda m, h, s, p: F.instance_norm(p, weight=m.scale, bias=m.shift),
}
# Operators that only another device has.
ELSEWHERE = {"cuda"}


def test_every_operator_of_the_table_is_tried_here():
    rows = {name: row.flow for name, row in OPERATORS.items() if row.flow is not None}
    assert set(TRIED) == set(rows)
    assert set(rows.values()) == set(RULES)
    assert {name for name, formula in TRIED.items() if formula is None} == ELSEWHERE


@pytest.mark.parametrize("name", sorted(set(TRIED) - ELSEWHERE))
def test_an_operator_between_two_layers_leaves_an_equal_function(name):
    torch.manual_seed(0)
    model = Tried(TRIED[name]).double().eval()
    nn.init.normal_(model.norm.running_mean)
    example, *data = torch.randn(5, 3, 49, dtype=torch.float64)
    found = symmetries(model, example)
    assert name in {call.name for call in found.trace.calls}
    for kind in KINDS:
        try:
            rescaling = make_rescaling(found, kind, Draw(seed=2))
        except ModelError:
            continue
        changed = copy.deepcopy(model)
        rescaling.apply(changed)
        with torch.no_grad():
            for x in (example, *data, data[0][:1]):
                expected = rescaling.expected(model(x))
                torch.testing.assert_close(changed(x), expected, rtol=1e-10, atol=1e-10)


def test_operators_that_no_test_knows_end_the_chain():
    torch.manual_seed(0)
    known = {name for name, row in OPERATORS.items() if row.flow is not None}
    others = {
        "logit": lambda m, h, s, p: h.logit(0.1),
        "addcmul": lambda m, h, s, p: torch.addcmul(h, h, h),
        "einsum": lambda m, h, s, p: torch.einsum("ni,ij->nj", h, m.mix),
        "lerp": lambda m, h, s, p: torch.lerp(h, h.relu(), 0.5),
        "hypot": lambda m, h, s, p: torch.hypot(h, h),
        "floor": method("floor"),
        "glu": lambda m, h, s, p: F.glu(h),
        "norm": lambda m, h, s, p: h.norm(dim=1, keepdim=True) * h,
    }
    assert not known & set(others)
    for name, formula in others.items():
        found = symmetries(Tried(formula).double(), torch.randn(3, 49, dtype=torch.float64))
        assert not any("fc" in group.name.split(", ") for group in found.groups), name
        reasons = next(group.reasons for group in found.fixed if "fc" in group.name.split(", "))
        assert any("is not known to keep channels apart" in reason for reason in reasons), (name, reasons)
