"""Values do not depend on how the data is cut, kept or recomputed, nor on the dtype beyond its digits."""

import pytest
import torch

import flatness
from flatness.curvature.parameters.batch_sums import BatchSums
from flatness.errors import OutOfMemoryError
from flatness.measuring.run import run as running
from flatness.network import memory
from networks import CASES


def values(report):
    return {(row.measure, row.layer, row.unit, row.reduction): row.value for row in report.results}


def assert_same(a, b, rel):
    a, b = values(a), values(b)
    assert a.keys() == b.keys()
    scale = {key[0]: max(abs(v) for k, v in a.items() if k[0] == key[0]) for key in a}
    for key in a:
        assert b[key] == pytest.approx(a[key], rel=rel, abs=rel * scale[key[0]]), key


@pytest.mark.parametrize(
    "name", ["mlp", "cnn_max_pool", "residual_batch_norm", "token_mixer", "dense_prediction"]
)
def test_batch_size_changes_nothing(name):
    case = CASES[name]

    def measured(size, measures):
        return flatness.measure(
            case.build(), (case.x, case.y), measures=measures, batch_size=size, progress=False
        )

    whole = measured(1000, "all")
    assert_same(whole, measured(7, "all"), 1e-6)
    # Iterations over a batch per sample take long: of one network.
    if name == "mlp":
        assert_same(whole, measured(1, "all"), 1e-6)
    else:
        assert_same(measured(1000, "default"), measured(1, "default"), 1e-6)


def test_a_short_last_batch_counts_by_its_samples():
    """Batches of 16, 16 and 2: a mean of batch means would weigh each of the last two samples eight times."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3).double()
    x, y = torch.randn(34, 5, dtype=torch.float64), torch.randint(3, (34,))
    x[32:] *= 10
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    ragged = flatness.measure(model, loader, progress=False)
    whole = flatness.measure(model, (x, y), progress=False)
    assert_same(whole, ragged, 1e-12)
    batch_means = [
        flatness.measure(model, batch, progress=False).value("hessian_trace", layer="") for batch in loader
    ]
    assert abs(sum(batch_means) / 3 - whole.value("hessian_trace", layer="")) > 0.5 * whole.value(
        "hessian_trace", layer=""
    )


@pytest.mark.parametrize("name", ["cnn_grouped", "mlp", "dense_prediction"])
def test_recomputed_products_give_the_kept_ones(name, monkeypatch):
    case = CASES[name]
    kept = flatness.measure(case.build(), (case.x, case.y), measures="all", progress=False)
    monkeypatch.setattr(running, "kept_budget", lambda device: 0)
    streamed = flatness.measure(case.build(), (case.x, case.y), measures="all", batch_size=6, progress=False)
    assert any("recomputed for every product" in note for note in streamed.notes)
    assert_same(kept, streamed, 1e-6)


@pytest.mark.parametrize("name", ["mlp", "cnn_grouped", "residual_batch_norm"])
def test_float32_agrees_with_float64_to_its_digits(name):
    case = CASES[name]
    model = case.build()
    double = flatness.measure(model, (case.x, case.y), progress=False)
    single = flatness.measure(model, (case.x, case.y), dtype=torch.float32, progress=False)
    assert single.meta["dtype"] == "float32"
    assert_same(double, single, 1e-4)


def test_few_directions_at_a_time_give_the_same(monkeypatch):
    case = CASES["cnn_max_pool"]
    one = flatness.measure(
        case.build(), (case.x, case.y), "normalized_cross_entropy", measures="all", progress=False
    )
    monkeypatch.setattr("flatness.curvature.sums.exact.BLOCK", 2)
    two = flatness.measure(
        case.build(), (case.x, case.y), "normalized_cross_entropy", measures="all", progress=False
    )
    assert_same(one, two, 1e-6)


def test_kept_slices_without_room_to_multiply_are_recomputed(monkeypatch):
    case = CASES["mlp"]
    names = ["hessian_top_eigenvalue", "maximal_relative_flatness"]
    kept = flatness.measure(case.build(), (case.x, case.y), measures=names, progress=False)
    visits = []

    def full(work, device):
        visits.append(work)
        return memory.fits(work, device) if len(visits) < 5 else False

    monkeypatch.setattr("flatness.curvature.parameters.batch_sums.fits", full)
    fallen = flatness.measure(case.build(), (case.x, case.y), measures=names, batch_size=6, progress=False)
    assert len(visits) == 6  # what is kept of the layers, then of the network
    assert sum("recomputed for every product" in note for note in fallen.notes) == 1
    assert_same(kept, fallen, 1e-6)


def test_signals_that_cannot_be_kept_are_recomputed(monkeypatch):
    case = CASES["mlp"]
    kept = flatness.measure(case.build(), (case.x, case.y), measures="hessian_top_eigenvalue", progress=False)
    stream = BatchSums._stream

    def full(self, visit):
        if visit.__name__ == "append":
            self._problem.micro_batch = 1
            raise OutOfMemoryError("no room")
        stream(self, visit)

    monkeypatch.setattr(BatchSums, "_stream", full)
    streamed = flatness.measure(
        case.build(), (case.x, case.y), measures="hessian_top_eigenvalue", batch_size=6, progress=False
    )
    assert sum("recomputed for every product" in note for note in streamed.notes) == 1
    assert_same(kept, streamed, 1e-6)
