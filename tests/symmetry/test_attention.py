"""Attention: queries against keys, values against what follows, channel by channel."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatness
import transformer_models as nets
from flatness.errors import OptionError
from flatness.symmetry.flow.groups import symmetries
from flatness.symmetry.flow.labels import Classes
from flatness.symmetry.rewriting.base import Draw
from flatness.symmetry.rewriting.rescaling import make_rescaling, rescale
from measuring.test_transformer_layers import MODELS, built, inputs
from rewritings import changed_copy, factors_of, inverse_of

SEQUENCE = (5, 4)


class Written(nn.Module):
    """Attention with two heads as users write it."""

    def __init__(self, mix, shared_keys=False):
        super().__init__()
        self.query, self.value, self.out = (nn.Linear(4, 4) for _ in range(3))
        self.key = nn.Linear(4, 2 if shared_keys else 4)
        self.mix = [mix]

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 2)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return self.out(self.mix[0](q, k, v).transpose(1, 2).flatten(2)).mean(1)


def explicit(q, k, v):
    return (q @ k.transpose(-2, -1) / math.sqrt(2)).softmax(-1) @ v


def causal(q, k, v):
    scores = torch.matmul(q * 2**-0.5, k.mT)
    mask = torch.ones(scores.shape[-2:]).tril() == 0
    return torch.matmul(scores.masked_fill(mask, -math.inf).softmax(-1), v)


def rotated(q, k, v):
    """Rotary positions: the channels of a pair mix and share a factor."""
    angle = torch.arange(q.shape[2], dtype=q.dtype)[:, None]

    def turn(x):
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    return F.scaled_dot_product_attention(turn(q), turn(k), v)


QK = "4 channels: query (rows, bias) → key (rows, bias)"
VO = "4 channels: value (rows, bias) → out (columns)"
PATTERNS = {
    "explicit": (explicit, {}, QK),
    "causal": (causal, {}, QK),
    "fused": (F.scaled_dot_product_attention, {}, QK),
    "rotary": (rotated, {}, "2 channels: query (rows ×2, bias ×2) → key (rows ×2, bias ×2)"),
    "keys shared by heads": (
        explicit,
        {"shared_keys": True},
        "2 channels: query (rows ×2, bias ×2) → key (rows, bias)",
    ),
}


@pytest.mark.parametrize("name", list(PATTERNS))
def test_attention_written_out_of_linear_layers(name):
    mix, options, expected = PATTERNS[name]
    model, (x, _) = built(lambda: Written(mix, **options)), inputs(SEQUENCE)
    found = symmetries(model, x[:1])
    assert [str(group) for group in found.groups] == [expected, VO]
    for kind in ("neuronwise", "layerwise"):
        assert_equal_networks(model, x, found, kind)


def assert_equal_networks(model, x, found, kind):
    rescaling = make_rescaling(found, kind, Draw(seed=1))
    changed = changed_copy(model, x[:1], rescaling)
    torch.testing.assert_close(changed(2 * x), model(2 * x), rtol=1e-10, atol=1e-10)
    moved = [
        n
        for (n, a), b in zip(model.named_parameters(), changed.parameters(), strict=True)
        if bool((a != b).any())
    ]
    assert len(moved) >= 3
    again = rescale(model, x[:1], kind, factors=factors_of(rescaling))
    back = rescale(changed, x[:1], kind, factors=inverse_of(rescaling))
    for one, other in ((again, changed), (back, model)):
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_torchs_attention_by_the_names_of_its_projections():
    model, (x, _) = built(MODELS["attention samples second"][0]), inputs(SEQUENCE)
    assert str(symmetries(model, x)) == (
        "Compute\n"
        "├─ may be rescaled: 8 channels in 2 groups\n"
        "│  ├─ 4 channels: attn.q (rows, bias) → attn.k (rows, bias)\n"
        "│  └─ 4 channels: attn.v (rows, bias) → attn.out_proj (columns)\n"
        '├─ heads that may be mixed by matrices (kind="attention")\n'
        "│  ├─ 2 heads of 2 channels: attn.q ↔ attn.k\n"
        "│  └─ 2 heads of 2 channels: attn.v → attn.out_proj\n"
        "└─ fixed\n"
        "   ├─ 1 channel: attn.out_proj (rows ×4, bias ×4); the network's input\n"
        "   └─ 3 channels: head (rows, bias); the network's output"
    )


@pytest.mark.parametrize("name", ["attention", "cross attention", "encoder samples second", "decoder", "gpt"])
@pytest.mark.parametrize("kind", ["layerwise", "neuronwise"])
def test_transformers_are_equal_after_rescaling(name, kind):
    build, shape = MODELS[name]
    model, (x, _) = built(build), inputs(shape)
    assert_equal_networks(model, x, symmetries(model, x), kind)


def test_heads_have_factors_of_their_own():
    model, (x, _) = built(MODELS["attention"][0]), inputs(SEQUENCE)
    changed = rescale(model, x, "neuronwise", factors={"attn.q": [2, 2, 5, 5], "attn.v": [3, 3, 7, 7]})
    factors = torch.tensor([2, 2, 5, 5, 1 / 2, 1 / 2, 1 / 5, 1 / 5, 3, 3, 7, 7], dtype=torch.float64)
    before, after = model.attn, changed.attn
    torch.testing.assert_close(after.in_proj_weight, before.in_proj_weight * factors[:, None])
    torch.testing.assert_close(after.in_proj_bias, before.in_proj_bias * factors)
    torch.testing.assert_close(after.out_proj.weight, before.out_proj.weight / factors[8:])


def test_a_layers_factor_is_made_up_for_by_the_keys():
    model, (x, _) = built(MODELS["attention"][0]), inputs(SEQUENCE)
    changed = rescale(model, x, factors={"attn.k": 4.0})
    before, after = model.attn.in_proj_weight, changed.attn.in_proj_weight
    torch.testing.assert_close(after[:4], before[:4] / 4)
    torch.testing.assert_close(after[4:8], before[4:8] * 4)
    torch.testing.assert_close(after[8:], before[8:])
    with pytest.raises(OptionError) as error:
        rescale(model, x, factors={"attn.q": 2.0, "attn.k": 3.0})
    assert str(error.value) == (
        "Expected factors that leave the function as it is but got 3 for attn.k, where the other factors "
        "allow only 0.5. Leave 'attn.k' out to have it computed."
    )


def test_what_meets_itself_in_a_product_is_fixed():
    model = nets.Compute(
        lambda self, x: self.head((h := self.embed(x)) @ h.transpose(1, 2)).mean(1),
        embed=nn.Linear(4, 4),
        head=nn.Linear(5, 3),
    )
    found = symmetries(built(lambda: model), inputs(SEQUENCE)[0])
    assert not found.groups
    reasons = {group.name: group.reasons for group in found.fixed}
    assert reasons["embed"] == ("it meets itself in a product",)


def test_inverses_of_joined_classes_are_joined_and_fixed_together():
    classes = Classes()
    a, b, c, d = classes.fresh(4)
    classes.invert(a, b)
    classes.invert(c, d)
    assert classes.inverse(int(a)) == classes.root(int(b))
    classes.unite(a, c)
    assert classes.root(int(b)) == classes.root(int(d))
    classes.pin(d, "held")
    assert [classes.reasons(int(label)) for label in (a, b, c)] == [("held",)] * 3
    held, late = classes.fresh(2)
    classes.pin(held, "early")
    classes.invert(held, late)
    assert classes.reasons(int(late)) == ("early",)
    e, f, g = classes.fresh(3)
    classes.invert(e, f)
    classes.invert(e, g)
    assert classes.root(int(f)) == classes.root(int(g))
    classes.unite(e, f)
    assert classes.reasons(int(g)) == ("it meets itself in a product",)


# Measures on a transformer


def test_the_check_of_invariance_reaches_the_projections_of_attention():
    build, shape = MODELS["encoder"]
    report = flatness.check_invariance(
        built(build), inputs(shape), trials=1, curvature="gauss_newton", progress=False
    )
    assert report.ok
    rows = {(row.measure, row.kind, row.layer, row.reduction): row for row in report.rows}
    for part in ("q", "k", "v", "out_proj"):
        layer = f"encoder.layers.0.self_attn.{part}"
        assert rows["hessian_trace", "neuronwise", layer, None].verdict == "moves"
        assert rows["layer_flatness_trace", "layerwise", layer, None].verdict == "invariant"
        assert rows["layer_flatness_trace", "neuronwise", layer, None].verdict == "moves"
        assert rows["neuron_flatness", "neuronwise", layer, "max"].verdict == "invariant"
        assert rows["relative_flatness", "neuronwise", layer, None].declared == (part != "out_proj")


@pytest.mark.parametrize("kind", ["layerwise", "neuronwise"])
def test_measures_of_a_transformer_are_as_invariant_as_they_say(kind):
    build, shape = MODELS["encoder"]
    model, (x, y) = built(build), inputs(shape)
    found = symmetries(model, x)
    changed = changed_copy(model, x, make_rescaling(found, kind, Draw(seed=2)))
    names = [
        "relative_flatness",
        "relative_flatness_normalized",
        "neuron_flatness",
        "neuron_flatness_incoming",
        "layer_flatness_trace",
        "hessian_trace",
        "weight_norm",
    ]
    before, after = (
        flatness.measure(net, (x, y), measures=names, curvature="gauss_newton", progress=False)
        for net in (model, changed)
    )
    for measure in flatness.measures():
        if measure.name not in names:
            continue
        declared = kind in measure.invariances
        for part in ("q", "k", "v", "out_proj"):
            layer = f"encoder.layers.0.self_attn.{part}"
            own = "neuronwise except own features" in measure.invariances and not found.features_of(layer)
            for row in before.results:
                if row.measure != measure.name or row.layer != layer or row.reduction is not None:
                    continue
                drift = abs(after.value(row.measure, layer=layer, unit=row.unit) / row.value - 1)
                if declared or (kind == "neuronwise" and own):
                    assert drift < 1e-8, (measure.name, layer, row.unit, drift)
                else:
                    assert drift > 1e-3, (measure.name, layer)
