"""Batches of any structure."""

from collections import namedtuple

import pytest
import torch

from flatness.errors import DataError
from flatness.problem import batches

Pair = namedtuple("Pair", "x y")


def test_tensors_are_found_and_replaced_in_any_structure():
    batch = {
        "a": torch.zeros(3, 2),
        "b": [torch.ones(3), ("text", torch.full((3, 1), 2.0))],
        "c": Pair(torch.arange(3), None),
    }
    assert [tuple(t.shape) for t in batches.tensors_in(batch)] == [(3, 2), (3,), (3, 1), (3,)]
    doubled = batches.map_tensors(batch, lambda t: 2 * t)
    assert isinstance(doubled["c"], Pair)
    assert doubled["c"].x.tolist() == [0, 2, 4]
    assert doubled["c"].y is None
    assert doubled["b"][1] == ("text", doubled["b"][1][1])
    assert doubled["b"][1][1].flatten().tolist() == [4.0, 4.0, 4.0]


def test_rows_cut_what_has_one_row_per_sample():
    shared = torch.eye(2)
    cut = batches.rows(
        {"x": torch.arange(10).reshape(5, 2), "mask": shared, "n": torch.tensor(7), "id": "s"}, 1, 3
    )
    assert cut["x"].tolist() == [[2, 3], [4, 5]]
    assert cut["mask"] is shared
    assert int(cut["n"]) == 7
    assert cut["id"] == "s"


def test_size_is_that_of_the_first_tensor_with_rows():
    assert batches.size_of([torch.tensor(1.0), torch.zeros(4, 2), torch.zeros(9)]) == 4
    with pytest.raises(DataError) as error:
        batches.size_of({"text": ["a", "b"]})
    assert str(error.value) == (
        "Expected batches that hold tensors with one row per sample but got dict(text: list(str, str)). "
        "Pass a DataLoader, a pair of tensors, or an iterable of (input, target) batches."
    )


def test_placing_casts_floating_point_tensors_only_and_takes_them_out_of_inference_mode():
    with torch.inference_mode():
        x, y = torch.ones(2, dtype=torch.float64), torch.arange(2)
    placed = batches.place((x, y), torch.device("cpu"), torch.float64)
    assert placed[0].dtype == torch.float64
    assert placed[1].dtype == torch.int64
    assert not placed[0].is_inference()
    half = batches.place(torch.ones(2, dtype=torch.float64), torch.device("cpu"), torch.float16)
    assert half.dtype == torch.float16


def test_versions_grow_when_a_tensor_is_written_to():
    batch = (torch.zeros(3), [torch.zeros(2)])
    before = batches.versions(batch)
    copy = batches.copied(batch)
    copy[0].add_(1)
    assert batches.versions(batch) == before
    batch[1][0].add_(1)
    assert batches.versions(batch) == [before[0], before[1] + 1]


def test_codes_tell_samples_apart_whatever_their_place_and_batch():
    x, y = torch.randn(40, 3), torch.randint(5, (40,))
    codes = batches.sample_codes((x, y))
    order = torch.randperm(40)
    assert torch.equal(batches.sample_codes((x[order], y[order])), codes[order])
    assert len(set(codes.tolist())) == 40
    parts = [batches.sample_codes((x[i : i + 7], y[i : i + 7])).sum() for i in range(0, 40, 7)]
    assert int(torch.stack(parts).sum()) == int(codes.sum())
    other = y.clone()
    other[3] += 1
    assert (batches.sample_codes((x, other)) != codes).nonzero().flatten().tolist() == [3]
    nudged = x.clone()
    nudged[5, 1] = torch.nextafter(x[5, 1], torch.tensor(10.0))
    assert (batches.sample_codes((nudged, y)) != codes).nonzero().flatten().tolist() == [5]


def test_codes_of_small_integers_do_not_cancel():
    tokens = torch.cartesian_prod(*[torch.arange(4)] * 4)
    assert len(set(batches.sample_codes(tokens).tolist())) == 256


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(0, 3),
        (torch.zeros(0, 3, 4), torch.zeros(0)),
        (torch.zeros(2, 0), torch.zeros(2)),
        torch.zeros(2, 3, dtype=torch.complex64),
        torch.zeros(2, 3, dtype=torch.bool),
        torch.zeros(2, 3, dtype=torch.bfloat16),
    ],
)
def test_codes_of_odd_batches(batch):
    codes = batches.sample_codes(batch)
    assert codes.dtype == torch.int64
    assert len(codes) == batches.size_of(batch)


def test_description_shows_structure_dtypes_and_shapes():
    batch = {"x": (torch.zeros(2, 3), torch.zeros(2, dtype=torch.uint8)), "name": "a"}
    assert batches.describe(batch) == "dict(x: tuple(float32[2, 3], uint8[2]), name: str)"
