"""What random networks found wrong, as plain cases."""

import itertools

import pytest
import torch
from torch import nn

import flatness
import oracle
from flatness.errors import DataError, ModelError, NotFiniteError
from property.test_entry_points import ENTRY_POINTS
from untouched import refusal, untouched

UNWEIGHTED = (
    "No target counts: all {} samples weigh 0: every target is ignored, or its class has "
    "weight 0. Check ignore_index and the class weights of the loss."
)


def smooth(*sizes):
    """A tanh network in float64."""
    torch.manual_seed(0)
    pairs = itertools.pairwise(sizes)
    modules = [module for a, b in pairs for module in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*modules[:-1]).double().eval()


class Bare(nn.Module):
    """A network of a parameter that belongs to no layer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 3, dtype=torch.float64))

    def forward(self, x):
        return x @ self.table


@pytest.mark.parametrize("method", ["auto", "sampled"])
@pytest.mark.parametrize("network", ["last layer", "hidden layers", "parameters"])
def test_targets_that_are_all_ignored_are_refused_by_every_engine(method, network):
    model = smooth(4, 3) if network == "last layer" else smooth(4, 3, 3, 3)
    if network == "parameters":
        model = nn.Sequential(Bare(), smooth(3, 3))
    data = torch.randn(3, 4, dtype=torch.float64), torch.full((3,), -100)
    assert refusal(DataError, model, data, method=method) == UNWEIGHTED.format(3)


IGNORING = {
    "spectrum": lambda model, data: flatness.network_spectrum(model, data, progress=False),
    "line": lambda model, data: flatness.landscape.line(model, data, points=3, progress=False),
    "eigenvectors": lambda model, data: flatness.landscape.line(
        model, data, directions="eigenvectors", count=1, points=3, progress=False
    ),
    "surface": lambda model, data: flatness.landscape.surface(model, data, points=3, progress=False),
    "density": lambda model, data: flatness.landscape.density(model, data, runs=1, steps=3, progress=False),
    "robustness": lambda model, data: flatness.feature_robustness(model, data, matrices=2, progress=False),
    "labels": lambda model, data: flatness.locally_constant_labels(model, data, draws=2, progress=False),
    "representativeness": lambda model, data: flatness.representativeness(
        model, data, fitter="head", folds=2, draws=2, progress=False
    ),
}


@pytest.mark.parametrize("name", IGNORING)
def test_targets_that_are_all_ignored_are_refused_by_every_entry_point(name):
    model = smooth(4, 3, 3)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.full((6,), -100)
    with untouched(model, x, y), pytest.raises(DataError) as error:
        IGNORING[name](model, (x, y))
    drawn = name in ("labels", "representativeness")  # they count draws, not samples
    assert str(error.value) == (UNWEIGHTED.replace("{} ", "") if drawn else UNWEIGHTED.format(6))


def test_a_pilot_of_ignored_samples_says_nothing_and_the_rest_is_measured():
    model = smooth(2, 3, 3, 3)
    x, y = torch.randn(540, 2, dtype=torch.float64), torch.arange(540) % 3
    y[:512] = -100
    report = flatness.measure(model, (x, y), method="sampled", measures="hessian_trace", progress=False)
    row = report.result("hessian_trace", layer="0")
    H = oracle.hessian(model, oracle.mean_risk(x, y, nn.functional.cross_entropy), ["0.weight"])
    assert row.stderr > 0
    assert abs(row.value - float(H.trace())) < 5 * row.stderr


class Attending(nn.Module):
    """One head of attention with packed projections."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(2, 6), nn.Linear(2, 2)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out((q @ k.mT).softmax(-1) @ v).mean(1)


VERTICAL = {
    "attention": (Attending, (3, 2), {"layerwise": 0, "neuronwise": 4}),
    "batch norm first": (
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)),
        (4,),
        {"layerwise": 2, "neuronwise": 9},
    ),
    "batch norm alone": (lambda: nn.BatchNorm1d(4), (4,), {"layerwise": 0, "neuronwise": 0}),
}


@pytest.mark.parametrize("kind", ["layerwise", "neuronwise"])
@pytest.mark.parametrize("name", VERTICAL)
def test_outputs_do_not_change_along_vertical_directions(name, kind):
    make, shape, counts = VERTICAL[name]
    torch.manual_seed(0)
    model = make().double().eval()
    with torch.no_grad():
        for value in model.parameters():
            value += 0.3 * torch.randn_like(value)
    x = torch.randn(5, *shape, dtype=torch.float64)
    directions = flatness.vertical_directions(model, flatness.symmetries(model, x), kind)
    assert len(directions) == counts[kind]
    slopes = torch.autograd.grad((model(x) ** 3).sum(), list(model.parameters()))
    for direction in directions:
        terms = [(slope * part).sum() for slope, part in zip(slopes, direction.values(), strict=True)]
        assert any(bool(part.any()) for part in direction.values())
        assert abs(sum(terms)) < 1e-12


def straight(output, target):
    """A loss that is linear in the outputs."""
    return (output * target).sum(1)


def test_a_loss_without_curvature_has_none():
    torch.manual_seed(0)
    shared = nn.Linear(3, 3)
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    for model in (nn.Sequential(nn.Linear(3, 3)), nn.Sequential(shared, nn.ReLU(), shared)):
        model = model.double().eval()
        report = flatness.measure(
            model,
            (x, y),
            straight,
            curvature="gauss_newton",
            measures=["minimum_sharpness", "hessian_trace"],
            progress=False,
        )
        assert {row.value for row in report.results} == {0.0}


class Squeezing(nn.Module):
    """Loses the batch where that is one sample."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.last(self.first(x).squeeze().relu().flatten(1))


def test_a_model_that_cannot_run_on_one_sample_is_refused_in_words():
    model, data = Squeezing(), (torch.randn(6, 4), torch.arange(6) % 2)
    assert refusal(ModelError, model, data) == (
        "The model runs on several samples, but on a single sample "
        "it raises IndexError: Dimension out of range (expected to be in range of [-1, 0], but got 1). A "
        "squeeze() without dim also drops the batch dimension: write squeeze(-1), for example."
    )


def test_a_model_that_writes_into_its_inputs_leaves_the_example_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.LeakyReLU(0.2, inplace=True), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)
    ).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    with untouched(model, x):
        assert [group.channels for group in flatness.symmetries(model, x).groups] == [3]
        equal = flatness.rescale(model, x, "neuronwise")
    torch.testing.assert_close(equal(x.clone()), model(x.clone()), rtol=1e-12, atol=1e-12)


def test_a_plan_is_printed_without_a_look_at_the_model():
    """A spectral norm in training mode takes a step whenever its weight is read."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))).train()
    data = torch.randn(5, 4), torch.arange(5) % 3
    with untouched(model, *data):
        assert "  0  W 3 × 4, 1 position: exact" in str(flatness.plan(model, data))


class Torn(nn.Module):
    """A network with finite outputs whose derivatives are NaN behind fc1."""

    def __init__(self, *, loose):
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.head = nn.Linear(4, 40).double(), nn.Linear(40, 3).double()
        self.loose = loose

    def forward(self, x):
        z = nn.functional.linear(x, self.fc1.weight, self.fc1.bias) if self.loose else self.fc1(x)
        return self.head(z.tanh() + (0 * z).sqrt())


@pytest.mark.parametrize("loose, broken", [(False, "fc1, fc1.bias"), (True, "fc1.bias, fc1.weight")])
@pytest.mark.parametrize("method", ["auto", "sampled"])
@pytest.mark.parametrize("curvature", ["hessian", "gauss_newton"])
def test_a_pilot_without_finite_values_leaves_the_refusal_to_the_pass(loose, broken, method, curvature):
    data = (torch.randn(30, 4, dtype=torch.float64), torch.randint(3, (30,)))
    assert refusal(NotFiniteError, Torn(loose=loose), data, method=method, curvature=curvature) == (
        f"Expected finite curvature but got NaN or infinity in {broken}, though every loss is finite: for "
        "some sample a derivative does not exist, such as that of sqrt at 0. Look at what follows "
        "these layers."
    )


class Doubtful(nn.Linear):
    """A layer with code of its own, which is tried on all samples."""

    def forward(self, x):
        return super().forward(x)


def test_data_stay_as_they_are_where_a_layer_with_its_own_code_follows_a_write_into_them():
    torch.manual_seed(0)
    model = nn.Sequential(nn.SiLU(inplace=True), Doubtful(4, 3)).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))
    with untouched(model, x, y):
        flatness.measure(model, (x, y), measures="hessian_trace", progress=False)


def test_a_bound_reads_computed_weights_only_while_the_model_is_guarded():
    """Reading a weight with a spectral norm in training mode is a step of its power iteration."""
    torch.manual_seed(0)
    last = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 3).double())
    model = nn.Sequential(nn.Linear(4, 5).double(), nn.Tanh(), last).train()
    x, y = torch.randn(12, 4, dtype=torch.float64), torch.randint(3, (12,))
    with untouched(model, x, y):
        flatness.generalization_bound(model, (x, y), folds=2, draws=2, progress=False)


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_a_network_that_writes_into_its_first_input_is_given_copies(name):
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.ReLU(inplace=True), nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)
    ).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    data = [(x[:2], y[:2]), (x[2:], y[2:])]
    with untouched(model, x, y):
        ENTRY_POINTS[name](model, data, "cross_entropy", x)
