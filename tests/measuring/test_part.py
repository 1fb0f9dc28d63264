"""A random part of the data: the same for every form of data, errors that count which samples were drawn."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import flatness
from flatness.errors import OptionError
from flatness.measuring.part import Population
from flatness.problem.ranks import Ranks

MEASURES = ["relative_flatness", "hessian_trace"]


def network(activation=nn.ReLU):
    torch.manual_seed(0)
    parts = nn.Linear(6, 8), activation(), nn.Linear(8, 8), activation(), nn.Linear(8, 3)
    return nn.Sequential(*parts).double().eval()


def population(n=6000):
    """Samples of very different curvature, so that it matters which are drawn."""
    torch.manual_seed(1)
    x = torch.randn(n, 6).double() * torch.rand(n, 1).double() * 2
    return x, torch.randint(3, (n,))


def measured(data, seed=0, activation=nn.ReLU, **how):
    return flatness.measure(network(activation), data, measures=MEASURES, seed=seed, progress=False, **how)


def values(report):
    return [row.value for row in report.results]


def shuffled(data):
    return DataLoader(TensorDataset(*data), batch_size=64, shuffle=True)


FORMS = {
    "dataset": lambda data: TensorDataset(*data),
    "loader": lambda data: DataLoader(TensorDataset(*data), batch_size=50),
    "batches": lambda data: list(zip(data[0].split(70), data[1].split(70), strict=True)),
}


class Stream:
    """Batches that can only be read in order."""

    def __init__(self, data):
        self._data = data

    def __iter__(self):
        return iter(FORMS["batches"](self._data))


@pytest.mark.parametrize("form", [*FORMS.values(), Stream], ids=[*FORMS, "stream"])
def test_every_form_of_data_gives_the_same_part(form):
    data = population(400)
    want, got = measured(data, samples=100), measured(form(data), samples=100)
    assert got.meta["samples"] == 100
    assert got.meta["population"] == 400
    assert got.meta["data_fingerprint"] == want.meta["data_fingerprint"]
    assert values(got) == pytest.approx(values(want), rel=1e-12)


def test_a_loader_that_shuffles_or_leaves_samples_out_is_drawn_from_as_it_is():
    data = population(400)
    model, loader, state = network(), shuffled(data), torch.get_rng_state()
    report = flatness.measure(model, loader, measures=MEASURES, samples=100, progress=False)
    assert (report.meta["samples"], report.meta["population"]) == (100, 400)
    assert torch.equal(torch.get_rng_state(), state)
    half = DataLoader(Subset(TensorDataset(*data), range(200)), batch_size=64, drop_last=True)
    assert measured(half, samples=100).meta["population"] == 192


def test_larger_parts_hold_the_smaller_ones():
    data = population(400)
    everything = Population(data, 0, Ranks())
    few, many = ({row.sum().item() for row in everything.part(size)[0]} for size in (50, 200))
    assert len(few) == 50
    assert few < many


def test_all_samples_are_measured_as_without():
    data = population(300)
    plain, all_of_them = measured(data), measured(data, samples=300)
    assert values(all_of_them) == values(plain)
    assert all(row.stderr == 0 and row.method == "exact" for row in all_of_them.results)
    assert "samples=300 took all 300 samples" in all_of_them.notes


def test_errors_shrink_with_the_samples_that_are_left_out():
    # Of n = N/2 samples, errors about these data are those about their distribution times √½.
    row = measured(population(400), samples=200, data_stderr=True).result("hessian_trace", layer="0")
    assert row.method == "sampled"
    assert row.stderr == pytest.approx(row.data_stderr * 0.5**0.5)


@pytest.mark.parametrize(("activation", "precision", "seeds"), [(nn.ReLU, 0.1, 30), (nn.Tanh, 0.2, 16)])
def test_errors_of_enough_samples_are_calibrated(activation, precision, seeds):
    """Under the rule that decides how many are drawn.

    20 groups give z a variance of 19/17 where values are normal. Over 30 seeds the standard error of its mean
    square is about 0.28, over 16 about 0.38, and the rows of a report go together.
    """
    data = population()
    truth, z, drawn = values(measured(data, activation=activation, method="exact")), [], set()
    for seed in range(seeds):
        report = measured(data, 1000 * seed, activation, samples="enough", precision=precision)
        drawn.add(report.meta["samples"])
        pairs = zip(report.results, truth, strict=True)
        z.append([(row.value - true) / row.stderr if row.stderr else 0.0 for row, true in pairs])
        layers = [row for row in report.results if row.level == "layer"]
        if activation is nn.ReLU:  # with a residual, errors are relative to the Gauss-Newton part
            assert all(row.stderr <= precision * row.value for row in layers)
    assert drawn <= {256, 512, 1024, 2048, 4096, 6000}
    assert len(drawn) > 1
    z = torch.tensor(z)
    assert (z.mean(0).abs() < 3.7 / seeds**0.5).all()  # 3.5 standard errors
    assert (z.square().mean(0) < 2.4).all()
    assert (z.square().mean(0) > 0.3).all()


def test_what_is_no_sum_over_samples_has_no_error_for_the_choice():
    report = flatness.measure(
        network(), population(400), measures=["layer_flatness", "weight_norm"], samples=100, progress=False
    )
    row = report.result("layer_flatness", layer="0")
    assert row.stderr == 0
    assert "for these samples only; the choice of samples adds no error" in row.notes
    assert report.result("weight_norm", layer="0").method == "exact"


def test_a_missed_precision_asks_for_more_samples():
    report = measured(population(), samples=100)
    assert any("Raise samples, now 100, or pass samples='enough'" in note for note in report.notes)


@pytest.mark.parametrize("samples", [0, 19, 2.5, "many", True])
def test_other_words_and_too_few_samples_are_refused(samples):
    with pytest.raises(OptionError, match="Expected samples to be 'enough' or an integer of at least 20"):
        measured(population(100), samples=samples)


def test_parts_of_a_job_array_are_no_random_parts(tmp_path):
    with pytest.raises(OptionError, match="statistics_to="):
        measured(population(100), samples=50, statistics_to=tmp_path / "part.pt")
