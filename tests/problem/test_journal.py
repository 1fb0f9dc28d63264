"""Work that is killed and begun again: the same values, and nothing done twice that was written down."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import flatness
from flatness.problem import journal
from flatness.problem.journal import Journal, loop
from flatness.problem.journal_state import Fields, digest_of
from flatness.problem.problem import Problem
from flatness.study.training.evaluate import evaluation


class Killed(BaseException):
    """What no part of the package catches: nothing is written on the way out, as under kill -9."""


class Batches:
    """Counts the batches that passes work on; the one after `limit` kills."""

    def __init__(self, monkeypatch):
        self.count, self.limit = 0, None
        steps = Problem._steps

        def counted(problem, *arguments):
            if self.count == self.limit:
                raise Killed
            self.count += 1
            steps(problem, *arguments)

        monkeypatch.setattr(Problem, "_steps", counted)

    def until(self, limit):
        self.count, self.limit = 0, limit


@pytest.fixture
def batches(monkeypatch):
    monkeypatch.setattr(journal, "_APART", 0.0)  # written after every step, however long that takes
    monkeypatch.setattr("flatness.files._flush", lambda path: None)
    return Batches(monkeypatch)


def network(kind):
    torch.manual_seed(0)
    middle = {"relu": [nn.ReLU()], "gelu": [nn.GELU(), nn.LayerNorm(5)]}[kind]
    model = nn.Sequential(nn.Linear(6, 5), *middle, nn.Linear(5, 3))
    return model, (torch.randn(40, 6), torch.randint(3, (40,)))


def values(report):
    return {(r.measure, r.layer, r.unit, r.reduction): (r.value, r.stderr) for r in report.results}


CHEAP = [
    "relative_flatness",
    "relative_flatness_normalized",
    "hessian_trace",
    "hessian_top_eigenvalue",
    "riemannian_spectral_norm",
    "fisher_rao",
    "pac_bayes_flatness",
    "epsilon_sharpness",
    "normalized_sharpness",
]


DIFFERENCES = {"curvature": "finite_differences"}


# Graphs that are kept in memory between products are built again after a kill: one pass.
@pytest.mark.parametrize(
    ("kind", "arguments", "rebuilt"),
    [
        ("relu", {"measures": CHEAP}, 0),
        ("gelu", {"measures": CHEAP, "max_passes": 4}, 1),
        ("gelu", {"measures": CHEAP[0::3], "method": "sampled", "max_passes": 20}, 1),
        ("gelu", {"measures": CHEAP[2:5], "curvature": "finite_differences"}, 0),
        ("gelu", {"measures": CHEAP[2], "method": "sampled", "max_passes": 20, **DIFFERENCES}, 0),
    ],
    ids=["exact", "mixed", "sampled", "differences", "sampled differences"],
)
def test_a_killed_measurement_ends_as_if_it_had_not_been(tmp_path, batches, kind, arguments, rebuilt):
    model, data = network(kind)
    arguments = {**arguments, "batch_size": 16, "seed": 3, "progress": False}
    whole = flatness.measure(model, data, **arguments)
    alone, done, kills = batches.count, 0, 0
    draw, report = random.Random(7), None
    while report is None:
        batches.until(draw.randrange(1, alone // 3))
        try:
            with Journal(tmp_path / "journal", 0.0).kept():
                report = flatness.measure(model, data, **arguments)
        except Killed:
            kills += 1
        done += batches.count
    assert kills >= 3
    # Bit by bit, notes included: not one batch of what was written down is passed again.
    assert values(report) == values(whole)
    assert report.notes == whole.notes
    passes = 3  # batches in a pass
    assert alone <= done <= alone + kills * rebuilt * passes


def test_a_journal_changes_nothing_for_other_work(tmp_path, batches):
    model, data = network("relu")
    arguments = {"measures": "riemannian_spectral_norm", "batch_size": 16, "progress": False}
    with Journal(tmp_path / "journal", 0.0).kept():
        flatness.measure(model, data, **arguments)
        first = batches.count
        other, _ = network("relu")
        with torch.no_grad():
            other[0].weight.mul_(1.5)
        batches.until(None)
        found = flatness.measure(other, data, **arguments)
        assert batches.count == first
    expected = flatness.measure(other, data, **arguments)
    assert values(found) == values(expected)


def test_an_evaluation_goes_on(tmp_path, batches):
    model, _ = network("relu")
    seen, limits = [], [100]

    def count(*_):
        if len(seen) == limits[0]:
            raise Killed
        seen.append(1)

    model.register_forward_hook(count)
    torch.manual_seed(1)
    train, test = ((torch.randn(n, 6), torch.randint(3, (n,))) for n in (3500, 1500))
    whole = evaluation(model, train, test, "cross_entropy")
    assert len(seen) == 6
    for limit in (2, 5):
        limits[0] = 6 + limit
        with Journal(tmp_path / "journal", 0.0).kept(), pytest.raises(Killed):
            evaluation(model, train, test, "cross_entropy")
    limits[0] = 100
    with Journal(tmp_path / "journal", 0.0).kept():
        found = evaluation(model, train, test, "cross_entropy")
    assert found == whole
    assert len(seen) == 12


def test_what_a_loop_inside_left_is_dropped_once_the_outer_one_holds_it(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "_APART", 0.0)
    kept = Journal(tmp_path / "journal", 0.0)
    vector = torch.ones(3)
    with kept.kept(), loop("outer", vector, "theta") as outer:
        for number in range(4):
            with loop("inner", {}, number) as inner:
                inner.reached(1)
            vector *= 2
            outer.reached(number + 1)
        assert list((tmp_path / "journal").glob("[0-9]*.pt")) == []
    again = torch.zeros(3)
    with Journal(tmp_path / "journal").kept(), loop("outer", again, "theta") as outer:
        assert outer.done
    assert again.tolist() == [16.0] * 3
    kept.forget()
    assert not (tmp_path / "journal").exists()


def test_a_loop_that_fails_is_not_written_any_more(tmp_path, batches):
    def fail():
        with loop("sum", total, 1) as work:
            total.add_(1)
            work.reached(1)
            total.add_(1)  # half a step
            raise ValueError("no")

    total = torch.zeros(())
    with Journal(tmp_path, 0.0).kept():
        with pytest.raises(ValueError, match="no"):
            fail()
        with loop("another", {}, 1) as work:
            work.reached(1)
    with Journal(tmp_path).kept(), loop("sum", total, 1) as work:
        assert (work.done, work.start) == (False, 0)


def test_damaged_files_are_passed_over(tmp_path):
    (tmp_path / "000001.pt").write_bytes(b"half a file")
    (tmp_path / "now.pt").write_bytes(b"")
    with Journal(tmp_path).kept(), loop("sum", {}, 1) as work:
        assert not work.done


def test_a_hessian_whose_first_product_was_cut_short_is_whole(tmp_path, batches):
    model, data = network("relu")
    arguments = {"measures": "riemannian_spectral_norm", "batch_size": 16, "progress": False}
    whole = flatness.measure(model, data, **arguments)
    for limit in range(1, batches.count):
        batches.until(limit)
        with Journal(tmp_path / str(limit), 0.0).kept(), pytest.raises(Killed):
            flatness.measure(model, data, **arguments)
        batches.until(None)
        with Journal(tmp_path / str(limit), 0.0).kept():
            found = flatness.measure(model, data, **arguments)
        # Products with a graph that is kept and with one that is not are added up in another order.
        assert found.value("riemannian_spectral_norm") == pytest.approx(
            whole.value("riemannian_spectral_norm"), rel=1e-12
        )


def test_generators_and_attributes_are_part_of_a_state(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "_APART", 0.0)

    class Draws:
        def __init__(self):
            self.generator, self.sum, self.count = torch.Generator().manual_seed(0), torch.zeros(2), 0

        def draw(self):
            self.sum, self.count = self.sum + torch.rand(2, generator=self.generator), self.count + 1

    whole, first, second = Draws(), Draws(), Draws()
    for _ in range(5):
        whole.draw()
    with Journal(tmp_path, 0.0).kept(), loop("draws", Fields(first), 0) as work:
        for number in range(3):
            first.draw()
            work.reached(number + 1)
        begun = (tmp_path / "now.pt").read_bytes()
    (tmp_path / "000001.pt").unlink()
    (tmp_path / "now.pt").write_bytes(begun)
    with Journal(tmp_path, 0.0).kept(), loop("draws", Fields(second), 0) as work:
        assert (work.done, work.start) == (False, 3)
        for _ in range(work.start, 5):
            second.draw()
    assert torch.equal(second.sum, whole.sum)
    assert second.count == 5


def test_digests_tell_every_number_apart():
    x = torch.tensor([1.0, 2.0])
    different = [
        x,
        x.double(),
        x[None],
        [x],
        {"x": x},
        [1, 2],
        ["1", 2],
        [[1], 2],
        [1.0, 2],
        None,
        "None",
        x + 1e-7,
    ]
    assert len({digest_of(one) for one in different}) == len(different)
    assert digest_of({"b", "a"}) == digest_of({"a", "b"})


def test_what_was_begun_stays_until_it_is_reached(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "_APART", 0.0)

    def long(total, steps):
        with loop("long", total, 1) as work:
            start = work.start
            for number in range(start, steps):
                total.add_(1)
                work.reached(number + 1)
                if number == 4:
                    raise Killed
        return start

    with Journal(tmp_path, 0.0).kept(), pytest.raises(Killed):
        long(torch.zeros(()), 9)
    # The run after that is killed, too, in what comes before and was not kept.
    with Journal(tmp_path, 0.0).kept(), loop("before", {}, 1) as work:
        work.reached(1)
    total = torch.zeros(())
    with Journal(tmp_path, 0.0).kept():
        assert long(total, 9) == 5
    assert total == 9
    assert list(torch.load(tmp_path / "now.pt")) == []


def test_networks_of_the_same_weights_are_told_apart(tmp_path):
    class Masked(nn.Module):
        def __init__(self, share, middle):
            super().__init__()
            torch.manual_seed(0)
            self.fc1, self.middle, self.fc2 = nn.Linear(6, 5), middle, nn.Linear(5, 3)
            self.register_buffer("mask", torch.full((5,), share), persistent=False)

    _, data = network("relu")
    with Journal(tmp_path).kept():
        found = [
            Problem(Masked(*given), data)._identity
            for given in ((1.0, nn.ReLU()), (0.5, nn.ReLU()), (1.0, nn.Tanh()), (1.0, nn.ReLU()))
        ]
    assert len(set(found)) == 3
    assert found[0] == found[3]
