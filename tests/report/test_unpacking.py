"""Small files that stand for large ones: refused within bounds, and told how to lift them."""

from __future__ import annotations

import gzip
import io
import lzma
import tarfile
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch

import flatness
from flatness.errors import CheckpointError, DataError, OptionError, ReportError, StudyError
from flatness.landscape.line_result import Line
from flatness.report import unpacking
from flatness.report.unpacking import VARIABLE, unpacked_limit
from flatness.study.folder import archive
from flatness.zoo.checkpoints import read_checkpoint
from flatness.zoo.data import cifar10, load
from flatness.zoo.data.idx import read_idx

MIB = 2**20
LIFT = (
    "on disk. If you trust its source, set the environment variable FLATNESS_MAX_UNPACKED, for "
    "example to 64G."
)


def size(path):
    return f"{path.stat().st_size / 1024:.1f} KiB"


def test_a_bound_is_the_larger_of_a_size_and_fifty_times_the_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"0" * 1000)
    assert unpacked_limit(path, 10) == 50_000
    assert unpacked_limit(path, 10**6) == 10**6
    for said, meant in (("1000", 1000), ("2k", 2048), ("3 MiB", 3 * MIB), ("64G", 64 * 2**30)):
        monkeypatch.setenv(VARIABLE, said)
        assert unpacked_limit(path, 10) == meant
    monkeypatch.setenv(VARIABLE, "10")
    assert unpacked_limit(path, 10) == 1000  # what lies there as it is
    monkeypatch.setenv(VARIABLE, "much")
    with pytest.raises(OptionError) as caught:
        unpacked_limit(path, 10)
    assert str(caught.value) == (
        "Expected FLATNESS_MAX_UNPACKED to be a number of bytes, optionally followed by K, M, G or T, but "
        "got 'much'."
    )


@pytest.mark.parametrize("read", [flatness.study.load, flatness.study.unpack])
def test_an_archive_of_a_study_that_swells(tmp_path, monkeypatch, read):
    path = tmp_path / "bomb.json.xz"
    path.write_bytes(lzma.compress(b" " * (16 * MIB), preset=0))
    monkeypatch.setattr(archive, "_USUAL", MIB)
    tracemalloc.start()
    with pytest.raises(StudyError) as caught:
        read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(caught.value) == (
        f"Expected an archive of a usual size but {path} unpacks to more than the 1.0 MiB allowed for "
        f"a file of {size(path)} {LIFT}"
    )
    assert peak < 8 * MIB
    monkeypatch.setenv(VARIABLE, "17M")
    with pytest.raises(StudyError, match="is not JSON: Expecting value"):
        read(path)


def test_images_whose_header_asks_for_much(tmp_path):
    header = np.array([0x0803, 4_000_000, 28, 28], ">u4").tobytes()
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(header + bytes(10 * MIB)))
    with pytest.raises(DataError) as caught:
        read_idx(path, 3)
    assert str(caught.value) == (
        f"Expected {path} to be of a usual size, but it unpacks to more than the 1.0 GiB allowed for "
        f"a file of {size(path)} {LIFT}"
    )
    plain = tmp_path / "images"
    plain.write_bytes(header + bytes(1000))
    tracemalloc.start()
    with pytest.raises(DataError) as caught:
        read_idx(plain, 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(caught.value) == (
        f"Expected {plain} to hold 4000000×28×28 = 3,136,000,000 bytes after its header, but got 1,000. "
        "Download it again."
    )
    assert peak < MIB


def test_an_archive_with_a_header_that_swells(tmp_path, monkeypatch):
    """Long names and further headers of a tar file are read whole, whatever size they say."""
    head = tarfile.TarInfo("././@PaxHeader")
    head.type, head.size = tarfile.XHDTYPE, 32 * MIB
    path = tmp_path / "cifar-10-binary.tar.gz"
    path.write_bytes(gzip.compress(head.tobuf() + bytes(32 * MIB)))
    monkeypatch.setattr(cifar10, "_ROUGHLY_AN_ARCHIVE", 2 * MIB)
    tracemalloc.start()
    with pytest.raises(DataError) as caught:
        cifar10.read_archive(path, ["test_batch.bin"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(caught.value) == (
        f"Expected {path} to be of a usual size, but it unpacks to more than the 2.0 MiB allowed for "
        f"a file of {size(path)} {LIFT}"
    )
    assert peak < 16 * MIB


def test_a_limit_reads_no_more_than_it_takes(tmp_path):
    path = tmp_path / "many.npz"
    x = np.zeros((500_000, 64), np.uint8)
    x[:10] = np.arange(640).reshape(10, 64) % 256
    y = np.arange(500_000) % 7
    np.savez_compressed(path, x=x, y=y)
    tracemalloc.start()
    found = load(path, limit=10)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * MIB  # the inputs alone have 31
    assert torch.equal(found.inputs * 255, torch.from_numpy(x[:10]).float())
    assert found.targets.tolist() == y[:10].tolist()
    assert found.classes == tuple("0123456")  # also of labels that are not taken
    assert found.notes == ("the first 10 of 500,000 samples",)


@pytest.mark.parametrize("order", ["C", "F"])
def test_rows_of_an_array_are_those_of_numpy(tmp_path, order):
    path = tmp_path / "arrays.npz"
    values = np.asarray(np.random.default_rng(0).normal(size=(30, 4, 5)), order=order)
    np.savez(path, a=values, b=np.float32(3.5), c=np.array("text"), d=np.zeros((0, 3)))
    assert unpacking.array_names(path) == ["a", "b", "c", "d"]
    assert np.array_equal(unpacking.read_array(path, "a"), values)
    assert np.array_equal(unpacking.read_array(path, "a", 7), values[:7])
    assert np.array_equal(unpacking.read_array(path, "a", 99), values)
    assert unpacking.read_array(path, "b") == np.float32(3.5)
    assert str(unpacking.read_array(path, "c")) == "text"
    assert unpacking.read_array(path, "d").shape == (0, 3)
    assert [unpacking.array_length(path, name) for name in "abcd"] == [30, 1, 1, 0]


def crafted(path, shape, kind="<f8", content=b"", compression=zipfile.ZIP_DEFLATED):
    """An .npz file whose headers say what they like."""
    with zipfile.ZipFile(path, "w", compression) as file:
        for name in ("x", "y"):
            head = io.BytesIO()
            said = {"descr": kind, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(head, said)
            file.writestr(f"{name}.npy", head.getvalue() + content)


@pytest.mark.parametrize(
    ("shape", "kind"), [((10**12, 64), "<f8"), ((-1, 4), "<f8"), ((3,), "|O"), ((2**62, 2**62), "<f8")]
)
def test_arrays_that_a_file_cannot_hold(tmp_path, shape, kind):
    path = tmp_path / "crafted.npz"
    crafted(path, shape, kind, bytes(100))
    for limit in (None, 3):
        with pytest.raises(DataError) as caught:
            load(path, limit=limit)
        assert str(caught.value) == (
            f"Expected 'x' in {path} to be an array of numbers, but it is truncated, corrupted or pickled "
            "(pickled objects are never loaded)."
        )


def test_an_array_that_swells(tmp_path, monkeypatch):
    path = tmp_path / "swells.npz"
    np.savez_compressed(path, x=np.zeros((10**6, 4), np.uint8), y=np.zeros(10**6, np.uint8))
    monkeypatch.setenv(VARIABLE, "1M")
    with pytest.raises(DataError) as caught:
        load(path)
    assert str(caught.value) == (
        f"Expected 'x' in {path} to be of a usual size, but it unpacks to more than the 1.0 MiB allowed "
        f"for a file of {size(path)} {LIFT}"
    )
    assert len(load(path, limit=100)) == 100
    monkeypatch.setenv(VARIABLE, "4M")
    assert len(load(path)) == 10**6


def test_a_checkpoint_that_was_compressed(tmp_path, monkeypatch):
    """torch.save compresses nothing, and torch.load unpacks whatever it gets."""
    torch.save({"weight": torch.zeros(2**20)}, tmp_path / "plain.pt")
    path = tmp_path / "bomb.pt"
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as to,
    ):
        for name in plain.namelist():
            to.writestr(name, plain.read(name))
    monkeypatch.setenv(VARIABLE, "1M")
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    assert str(caught.value) == (
        f"Expected a checkpoint of a usual size but {path} unpacks to more than the 1.0 MiB allowed for "
        f"a file of {size(path)} {LIFT}"
    )


def test_a_large_checkpoint_is_no_bomb(tmp_path):
    torch.save({"weight": torch.zeros(2**20)}, tmp_path / "plain.pt")
    assert read_checkpoint(tmp_path / "plain.pt")["weight"].shape == (2**20,)


def test_a_landscape_that_swells_or_lacks_something(tmp_path, monkeypatch):
    path = tmp_path / "line.npz"
    shape = (1, 100_000)
    found = Line(
        np.zeros(shape[1]), np.zeros(shape), np.zeros(shape), np.ones(shape, bool), ("net",), ("1",), {}
    )
    found.save(path)
    assert Line.load(path).loss.shape == shape
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, "1M")
        with pytest.raises(ReportError) as caught:
            Line.load(path)
    assert str(caught.value) == (
        f"Expected a line of a usual size but {path} unpacks to more than the 1.0 MiB allowed for a file of "
        f"{size(path)} {LIFT}"
    )
    with np.load(path) as held:
        arrays = dict(held)
    for lacking, said in (
        ({name: value for name, value in arrays.items() if name != "loss"}, "it has no 'loss'"),
        (
            {**arrays, "meta": np.array('{"format": "flatness line", "groups": 3}')},
            "groups is 3 instead of a list",
        ),
    ):
        np.savez(path, **lacking)
        with pytest.raises(ReportError) as caught:
            Line.load(path)
        assert str(caught.value) == (
            f"Expected a whole line but {path} is damaged: {said}. Compute it again."
        )
