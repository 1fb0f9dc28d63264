"""The residual's part from right behind a layer: exact or split, never biased, and less noise."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flatness
import oracle
from flatness.curvature.sums import own_curvature
from flatness.curvature.sums.sampled import balance
from flatness.curvature.sums.statistics import Statistics
from flatness.measuring.run import pilot
from flatness.network.layers import find_layers
from flatness.network.recording import Recording
from flatness.network.segments import find_segments

T, WIDTH, HEADS = 4, 4, 2


class Attending(nn.Module):
    """Attention over four tokens, its projections packed into one layer or apart, and a linear read-out."""

    def __init__(self, packed):
        super().__init__()
        torch.manual_seed(3)
        sizes = {"qkv": 3 * WIDTH} if packed else dict.fromkeys("qkv", WIDTH)
        for name, size in sizes.items():
            setattr(self, name, nn.Linear(3, size))
        self.packed, self.out, self.head = packed, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        parts = self.qkv(x).chunk(3, -1) if self.packed else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(torch.tanh(self.out(mixed.transpose(1, 2).flatten(2))).mean(1))


class Gated(nn.Module):
    """SwiGLU between two layers."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(3, 5), nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x)).mean(1)


class Followed(nn.Module):
    """Two layers with a function of the caller's between them."""

    def __init__(self, between):
        super().__init__()
        self.first, self.last, self.between = nn.Linear(3, 4), nn.Linear(4, 3), between

    def forward(self, x):
        return self.last(self.between(self.first(x))).mean(1)


def inputs(n=6):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, T, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (n,), generator=generator)


def segments(model, x):
    views = find_layers(model)
    modules = {name: view.module for name, view in views.items()}
    with Recording(modules) as calls, sdpa_kernel(SDPBackend.MATH):
        output = model(x.requires_grad_())
        edges = {name: own[0].z_edge for name, own in calls.calls.items()}
        return find_segments(output, edges, {(name, 0): own[0].x_edge for name, own in calls.calls.items()})


def measured(model, data, **options):
    asked = {"method": "sampled", "measures": ["relative_flatness", "hessian_trace"], "progress": False}
    return flatness.measure(model.double().eval(), data, **(asked | options))


def risk(x, y):
    return lambda logits: F.cross_entropy(logits, y)


@pytest.mark.parametrize(
    "between, entrywise",
    [
        (F.gelu, True),
        (lambda z: z * z.sigmoid(), True),
        (lambda z: 0.5 * z * (1 + torch.tanh(z + 0.04 * z**3)), True),
        (lambda z: torch.tanh(z.transpose(1, 2)).transpose(1, 2), True),
        (lambda z: z * z.flip(-1).sigmoid(), False),
        (lambda z: z * z.transpose(1, 2).transpose(1, 2), False),  # it may have been turned once only
        (lambda z: z * z.mean(-1, keepdim=True), False),
        (lambda z: F.layer_norm(z, (4,)), False),
        (lambda z: z.softmax(-1), False),
    ],
)
def test_functions_of_single_entries_are_told_from_others(between, entrywise):
    (segment,) = segments(Followed(between).double(), inputs()[0])
    assert (segment.layers, segment.end) == (("first",), ("last", 0))
    assert segment.entrywise == frozenset({"first"} if entrywise else ())


def test_segments_end_where_a_layer_acts_through_one_module_alone():
    found = {one.end[0]: one for one in segments(Gated().double(), inputs()[0])}
    assert set(found["down"].layers) == set(found["down"].entrywise) == {"gate", "up"}
    apart = {one.end[0]: one for one in segments(Attending(False).double(), inputs()[0])}
    assert set(apart["out"].layers) == {"q", "k", "v"}
    assert apart["out"].attends
    assert apart["head"].layers == ("out",)
    assert not apart["head"].attends

    class Skipped(Followed):
        def forward(self, x):
            z = self.first(x)
            return (self.last(torch.tanh(z)) + z[..., :3]).mean(1)

    assert segments(Skipped(None).double(), inputs()[0]) == []


EVERYTHING = [
    "relative_flatness",
    "relative_flatness_normalized",
    "relative_flatness_whitened",
    "hessian_trace",
    "neuron_flatness",
    "neuron_flatness_incoming",
    "maximal_relative_flatness",
]


@pytest.mark.parametrize("between", [F.gelu, F.silu, torch.tanh])
def test_where_everything_curved_is_entrywise_nothing_random_is_left(between):
    x, y = inputs()
    model, how = Followed(between), {"measures": EVERYTHING, "layers": ["first"]}
    found = measured(model, (x, y), max_passes=8, **how)
    expected = measured(model, (x, y), method="exact", **how)
    rows = zip(found.results, expected.results, strict=True)
    for mine, row in rows:
        assert (mine.measure, mine.layer, mine.unit) == (row.measure, row.layer, row.unit)
        assert mine.value == pytest.approx(row.value, rel=1e-9), row
        assert mine.stderr <= 1e-9 * abs(row.value)


def test_convolutions_with_several_taps_and_groups():
    torch.manual_seed(0)
    x, y = torch.randn(5, 4, 6, 6, dtype=torch.float64), torch.randint(3, (5,))
    model = nn.Sequential(
        nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
        nn.BatchNorm2d(6),
        nn.SiLU(),
        nn.Conv2d(6, 3, 3),
        nn.Flatten(),
    ).double()
    model[1].running_mean.normal_()
    found = measured(model, (x, y), layers=["0"], max_passes=8)
    H = oracle.layer_hessian(model, lambda model: F.cross_entropy(model(x), y), "0")
    assert found.value("hessian_trace", layer="0") == pytest.approx(float(oracle.diagonal(H).sum()), rel=1e-9)
    assert found.result("relative_flatness", layer="0").stderr < 1e-9


@pytest.mark.parametrize("model", [Attending(True), Attending(False)], ids=["packed", "apart"])
def test_estimates_are_off_by_standard_errors(model, monkeypatch):
    monkeypatch.setattr(own_curvature, "LONG", T)
    monkeypatch.setattr(pilot, "_MOST_ALONE", 0)  # one pass for all layers, as in large networks
    data = inputs()
    exact = measured(model, data, method="exact")
    names = [name for name in exact.layers() if name != "head"]
    scores = []
    for seed in range(16):
        found = measured(model, data, seed=seed, max_passes=40, precision=0.01)
        for measure in ("relative_flatness", "hessian_trace"):
            rows = [(found.result(measure, layer=name), exact.value(measure, layer=name)) for name in names]
            scores += [(row.value - value) / row.stderr for row, value in rows if row.stderr > 1e-12]
    scores = torch.tensor(scores)
    assert len(scores) >= 32
    assert scores.mean().abs() < 4 * scores.std() / 16**0.5  # layers share their probes
    assert 0.7 < scores.square().mean().sqrt() < 1.4


class Normed(nn.Module):
    """A norm between two layers, whose scale and shift every token meets."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x)))).mean(1)


def test_scales_and_shifts_of_norms_are_probed_without_bias():
    data, model = inputs(), Normed()
    exact = measured(model, data, method="exact").result("hessian_trace", layer=None, reduction=None).value
    found = [measured(model, data, seed=seed, max_passes=40, precision=0.01) for seed in range(16)]
    rows = [report.result("hessian_trace", layer=None, reduction=None) for report in found]
    scores = torch.tensor([(row.value - exact) / row.stderr for row in rows])
    assert scores.mean().abs() < 3 / 16**0.5
    assert 0.6 < scores.square().mean().sqrt() < 1.5


def test_noisier_layers_are_louder_and_what_only_enters_the_network_is_quieter():
    variances = {name: [torch.tensor([value])] for name, value in {"a": 1.0, "b": 81.0, "c": 1e9}.items()}
    evened = pilot._evened(dict.fromkeys("abcd", 2.0), variances)
    assert evened == pytest.approx({"a": 1.0, "b": 2.0, "c": 4.0, "d": 2.0}, rel=1e-6)
    statistics = Statistics()
    for name in ("layer", "norm.weight", "norm.bias"):
        key = "row_traces" if name == "layer" else "diagonal"
        statistics.add(name, key, torch.tensor([4.0]) if name == "layer" else torch.tensor([2.0]))
    assert balance(statistics, ["layer", "norm"], ["layer"]) == {"layer": 0.5, "norm": 0.125}


@pytest.mark.parametrize("packed", [True, False])
def test_attention_has_less_noise_than_without(packed, monkeypatch):
    monkeypatch.setattr(own_curvature, "LONG", T)
    monkeypatch.setattr(pilot, "_MOST_ALONE", 0)
    data, model = inputs(24), Attending(packed)
    names = ["qkv"] if packed else ["q", "k"]

    def variances():
        found = [measured(model, data, seed=seed, max_passes=8, precision=1e-3) for seed in range(6)]
        return {
            measure: sum(report.result(measure, layer=name).stderr ** 2 for report in found for name in names)
            for measure in ("relative_flatness", "hessian_trace")
        }

    split = variances()
    monkeypatch.setattr(own_curvature, "find_segments", lambda *_: [])
    whole = variances()
    assert split["hessian_trace"] < 0.7 * whole["hessian_trace"]
    assert split["relative_flatness"] < whole["relative_flatness"]
