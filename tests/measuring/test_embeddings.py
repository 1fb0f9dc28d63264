"""Tables as layers: rows of their own, repeated tokens, positions, padding, ties; against dense Hessians."""

import pytest
import torch
import torch.nn.functional as F
from test_sampled import rows_over_seeds
from test_transformer_layers import assert_layer_is_right
from torch import nn

import flatness
import oracle
import transformer_models as nets
from flatness.curvature.sums.sampled import Budget
from flatness.measuring.plan.planner import make_plan
from flatness.measuring.request import measure_request
from flatness.problem.problem import Problem
from networks import token_cross_entropy
from small import measure
from untouched import untouched

TOKENS, LENGTH, WIDTH = 6, 3, 4


def tables(**parts):
    """Tokens and positions are looked up and added, mixed from left to right, and predicted from."""

    def forward(self, x):
        h = self.token(x) + self.place(self.positions(x))
        h = h + torch.tanh(self.mix(h)).cumsum(1)
        return self.head(h)

    model = nets.Compute(
        forward,
        token=nn.Embedding(TOKENS, WIDTH),
        place=nn.Embedding(LENGTH, WIDTH),
        mix=nn.Linear(WIDTH, WIDTH),
        head=nn.Linear(WIDTH, TOKENS),
        **parts,
    ).double()
    model.positions = lambda x: torch.arange(x.shape[1])
    return model


def built(**parts):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return tables(**parts).eval()


def data(n=5, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(TOKENS, (n, LENGTH), generator=generator) for _ in range(2))


def assert_right(report, model, x, y, layers, loss=token_cross_entropy):
    for layer in layers:
        parameter, entries = oracle.layer_entries(model, layer)
        flat = entries.flatten()
        full = oracle.hessian(model, oracle.mean_risk(x, y, loss), [parameter])[flat][:, flat]
        V = oracle.feature_spread(oracle.channel_inputs(model, x, layer))
        assert_layer_is_right(report, layer, oracle.layer_weight(model, layer), full, V, 1)


def planned(model, given):
    problem = Problem(model, given, progress=False)
    with problem.guarded():
        return make_plan(problem, measure_request(["hessian_trace"]))


POSITIONS = {
    "one vector": lambda x: torch.arange(x.shape[1]),
    "one row": lambda x: torch.arange(x.shape[1])[None],
    "a row a sample": lambda x: torch.arange(x.shape[1]).expand(x.shape),
}


@pytest.mark.parametrize("positions", POSITIONS)
def test_every_measure_of_tokens_and_positions(positions):
    model, (x, y) = built(), data()
    model.positions = POSITIONS[positions]
    with untouched(model, x, y):
        report = measure(model, (x, y), method="exact", batch_size=2)
    assert report.layers() == ["token", "place", "mix", "head"]
    assert_right(report, model, x, y, ["token", "place"])
    trace = oracle.total_trace(model, oracle.mean_risk(x, y, token_cross_entropy))
    assert report.value("hessian_trace") == pytest.approx(trace, rel=1e-9)


def test_white_tokens_weigh_as_often_as_they_occur():
    """The metric is (W diag f Wᵀ) ⊗ diag 1/f; tokens that never occur have no part in it."""
    model, (x, y) = built(), data()
    x[x == 1] = 0
    options = {"relative_spectral_norm": {"whitened": True, "tolerance": 1e-9}}
    names = ["relative_flatness_whitened", "relative_spectral_norm"]
    report = flatness.measure(model, (x, y), measures=names, options=options, method="exact", progress=False)
    for layer in ("token", "place"):
        parameter, entries = oracle.layer_entries(model, layer)
        W, flat = oracle.layer_weight(model, layer), entries.flatten()
        H = oracle.hessian(model, oracle.mean_risk(x, y, token_cross_entropy), [parameter])[flat][:, flat]
        phi = oracle.channel_inputs(model, x, layer)
        D = oracle.whitened_metric(W, (phi.T @ phi / len(phi))[None])[0].reshape(W.numel(), -1)
        trace, largest = (D * H).sum().item(), torch.linalg.eigvals(D @ H).real.max().item()
        assert report.value(names[0], layer=layer) == pytest.approx(trace, rel=1e-9)
        assert report.value(names[1], layer=layer) == pytest.approx(largest, rel=1e-6)


@pytest.mark.parametrize("positions", POSITIONS)
def test_positions_take_no_products_of_their_own(positions):
    model = built()
    model.positions = POSITIONS[positions]
    plan = planned(model, data())
    assert not plan.by_parameters


def test_a_table_that_is_used_for_all_samples_together_takes_products():
    """Distances between positions: no copy for each sample fits into what follows."""

    def forward(self, x):
        steps = torch.arange(x.shape[1])
        bias = self.distance((steps[:, None] - steps).abs()).permute(2, 0, 1)
        h = self.token(x)
        return self.head(torch.tanh(bias.softmax(-1) @ h + h))

    torch.manual_seed(2)
    parts = {"token": nn.Embedding(TOKENS, WIDTH), "distance": nn.Embedding(LENGTH, 1)}
    model = nets.Compute(forward, **parts, head=nn.Linear(WIDTH, TOKENS)).double()
    x, y = data()
    assert planned(model, (x, y)).treatments["distance"].through_parameter
    report = measure(model, (x, y), measures="all", method="exact", layers=["token", "distance"])
    assert_right(report, model, x, y, ["token", "distance"])


def test_a_table_of_which_the_first_row_is_taken_acts_on_all_samples():
    """With a copy for each sample, the first one's would act on all of them, and no output be another."""

    def forward(self, x):
        return self.head(torch.tanh(self.token(x) + self.place(torch.arange(LENGTH)[None])[0]))

    torch.manual_seed(2)
    parts = {"token": nn.Embedding(TOKENS, WIDTH), "place": nn.Embedding(LENGTH, WIDTH)}
    parts["unused"] = nn.Embedding(2, WIDTH)
    model = nets.Compute(forward, **parts, head=nn.Linear(WIDTH, TOKENS)).double()
    x, y = data()
    assert planned(model, (x, y)).treatments["place"].through_parameter
    report = measure(model, (x, y), method="exact")
    assert_right(report, model, x, y, ["token", "place"])


def test_padding_counts_for_nothing():
    model, (x, y) = built(), data(8)
    padded = nn.Embedding(TOKENS, WIDTH, padding_idx=2).double()
    model.token = padded
    assert bool((x == 2).any())
    report = measure(model, (x, y), method="exact")
    assert_right(report, model, x, y, ["token"])


@pytest.mark.parametrize("curvature", ["hessian", "gauss_newton"])
def test_a_piecewise_linear_network_behind_a_table_is_exact(curvature):
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Embedding(TOKENS, WIDTH), nn.Flatten(), nn.Linear(LENGTH * WIDTH, 8), nn.ReLU(), nn.Linear(8, 3)
    ).double()
    x, y = data(9)[0], torch.arange(9) % 3
    report = measure(model, (x, y), curvature=curvature, batch_size=4)
    assert report.result("relative_flatness", layer="0").method == "exact"
    assert_right(report, model, x, y, ["0"], F.cross_entropy)


def test_two_tables_of_one_weight_are_one_layer():
    """As in T5, whose encoder and decoder look up the same table."""

    def forward(self, x):
        return self.head(torch.tanh(self.mix(torch.tanh(self.first(x)))) + self.second(x.flip(1)))

    torch.manual_seed(4)
    parts = {"first": nn.Embedding(TOKENS, WIDTH), "second": nn.Embedding(TOKENS, WIDTH)}
    model = nets.Compute(
        forward, **parts, mix=nn.Linear(WIDTH, WIDTH), head=nn.Linear(WIDTH, TOKENS)
    ).double()
    model.second.weight = model.first.weight
    x, y = data()
    report = measure(model, (x, y), method="exact")
    assert report.layers() == ["first", "mix", "head"]
    parameter, entries = oracle.layer_entries(model, "first")
    flat = entries.flatten()
    risk = oracle.mean_risk(x, y, token_cross_entropy)
    H = oracle.within_groups(
        oracle.hessian(model, risk, [parameter])[flat][:, flat], oracle.layer_weight(model, "first")
    )
    assert report.value("hessian_trace", layer="first") == pytest.approx(oracle.hessian_trace(H), rel=1e-9)
    kappa = oracle.relative_flatness(oracle.layer_weight(model, "first"), H)
    assert report.value("relative_flatness", layer="first") == pytest.approx(kappa, rel=1e-9)


def test_a_tied_table_is_measured_as_the_layer_it_is_tied_to():
    model, (x, y) = built(), data()
    model.head = nn.Linear(WIDTH, TOKENS, bias=False).double()
    model.head.weight = model.token.weight
    report = measure(model, (x, y), method="exact")
    assert report.layers() == ["place", "mix", "head"]
    assert any("token shares the weight of head" in note for note in report.notes)
    assert measure(model, (x, y), layers="token", method="exact").layers() == ["head"]


@pytest.mark.parametrize("layer", ["token", "place"])
def test_sampled_values_are_unbiased_and_their_errors_honest(layer):
    model, (x, y) = built(), data(24)
    truth = oracle.hessian_trace(
        oracle.layer_hessian(model, oracle.mean_risk(x, y, token_cross_entropy), layer)
    )
    runs = rows_over_seeds(model, x, y, "hessian_trace", Budget(2, 4), 60)
    rows = [next(row for row in run if row.layer == layer) for run in runs]
    z = torch.tensor([(row.value - truth) / row.stderr for row in rows])
    assert abs(float(z.mean())) < 4 / len(z) ** 0.5
    assert abs(float(z.var()) - 1) < 4 * (2 / len(z)) ** 0.5


def tall_table():
    """A table of 24 tokens is the head as well."""
    torch.manual_seed(4)
    model = nets.Compute(
        lambda self, x: self.head(torch.tanh(self.mix(self.token(x))).cumsum(1)),
        token=nn.Embedding(24, 4),
        mix=nn.Linear(4, 4),
        head=nn.Linear(4, 24, bias=False),
    ).double()
    model.head.weight = model.token.weight
    x, y = (torch.randint(24, (16, 3), generator=torch.Generator().manual_seed(k)) for k in (5, 6))
    return model, x, y, token_cross_entropy, "head"


def tall_twice():
    """A layer of three inputs runs a second time, on what it returned."""
    torch.manual_seed(7)
    model = nets.Compute(
        lambda self, x: self.head(torch.tanh(self.tall(torch.tanh(self.tall(x))[:, :3]))),
        tall=nn.Linear(3, 16),
        head=nn.Linear(16, 4),
    ).double()
    x = torch.randn(16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    return model, x, torch.arange(16) % 4, F.cross_entropy, "tall"


RELATIVE = ["relative_flatness", "relative_flatness_normalized", "relative_flatness_whitened"]


@pytest.mark.parametrize("case", [tall_table, tall_twice])
@pytest.mark.parametrize("count", [1, 3])
def test_probes_fitted_to_relative_flatness_are_unbiased_and_their_errors_honest(case, count):
    model, x, y, loss, layer = case()
    names = [*RELATIVE[:count], "hessian_trace"]
    truth = measure(model, (x, y), measures=names, method="exact")
    H = oracle.layer_hessian(model, oracle.mean_risk(x, y, loss), layer)
    dense = oracle.relative_flatness(oracle.layer_weight(model, layer), H)
    assert truth.value("relative_flatness", layer=layer) == pytest.approx(dense, rel=1e-9)
    runs = rows_over_seeds(model, x, y, names, Budget(2, 4 * (1 + count), kinds=1 + count), 100)
    for name in names:
        rows = [next(row for row in run if (row.measure, row.layer) == (name, layer)) for run in runs]
        z = torch.tensor([(row.value - truth.value(name, layer=layer)) / row.stderr for row in rows])
        assert abs(float(z.mean())) < 4 / len(z) ** 0.5, name
        assert abs(float(z.var()) - 1) < 4 * (2 / len(z)) ** 0.5, name


def test_probes_fitted_to_relative_flatness_have_less_noise_in_a_tall_table():
    model, x, y, _, layer = tall_table()

    def noise(kinds):
        runs = rows_over_seeds(model, x, y, [*RELATIVE, "hessian_trace"], Budget(None, 16, kinds=kinds), 40)
        own = [[row.value for row in run if row.layer == layer and row.measure in RELATIVE] for run in runs]
        return torch.tensor(own).std(0)

    assert bool((noise(1) > 2 * noise(4)).all())


@pytest.mark.parametrize("scale", [0.0, 1e-20])
def test_a_tall_table_of_hardly_any_weights_has_hardly_any_relative_flatness(scale):
    model, x, y, _, layer = tall_table()
    with torch.no_grad():
        model.token.weight *= scale
    report = measure(model.float(), (x, y), measures=[RELATIVE[0], "hessian_trace"], method="sampled")
    assert abs(report.value("relative_flatness", layer=layer)) < 1e-30


def test_rewriting_other_layers_leaves_a_table_as_it_is():
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Embedding(TOKENS, WIDTH), nn.Flatten(), nn.Linear(LENGTH * WIDTH, 8), nn.ReLU(), nn.Linear(8, 3)
    ).double()
    x, y = data(9)[0], torch.arange(9) % 3
    found = flatness.check_invariance(
        model, (x, y), measures=["relative_flatness"], kinds=("layerwise",), progress=False
    ).to_frame()
    drift = found[found.layer == "0"].drift
    assert len(drift) > 0
    assert float(drift.abs().max()) < 1e-9


CUT_OFF = {
    "no gradient, first": (True, lambda call: torch.no_grad()(call)()),
    "no gradient, last": (False, lambda call: torch.no_grad()(call)()),
    "detached, first": (True, lambda call: call().detach()),
    "detached, last": (False, lambda call: call().detach()),
}


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("way", CUT_OFF)
def test_a_call_that_is_cut_off_stands_for_no_other_use(way, beside):
    """Derivatives take what it returns as given; the weight is used by a call that counts, and beside it."""
    first, cut = CUT_OFF[way]

    def forward(self, x):
        h = self.token(x)
        if first:
            fixed = cut(lambda: self.mix(h))
        z = torch.tanh(self.mix(h))
        if not first:
            fixed = cut(lambda: self.mix(h))
        return self.head(z + fixed + (F.linear(torch.tanh(h), self.mix.weight) if beside else 0))

    torch.manual_seed(6)
    parts = {"token": nn.Embedding(TOKENS, WIDTH), "mix": nn.Linear(WIDTH, WIDTH)}
    model = nets.Compute(forward, **parts, head=nn.Linear(WIDTH, TOKENS)).double()
    x, y = data()
    report = measure(model, (x, y), method="exact", measures="hessian_trace")
    risk = oracle.mean_risk(x, y, token_cross_entropy)
    for layer in ("token", "mix"):
        truth = oracle.hessian_trace(oracle.layer_hessian(model, risk, layer))
        assert report.value("hessian_trace", layer=layer) == pytest.approx(truth, rel=1e-9)
    assert report.value("hessian_trace") == pytest.approx(oracle.total_trace(model, risk), rel=1e-9)


@pytest.mark.parametrize("middle", [2, 3])
def test_a_convolution_tied_to_a_transposed_one(middle):
    """Their matrices hold the same entries in another order, also where they are of the same size."""
    torch.manual_seed(8)
    parts = {"inner": nn.Conv1d(3, middle, 2), "outer": nn.ConvTranspose1d(middle, 3, 2)}
    model = nets.Compute(lambda self, x: self.outer(torch.tanh(self.inner(x))).mean(2), **parts).double()
    model.outer.weight = model.inner.weight
    x, y = torch.randn(7, 3, 4, dtype=torch.float64), torch.arange(7) % 3
    report = measure(model, (x, y), method="exact", measures=["hessian_trace", "relative_flatness"])
    H = oracle.layer_hessian(model, oracle.mean_risk(x, y, F.cross_entropy), "inner")
    W = oracle.layer_weight(model, "inner")
    assert report.value("hessian_trace", layer="inner") == pytest.approx(oracle.hessian_trace(H), rel=1e-9)
    kappa = oracle.relative_flatness(W, H)
    assert report.value("relative_flatness", layer="inner") == pytest.approx(kappa, rel=1e-9)


def test_a_square_weight_that_one_of_two_layers_stores_transposed():
    """One layer's matrix is the transpose of the other's."""
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nets.Conv1D(3, 3)).double()
    model[2].weight = model[0].weight
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.arange(7) % 3
    report = measure(model, (x, y), method="exact", measures="relative_flatness")
    H = oracle.layer_hessian(model, oracle.mean_risk(x, y, F.cross_entropy), "0")
    kappa = oracle.relative_flatness(oracle.layer_weight(model, "0"), H)
    assert report.value("relative_flatness", layer="0") == pytest.approx(kappa, rel=1e-9)


@pytest.mark.parametrize("shared", ["one vector", "one row"])
def test_positions_of_single_samples_where_a_batch_is_padded(shared):
    """The first samples are not, and share their positions."""
    model, (x, y) = built(), data(12)
    x = x.clamp(min=1)
    x[9, 0] = x[11, :2] = 0

    def positions(x):
        seen = x != 0
        return POSITIONS[shared](x) if bool(seen.all()) else (seen.cumsum(1) - 1).clamp(min=0)

    model.positions = positions
    report = measure(model, (x, y), method="exact", batch_size=5)
    assert_right(report, model, x, y, ["token"])
    truth = oracle.layer_hessian(model, oracle.mean_risk(x, y, token_cross_entropy), "place")
    found = report.value("hessian_trace", layer="place")
    assert found == pytest.approx(oracle.hessian_trace(truth), rel=1e-9)


@pytest.mark.parametrize("positions", ["one vector", "one row"])
@pytest.mark.parametrize("n", [LENGTH, 5])
def test_a_penalty_of_positions_that_all_samples_share_is_that_of_a_row_for_each(positions, n):
    """Also where as many samples as positions make a vector of positions look like a token for each."""
    model, (x, y) = built(), data(n)
    asked = {"layers": None, "seed": 1}
    model.positions = POSITIONS["a row a sample"]
    expected = flatness.penalty(model, (x, y), **asked)
    slopes = torch.autograd.grad(expected, list(model.parameters()))
    again = built()
    again.positions = POSITIONS[positions]
    with untouched(again, x, y):
        value = flatness.penalty(again, (x, y), **asked)
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    for slope, truth in zip(torch.autograd.grad(value, list(again.parameters())), slopes, strict=True):
        assert torch.allclose(slope, truth, rtol=1e-9, atol=1e-12)
    # Batches of other lengths, and of one sample.
    for part in (x[:2, :2], x[:1]):
        value = flatness.penalty(again, (part, part), **asked).item()
        assert value == pytest.approx(flatness.penalty(model, (part, part), **asked).item(), rel=1e-12)


def test_a_penalty_says_which_tables_are_not_looked_up_for_every_sample():
    """Distances between positions: their rows are averaged, not added to those of a sample."""

    def forward(self, x):
        steps = torch.arange(x.shape[1])
        return self.head(self.token(x) + self.place((steps[:, None] - steps).abs()).mean(0))

    parts = {"token": nn.Embedding(TOKENS, WIDTH), "place": nn.Embedding(LENGTH, WIDTH)}
    parts["unused"] = nn.Embedding(2, WIDTH)
    model = nets.Compute(forward, **parts, head=nn.Linear(WIDTH, TOKENS)).double()
    for n in (LENGTH, 5):
        with pytest.raises(flatness.errors.LayerError, match=rf"tokens of shape \[3, 3\] for {n} samples"):
            flatness.penalty(model, data(n), layers="place")
        assert bool(flatness.penalty(model, data(n), layers="token").isfinite())


def test_a_penalty_refuses_weights_that_layers_lay_out_differently():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nets.Conv1D(3, 3)).double()
    model[2].weight = model[0].weight
    with pytest.raises(flatness.errors.LayerError, match="0, 2 lay it out differently"):
        flatness.penalty(model, (torch.randn(7, 3, dtype=torch.float64), torch.arange(7) % 3), layers="0")


@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq"])
def test_gradients_that_training_wants_otherwise(option):
    """Derivatives in a table itself give its eigenvalue, and all of one that is read elsewhere, too."""

    def forward(self, x):
        beside = self.token.weight.mean(0) if option == "scale_grad_by_freq" else 0
        return self.head(torch.tanh(self.token(x) + beside))

    torch.manual_seed(3)
    parts = {"token": nn.Embedding(TOKENS, WIDTH), "head": nn.Linear(WIDTH, TOKENS)}
    model, (x, y) = nets.Compute(forward, **parts).double(), data()
    risk = oracle.mean_risk(x, y, token_cross_entropy)
    H = oracle.hessian(model, risk, ["token.weight"])
    setattr(model.token, option, True)
    names = ["hessian_trace", "hessian_top_eigenvalue"]
    with untouched(model, x, y):
        report = measure(model, (x, y), method="exact", measures=names)
    assert getattr(model.token, option)
    assert report.value("hessian_trace", layer="token") == pytest.approx(float(H.trace()), rel=1e-9)
    assert report.value(names[1], layer="token") == pytest.approx(oracle.top_eigenvalue(H), rel=1e-4)
