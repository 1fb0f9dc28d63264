"""Additive statistics: parts merged in any order, saved and loaded."""

import itertools

import pytest
import torch

from flatness import Problem
from flatness.curvature.sums.exact import exact_statistics
from flatness.curvature.sums.statistics import Statistics
from flatness.errors import DataError
from flatness.measuring.plan.planner import make_plan
from flatness.measuring.request import measure_request
from small import data, network, reference


def part(start, stop):
    """The statistics of some of the samples, as another process would compute them."""
    x, y = data()
    problem = Problem(network(), (x[start:stop], y[start:stop]), progress=False)
    with problem.guarded():
        names = ["hessian_trace", "relative_flatness", "neuron_flatness", "neuron_flatness_incoming"]
        plan = make_plan(problem, measure_request(names, method="exact"))
        return exact_statistics(problem, plan.routes, {})


PARTS = ((0, 1), (1, 8), (8, 20), (20, 23))


@pytest.fixture(scope="module")
def parts():
    return [part(*bounds) for bounds in PARTS]


def flat(statistics):
    """Everything as one list of numbers."""
    numbers = [float(statistics.normaliser), float(statistics.risk), float(statistics.samples)]
    for owner in sorted(statistics.sums):
        for name in sorted(statistics.sums[owner]):
            numbers += statistics.sums[owner][name].flatten().tolist()
    return numbers


def merged(parts):
    total = Statistics()
    for one in parts:
        total.merge(one)
    return total


def test_parts_of_the_data_add_up_to_the_whole_in_any_order(parts):
    whole = flat(part(0, 23))
    assert len(whole) > 40
    for order in itertools.permutations(parts):
        assert flat(merged(order)) == pytest.approx(whole, rel=1e-13)


def test_merging_is_associative_and_leaves_the_other_part_alone(parts):
    before = flat(parts[1])
    left = merged([merged(parts[:2]), merged(parts[2:])])
    assert flat(left) == pytest.approx(flat(merged(parts)), rel=1e-13)
    assert flat(parts[1]) == before
    assert flat(merged([*parts, Statistics()])) == flat(merged(parts))


def test_means_are_divided_by_the_normaliser(parts):
    total = merged(parts)
    assert total.samples == 23
    assert float(total.risk / total.normaliser) == pytest.approx(reference().meta["risk"])
    for layer in ("fc1", "head"):
        assert float(total.mean(layer, "relative")) == pytest.approx(
            reference().value("relative_flatness", layer=layer), rel=1e-12
        )
        assert float(total.mean(layer, "row_traces").sum()) == pytest.approx(
            reference().value("hessian_trace", layer=layer), rel=1e-12
        )
        for unit, value in enumerate(total.mean(layer, "outgoing").tolist()):
            assert value == pytest.approx(
                reference().value("neuron_flatness", layer=layer, unit=unit), rel=1e-12
            )


def test_sums_are_kept_in_double_precision():
    statistics = Statistics()
    one = torch.tensor([1.0], dtype=torch.float32)
    statistics.add("fc", "row_traces", torch.tensor([2.0**30], dtype=torch.float32))
    for _ in range(10):
        statistics.add("fc", "row_traces", one)
    statistics.count(1, torch.tensor(1.0), torch.tensor(0.5))
    assert statistics.mean("fc", "row_traces").tolist() == [2.0**30 + 10]


def test_what_goes_into_a_file_comes_back(parts):
    again = [Statistics.of(one.content()) for one in parts]
    for one, other in zip(parts, again, strict=True):
        assert flat(one) == flat(other)
        assert one.samples == other.samples


def test_parts_of_different_networks_are_refused():
    ours, theirs = Statistics(), Statistics()
    ours.add("fc", "row_traces", torch.zeros(3))
    theirs.add("fc", "row_traces", torch.zeros(4))
    with pytest.raises(DataError) as error:
        ours.merge(theirs)
    assert str(error.value) == (
        "Expected statistics of the same network but 'row_traces' of 'fc' has shape [3] here and [4] there. "
        "Merge parts of one model's data only."
    )
