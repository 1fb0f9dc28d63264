"""Several processes, each on its part of the data, end with the report of all the data."""

import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import flatness
from flatness.errors import DataError, FlatnessError, ProcessError
from flatness.problem.ranks import Ranks
from networks import CASES
from small import data, network


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def process(rank, port, out):
    """All tasks one after the other: starting processes takes longer than what they do."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    answers = {}
    for task in (measured, sampled, drawn, stepping, failing, different, alone):
        try:
            answers[task.__name__] = task(rank)
        except FlatnessError as error:
            answers[task.__name__] = (type(error).__name__, str(error))
    torch.save(answers, out / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What every task returned or raised, in each of two processes of one group."""
    out = tmp_path_factory.mktemp("answers")
    with pytest.MonkeyPatch.context() as patch:
        # The new processes find this module by the name that pytest gave it, from the folder above all tests.
        patch.syspath_prepend(str(Path(__file__).parents[2]))
        mp.spawn(process, (free_port(), out), nprocs=2)
    found = [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(2)]
    return {task: [one[task] for one in found] for task in found[0]}


def rows(report):
    return {(row.measure, row.layer, row.unit, row.reduction): row.value for row in report.results}


def part(case, rank):
    """An uneven split: 60 % of the samples and the rest."""
    cut = len(case.x) * 3 // 5
    share = slice(0, cut) if rank == 0 else slice(cut, None)
    return case.x[share], case.y[share]


SOME = ["relative_flatness", "riemannian_spectral_norm", "epsilon_sharpness", "fisher_rao"]
NAMES = {"mlp": "all", "residual_batch_norm": SOME, "dense_prediction": SOME}


def measured(rank):
    found = []
    for name in NAMES:
        case = CASES[name]
        report = flatness.measure(
            case.build(), part(case, rank), measures=NAMES[name], batch_size=7, progress=False
        )
        found.append((rows(report), report.notes, report.meta))
    return found


def test_two_halves_of_the_data_give_the_report_of_the_whole(answers):
    found_by_rank = answers["measured"]
    for index, name in enumerate(NAMES):
        case = CASES[name]
        whole = flatness.measure(case.build(), (case.x, case.y), measures=NAMES[name], progress=False)
        expected = rows(whole)
        cut = len(case.x) * 3 // 5
        for found, notes, meta in (one[index] for one in found_by_rank):
            assert found.keys() == expected.keys()
            for key in found:
                value = expected[key]
                largest = max(abs(other) for (measure, *_), other in expected.items() if measure == key[0])
                assert found[key] == pytest.approx(value, rel=1e-6, abs=1e-6 * largest), key
            assert f"summed over 2 processes with {cut}, {len(case.x) - cut} samples" in notes
            assert (meta["processes"], meta["samples"]) == (2, len(case.x))
            assert meta["risk"] == pytest.approx(whole.meta["risk"], rel=1e-12)
            assert meta["data_fingerprint"] == whole.meta["data_fingerprint"]
        assert found_by_rank[0][index][0] == found_by_rank[1][index][0]


SMOOTH = ("mlp_tanh", "shared_module", "tied_parameters")


def sampled(rank):
    found = []
    for name in SMOOTH:
        case = CASES[name]
        for method in ("exact", "sampled"):
            report = flatness.measure(
                case.build(), part(case, rank), method=method, batch_size=7, max_passes=20, progress=False
            )
            found.append({_key(row): (row.value, row.stderr) for row in report.results})
    return found


def _key(row):
    return row.measure, row.layer, row.unit, row.reduction


def test_sampled_curvature_is_that_of_all_the_data(answers):
    """In all directions the same numbers as one process; at random, numbers within their errors of those."""
    first, second = answers["sampled"]
    assert first == second
    for index, name in enumerate(SMOOTH):
        case = CASES[name]
        whole = flatness.measure(case.build(), (case.x, case.y), method="exact", progress=False)
        complete, drawn = first[2 * index : 2 * index + 2]
        assert complete.keys() == {_key(row) for row in whole.results} == drawn.keys()
        for row in whole.results:
            value, stderr = complete[_key(row)]
            assert stderr == 0
            assert value == pytest.approx(row.value, rel=1e-8, abs=1e-12), (name, _key(row))
            value, stderr = drawn[_key(row)]
            if row.reduction == "max" or row.measure == "matrix_normalized_sharpness":
                continue  # biased by noise: maxima up, roots down
            # Some 150 numbers: 5 standard errors; those that have none are exact.
            assert abs(value - row.value) <= 5 * stderr + 1e-9 * abs(row.value), (name, _key(row))


def stepping(rank):
    """Sharpness along a step of Adam that all processes take alike, as training in parallel does."""
    case = CASES["mlp_tanh"]
    model, optimizer = stepped(case)
    share = {"optimizer": optimizer}
    asked = {
        "critical_sharpness": {**share, "width": 1e-6},
        "directional_sharpness": share,
        "preconditioned_sharpness": share,
    }
    return rows(
        flatness.measure(model, part(case, rank), measures=list(asked), options=asked, progress=False)
    )


def stepped(case):
    model = case.build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(case.x), case.y).backward()
        optimizer.step()
    return model, optimizer


def test_sharpness_along_a_step_is_that_of_all_the_data(answers):
    case = CASES["mlp_tanh"]
    model, optimizer = stepped(case)
    rounded = {"critical_sharpness": 2e-6, "directional_sharpness": 1e-9, "preconditioned_sharpness": 1e-7}
    for measure, tolerance in rounded.items():
        width = {"width": 1e-6} if measure == "critical_sharpness" else {}
        options = {measure: {"optimizer": optimizer, **width}}
        whole = flatness.measure(
            model, (case.x, case.y), measures=measure, options=options, progress=False
        ).value(measure)
        for found in answers["stepping"]:
            assert found[measure, None, None, None] == pytest.approx(whole, rel=tolerance)


def drawn(rank):
    case = CASES["mlp"]
    how = {"measures": "relative_flatness", "samples": 20, "progress": False}
    report = flatness.measure(case.build(), part(case, rank), **how)
    return {_key(row): (row.value, row.stderr) for row in report.results}, report.meta


def test_a_random_part_of_the_data_is_drawn_from_all_processes(answers):
    (first, meta), (second, _) = answers["drawn"]
    case = CASES["mlp"]
    assert first == second
    assert (meta["samples"], meta["population"]) == (20, len(case.x))
    whole = flatness.measure(case.build(), (case.x, case.y), measures="relative_flatness", progress=False)
    for row in whole.results:
        value, stderr = first[_key(row)]
        assert 0 < abs(value - row.value) <= 5 * stderr, _key(row)


def failing(rank):
    x, y = data()
    if rank == 1:
        y = y.clone()
        y[3] = 7
    return rows(flatness.measure(network(), (x, y), progress=False))


def test_an_error_in_one_process_is_raised_in_all(answers):
    first, second = answers["failing"]
    own = (
        "Expected class indices from 0 to 2, since the model has 3 outputs, but got 7 for sample 3 of the "
        "batch. Number the classes from 0, or give the model 8 outputs. Seen on the first 8 samples."
    )
    assert second == ("DataError", own)
    assert first == (
        "ProcessError",
        f"Expected every process to measure its part but process 1 raised DataError: {own}",
    )


def different(rank):
    model = network()
    model.head.weight.data += rank
    return rows(flatness.measure(model, data(), seed=0, progress=False))


def test_different_models_are_refused(answers):
    first, second = answers["different"]
    prints = [
        flatness.measure(model, data(), measures="weight_norm", progress=False).meta["model_fingerprint"]
        for model in (network(), moved())
    ]
    assert first == second
    assert first == (
        "ProcessError",
        f"Expected the same weights in every process but got {prints[0]} in process 0 and {prints[1]} in "
        "process 1. Give all processes the same model and arguments, and each process its own part of the "
        "data.",
    )


def moved():
    model = network()
    model.head.weight.data += 1
    return model


def alone(rank):
    same = flatness.measure(network(), data(), measures="hessian_trace", progress=False)
    invariant = flatness.check_invariance(
        network(), data(), measures="relative_flatness", kinds=("layerwise",), trials=1
    )
    own = None
    if rank == 0:
        with flatness.separately():
            own = rows(flatness.measure(network(), data(), measures="hessian_trace", progress=False))
    return same.notes, rows(same), own, invariant.ok


def test_the_same_data_everywhere_is_noted_and_one_process_can_measure_alone(answers):
    first, second = answers["alone"]
    assert first[0] == second[0]
    assert (
        "summed over 2 processes with 23, 23 samples, which are all the same: give each process its "
        "own part of the data" in first[0]
    )
    assert first[1] == pytest.approx(first[2], rel=1e-12)
    assert (second[2], first[3], second[3]) == (None, True, True)


def leaving(rank, port, out):
    """A group without a named backend, one process of which ends in the middle."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group(timeout=timedelta(seconds=30))
    together = rows(flatness.measure(network(), data(), progress=False))
    if rank == 1:
        os._exit(0)
    try:
        flatness.measure(network(), data(), progress=False)
    except ProcessError as error:
        torch.save((together, str(error)), out / "answer.pt")
    os._exit(0)


def test_a_process_that_ends_ends_the_others_in_words(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    mp.spawn(leaving, (free_port(), tmp_path), nprocs=2)
    together, message = torch.load(tmp_path / "answer.pt", weights_only=False)
    alone = rows(flatness.measure(network(), data(), progress=False))
    assert together == {key: pytest.approx(value, rel=1e-6) for key, value in alone.items()}
    assert message.startswith("Expected all 2 processes to measure together but one did not answer: ")
    assert message.endswith("Inside flatness.separately() a process measures alone.")


def test_without_a_group_there_is_one_process():
    ranks = Ranks.current()
    assert (ranks.count, ranks.rank) == (1, 0)
    assert ranks.gathered("a") == ["a"]
    ranks.check_same({"seed": 0})
    tensor = torch.ones(2)
    assert ranks.summed([tensor])[0] is tensor
    with pytest.raises(DataError), ranks.stage():
        raise DataError("as it was")
    assert issubclass(ProcessError, RuntimeError)
