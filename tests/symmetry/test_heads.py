"""Heads of attention mixed by matrices: found in every spelling, equal networks, and refused with reasons."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatness
import transformer_models as nets
from flatness.errors import LayerError, ModelError, OptionError
from flatness.symmetry.flow.groups import symmetries
from flatness.symmetry.rewriting.base import Draw
from flatness.symmetry.rewriting.kinds.attention import Attention
from flatness.symmetry.rewriting.rescaling import make_rescaling
from measuring.test_transformer_layers import MODELS, built, inputs
from rewritings import changed_copy

SEQUENCE = (5, 8)


class Attend(nn.Module):
    """Attention over (n, 5, 8) with heads of four channels, out of Linear layers.

    Args:
        queries: Number of heads of queries.
        keys: Number of heads of keys and values.
        around: Called with queries and keys (n, heads, positions, 4): what happens to them on their way.
        after: Called with what the heads put out: what happens to it on its way.
    """

    def __init__(self, queries=2, keys=2, *, around=None, after=None, norm=None):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 4 * heads) for heads in (queries, keys, keys))
        self.o, self.repeats = nn.Linear(4 * queries, 3), queries // keys
        self.norm = norm
        self.temperature = nn.Parameter(torch.tensor([0.7, 1.3])[:queries].reshape(-1, 1, 1))
        self.steps = [around or (lambda x: x), after or (lambda x: x)]

    def forward(self, x):
        around, after = self.steps
        q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = (around(part if self.norm is None else self.norm(part)) for part in (q, k))
        k, v = (part.repeat_interleave(self.repeats, 1) for part in (k, v))
        weights = (self.temperature * q @ k.mT / 2).softmax(-1)
        return self.o(after((weights @ v).transpose(1, 2).flatten(2))).mean(1)


class Packed(nn.Module):
    """Attention of vision transformers: one Linear for queries, keys and values."""

    def __init__(self, fused):
        super().__init__()
        self.qkv, self.proj, self.fused = nn.Linear(8, 24), nn.Linear(8, 3), fused

    def forward(self, x):
        n, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(n, length, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            mixed = F.dropout((q * 0.5 @ k.transpose(-2, -1)).softmax(dim=-1), 0.1, self.training) @ v
        return self.proj(mixed.transpose(1, 2).reshape(n, length, 8)).mean(1)


class Grouped(nn.Module):
    """Four heads of queries on two of keys and values, left to torch's kernel."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, size) for size in (16, 8, 8, 8))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.head(mixed.transpose(1, 2).flatten(2).mean(1))


def angles(x):
    """Of both frequencies at every position."""
    return torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1], dtype=x.dtype)


def rotary_halves(x):
    """Channel i turns with channel i + 2."""
    angle = torch.cat([angles(x)] * 2, -1)
    first, second = x.chunk(2, -1)
    return x * angle.cos() + torch.cat([-second, first], -1) * angle.sin()


def rotary_neighbours(x):
    """Channel 2i turns with channel 2i + 1."""
    a, b, angle = x[..., ::2], x[..., 1::2], angles(x)
    return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).flatten(-2)


def rotary_in_part(x):
    """Only the first two channels turn."""
    a, b, angle = x[..., :1], x[..., 1:2], angles(x)[:, :1]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos(), x[..., 2:]], -1)


FOUND = {
    "written out": (Attend, ["2 heads of 4 channels: q ↔ k", "2 heads of 4 channels: v → o"]),
    "grouped": (
        lambda: Attend(2, 1),
        ["1 head of 4 channels: q ↔ k", "1 head of 4 channels: v → o"],
    ),
    "grouped by torch": (Grouped, ["2 heads of 4 channels: q ↔ k", "2 heads of 4 channels: v → head"]),
    "packed": (
        lambda: Packed(fused=False),
        ["2 heads of 4 channels: qkv.q ↔ qkv.k", "2 heads of 4 channels: qkv.v → proj"],
    ),
    "packed and fused": (
        lambda: Packed(fused=True),
        ["2 heads of 4 channels: qkv.q ↔ qkv.k", "2 heads of 4 channels: qkv.v → proj"],
    ),
    "rotary halves": (
        lambda: Attend(around=rotary_halves),
        ["2 heads of 2 rotary pairs: q ↔ k", "2 heads of 4 channels: v → o"],
    ),
    "rotary neighbours": (
        lambda: Attend(2, 1, around=rotary_neighbours),
        ["1 head of 2 rotary pairs: q ↔ k", "1 head of 4 channels: v → o"],
    ),
    "rotary in part": (
        lambda: Attend(around=rotary_in_part),
        ["2 heads of 2 channels and 1 rotary pair: q ↔ k", "2 heads of 4 channels: v → o"],
    ),
}
REFUSED = {
    "a norm with a scale": (
        lambda: Attend(norm=nn.RMSNorm(4)),
        ["queries and keys of matmul: rms_norm in norm divides by their size, which no matrix passes"],
        ["v"],
    ),
    "a norm without": (
        lambda: Attend(norm=nn.LayerNorm(4, elementwise_affine=False)),
        ["queries and keys of matmul: layer_norm in norm divides by their size, which no matrix passes"],
        ["v"],
    ),
    "values bent on their way": (
        lambda: Attend(after=torch.relu),
        ["values of matmul: relu does not treat their channels alike"],
        ["q"],
    ),
    "channels multiplied by different numbers": (
        lambda: Attend(around=lambda x: x * torch.arange(1.0, 5, dtype=x.dtype)),
        ["queries and keys of matmul: mul multiplies each channel by a number of its own"],
        ["v"],
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_heads_in_every_spelling_make_equal_networks(name):
    build, lines = FOUND[name]
    model, (x, _) = built(build), inputs(SEQUENCE)
    found = symmetries(model, x[:2])
    assert found.attention.in_words == lines
    assert_mixed(model, x, {part.parameter for head in found.attention.heads for part in head.parts})


@pytest.mark.parametrize("name", ["attention", "attention without bias", "cross attention", "decoder", "gpt"])
def test_heads_of_torchs_modules_and_of_gpt2_make_equal_networks(name):
    build, shape = MODELS[name]
    model, (x, _) = built(build), inputs(shape)
    heads = symmetries(model, x).attention.heads
    assert {(head.compares, len(head.channels)) for head in heads} == {(True, 2), (False, 2)}
    assert len(heads) == (8 if name == "decoder" else 4)
    assert_mixed(model, x, {part.parameter for head in heads for part in head.parts})


def assert_mixed(model, x, names):
    """Parameters of heads change and no others, and outputs on other data stay."""
    changed = flatness.rescale(model, x[:2], kind="attention", seed=4)
    new = 2 * torch.randn(7, *x.shape[1:], dtype=x.dtype, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(changed(new), model(new), rtol=1e-10, atol=1e-10)
    after = dict(changed.named_parameters())
    assert {name for name, value in model.named_parameters() if not torch.equal(value, after[name])} == names


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_not_be_mixed_is_named_and_the_rest_is(name):
    build, reasons, rest = REFUSED[name]
    model, (x, _) = built(build), inputs(SEQUENCE)
    found = symmetries(model, x[:2]).attention
    assert list(found.reasons) == reasons
    assert sorted({head.name for head in found.heads}) == rest
    assert f"   not the {reasons[0]}" in str(symmetries(model, x[:2])).replace("│  └─", "  ")
    changed = flatness.rescale(model, x[:2], kind="attention")
    torch.testing.assert_close(changed(x), model(x), rtol=1e-10, atol=1e-10)


def test_matrices_do_what_they_say_to_each_head():
    model, (x, _) = built(Attend), inputs(SEQUENCE)
    A, B = (
        torch.randn(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (1, 2)
    )
    changed = flatness.rescale(model, x[:2], "attention", factors={"q": A, "v": B})
    for head in range(2):
        own = slice(4 * head, 4 * head + 4)
        a, b = A[head], B[head]
        for layer, matrix in (("q", a.T), ("k", a.inverse()), ("v", b)):
            before, after = model.get_submodule(layer), changed.get_submodule(layer)
            torch.testing.assert_close(after.weight[own], matrix @ before.weight[own])
            torch.testing.assert_close(after.bias[own], matrix @ before.bias[own])
        torch.testing.assert_close(changed.o.weight[:, own], model.o.weight[:, own] @ b.inverse())
    assert torch.equal(changed.o.bias, model.o.bias)
    back = flatness.rescale(changed, x[:2], "attention", factors={"q": A.inverse(), "v": B.inverse()})
    for one, other in zip(back.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_one_matrix_of_a_group_serves_all_its_query_heads():
    model, (x, _) = built(lambda: Attend(2, 1)), inputs(SEQUENCE)
    A = torch.tensor([[1.0, 2, 0, 0], [0, 1, 0, 0], [0, 3, 1, 0], [0, 0, 0, 2]], dtype=torch.float64)
    changed = flatness.rescale(model, x[:2], "attention", factors={"q": A})
    expected = torch.cat([A.T @ model.q.weight[:4], A.T @ model.q.weight[4:]])
    torch.testing.assert_close(changed.q.weight, expected)
    torch.testing.assert_close(changed.k.weight, A.inverse() @ model.k.weight)
    assert torch.equal(changed.v.weight, model.v.weight)


@pytest.mark.parametrize(("condition", "most"), [(None, 25.0), (3.0, 3.0), (1.0, 1.0), (1e6, 25.0)])
def test_singular_values_lie_between_low_and_high_and_within_the_condition(condition, most):
    model, (x, _) = built(lambda: Attend(around=rotary_in_part)), inputs(SEQUENCE)
    found = symmetries(model, x[:2])
    largest = 0.0
    for seed in range(20):
        made = make_rescaling(found, "attention", Draw(seed=seed, condition=condition))
        assert isinstance(made, Attention)
        for matrix in made.matrices:
            values = torch.linalg.svdvals(matrix)
            assert 0.2 - 1e-12 <= values.min() <= values.max() <= 5 + 1e-12
            largest = max(largest, float(values.max() / values.min()))
    assert 0.8 * most < largest * (1 + 1e-12) <= most * (1 + 1e-9)


def test_the_seed_decides_and_heads_get_matrices_of_their_own():
    model, (x, _) = built(Attend), inputs(SEQUENCE)
    found = symmetries(model, x[:2])
    first, again, other = (make_rescaling(found, "attention", Draw(seed=seed)) for seed in (1, 1, 2))
    for one, same, different in zip(first.matrices, again.matrices, other.matrices, strict=True):
        assert torch.equal(one, same)
        assert not torch.equal(one, different)
    assert len({float(matrix[0, 0]) for matrix in first.matrices}) == 4


# ---- refusals


def refused(model, x, error, **arguments):
    with pytest.raises(error) as caught:
        flatness.rescale(model, x, kind="attention", **arguments)
    return str(caught.value)


def test_a_network_without_attention_is_told_what_was_looked_for():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    assert refused(model, torch.randn(2, 4), ModelError) == (
        "Expected a network with attention for kind='attention' but found none in Sequential. What is "
        "recognised: scaled_dot_product_attention (as in nn.MultiheadAttention), or a product of two values, "
        "a softmax and a product with a third value. Print flatness.symmetries(model, example) for what may "
        "be rescaled."
    )


def test_attention_that_runs_twice_is_refused_with_the_reason():
    build, shape = MODELS["attention twice"]
    assert refused(built(build), inputs(shape)[0], ModelError) == (
        "Expected attention whose heads may be mixed but in Compute none may: queries and keys of matmul in "
        "attn: attn.in_proj_weight is used 6 times, values of matmul in attn: attn.in_proj_weight is used 6 "
        "times. kind='neuronwise' may still work."
    )


def test_a_matrix_that_float32_cannot_carry_is_refused_with_the_precision_left():
    model, (x, _) = built(Attend).float(), inputs(SEQUENCE)
    x = x.float()
    stretched = torch.diag(torch.tensor([1.0, 1, 1, 1e5]))
    assert refused(model, x[:2], OptionError, factors={"q": stretched}) == (
        "Expected matrices that float32 can multiply by and undo but got a condition number of 1e+05, which "
        "leaves 1.9 of its 6.9 digits. Convert the model with model.double(), or keep the condition number "
        "below 2.9e+03: pass condition=10."
    )
    changed = flatness.rescale(model, x[:2], kind="attention", low=1e-3, high=1e3, condition=100.0)
    torch.testing.assert_close(changed(x), model(x), rtol=1e-3, atol=1e-4)
    doubled = flatness.rescale(model.double(), x[:2].double(), "attention", factors={"q": stretched})
    torch.testing.assert_close(doubled(x.double()), model(x.double()), rtol=1e-8, atol=1e-8)


WANTED = "Expected an invertible matrix 4×4 for 'q', or 2 of them, one for each head, but got "


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"k": torch.eye(4)},
            LayerError,
            "Expected matrices for layers of queries or values but got 'k'. Layers: q, v.",
        ),
        ({"q": torch.eye(3)}, OptionError, WANTED + "3×3."),
        ({"q": 2.0}, OptionError, WANTED + "one number."),
        ({"q": "A"}, OptionError, WANTED + "'A'."),
        ({"q": torch.ones(4, 4)}, OptionError, WANTED + "one that has no inverse. Leave 'q' out to keep it."),
    ],
)
def test_matrices_of_the_wrong_form_are_refused(given, error, message):
    assert refused(built(Attend), inputs(SEQUENCE)[0][:2], error, factors=given) == message


def test_rotary_embeddings_let_scaled_rotations_of_pairs_through_and_nothing_else():
    model, (x, _) = built(lambda: Attend(around=rotary_halves)), inputs(SEQUENCE)
    A = torch.zeros(4, 4, dtype=torch.float64)
    A[0, 0] = A[2, 2] = A[1, 1] = A[3, 3] = 2.0
    A[0, 2], A[2, 0] = 1.0, -1.0
    changed = flatness.rescale(model, x[:2], "attention", factors={"q": A})
    torch.testing.assert_close(changed(x), model(x), rtol=1e-10, atol=1e-10)
    A[0, 1] = 0.1
    assert refused(model, x[:2], OptionError, factors={"q": A}) == (
        "Expected a matrix for 'q' that leaves the function as it is but got another: rotary embeddings turn "
        "channels in pairs, and let a scaled rotation of each pair through. Leave 'q' out, or draw one: "
        "flatness.rescale(model, example, kind='attention')."
    )


def test_the_condition_belongs_to_this_kind_and_is_a_number_of_at_least_one():
    model, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), torch.randn(2, 4)
    with pytest.raises(OptionError) as error:
        flatness.rescale(model, x, condition=3.0)
    assert str(error.value) == (
        "Expected condition only with kind='attention', whose factors are matrices, but got it with "
        "kind='layerwise'. Pass low and high."
    )
    for wrong in (0.5, math.inf, "3"):
        with pytest.raises(OptionError) as error:
            flatness.rescale(model, x, kind="attention", condition=wrong)
        assert str(error.value) == (
            f"Expected condition to be a number of at least 1, the condition number of matrices, but got "
            f"{wrong!r}. For example condition=10."
        )


def test_heads_that_do_not_divide_the_queries_stop_where_the_model_does():
    model = nets.Compute(lambda self, x: self.q(x).unflatten(-1, (4, -1)).sum(2), q=nn.Linear(8, 10))
    message = refused(built(lambda: model), inputs(SEQUENCE)[0], ModelError)
    assert message.startswith("Expected an example that the model can run on but Compute stopped at float64")
    assert "unflatten: Provided sizes [4, -1] don't multiply up to the size of dim 2 (10)" in message


# ---- what measures say of it

ROLES = {"q": "attn.q", "k": "attn.k", "v": "attn.v", "o": "attn.out_proj"}
# Which roles leave a measure of layers as it is: q, k and v are invertible maps of a layer's outputs, o of
# its inputs. Measures of the network see all of them.
LEAVES = {
    "relative_flatness": "qkv",
    "relative_flatness_normalized": "qkv",
    "relative_flatness_whitened": "qkvo",
    "relative_spectral_norm": "qkv",
    "neuron_flatness": "qkv",
    "neuron_flatness_incoming": "o",
}
OF_NETWORK = {"fisher_rao", "geodesic_sharpness"}


@pytest.fixture(scope="module")
def before_and_after():
    """Every measure of a network with attention, before and after its heads were mixed."""
    build, shape = MODELS["attention"]
    model, data = built(build), inputs(shape)
    changed = changed_copy(
        model, data[0], make_rescaling(symmetries(model, data[0]), "attention", Draw(seed=2))
    )
    return [
        flatness.measure(
            net,
            data,
            measures="all",
            curvature="gauss_newton",
            options={"pac_bayes_bound": {"draws": 5}},
            progress=False,
        )
        for net in (model, changed)
    ]


def drift(reports, measure, layer):
    """Largest change of a measure's rows about a layer, relative to its largest value."""
    before, after = (
        torch.tensor([row.value for row in report.results if (row.measure, row.layer) == (measure, layer)])
        for report in reports
    )
    return float((after - before).abs().max() / before.abs().max()) if len(before) else None


@pytest.mark.parametrize("measure", [measure.name for measure in flatness.measures()])
def test_every_measure_is_left_by_exactly_the_roles_that_it_declares(before_and_after, measure):
    declared = flatness.measures(measure).invariances
    roles = "qkvo" if "attention" in declared else ""
    roles += "qkv" * ("attention q, k, v" in declared) + "o" * ("attention o" in declared)
    assert set(roles) == set("qkvo" if measure in OF_NETWORK else LEAVES.get(measure, ""))
    if measure == "path_norm":  # not defined here
        return
    changes = {role: drift(before_and_after, measure, layer) for role, layer in ROLES.items()}
    for role, change in changes.items():
        assert change is None or (change < 1e-8 if role in roles else change > 1e-3), (role, change)
    whole = drift(before_and_after, measure, None)
    assert whole is None or (whole < 1e-8 if set(roles) == set("qkvo") else whole > 1e-4), whole
    head = drift(before_and_after, measure, "head")
    assert head is None or head < 1e-8


def test_the_check_reports_what_is_declared_for_the_roles_of_each_layer():
    build, shape = MODELS["gpt"]
    report = flatness.check_invariance(
        built(build),
        inputs(shape),
        measures=["relative_flatness", "neuron_flatness_incoming", "hessian_trace", "fisher_rao"],
        kinds="attention",
        trials=2,
        condition=4.0,
        curvature="gauss_newton",
        progress=False,
    )
    assert report.ok, report.summary()
    verdicts = {
        (row.measure, row.layer): row.verdict for row in report.rows if row.reduction in (None, "sum")
    }
    packed, out = "block.c_attn", "block.c_proj"
    assert verdicts["relative_flatness", packed] == "invariant"
    assert verdicts["relative_flatness", out] == "moves"
    assert verdicts["relative_flatness", None] == "moves"
    assert verdicts["relative_flatness", "head"] == "untouched"
    assert verdicts["neuron_flatness_incoming", packed] == "moves"
    assert verdicts["neuron_flatness_incoming", out] == "invariant"
    assert verdicts["hessian_trace", packed] == verdicts["hessian_trace", out] == "moves"
    assert verdicts["fisher_rao", None] == "invariant"
