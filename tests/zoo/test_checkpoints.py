"""Checkpoints are found, read without running anything, and fitted to the model or refused."""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flatness.errors import CheckpointError
from flatness.zoo.checkpoints import find_checkpoints, fit_checkpoint, read_checkpoint
from flatness.zoo.models import mlp

SIZES = (6, 8, 3)


@pytest.fixture
def weights():
    return dict(mlp(SIZES, seed=1).state_dict())


def message(call, *arguments) -> str:
    with pytest.raises(CheckpointError) as caught:
        call(*arguments)
    return str(caught.value)


@pytest.mark.parametrize("wrap", [None, "state_dict", "model_state_dict", "model", "net", "weights"])
def test_weights_are_found_inside_what_training_scripts_save(wrap, weights, tmp_path):
    path = tmp_path / "net.ckpt"
    torch.save(weights if wrap is None else {wrap: weights, "epoch": 3, "lr": [0.1]}, path)
    model = mlp(SIZES, seed=0)
    assert fit_checkpoint(model, read_checkpoint(path), "net") == []
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


def test_safetensors(weights, tmp_path):
    save_file(weights, tmp_path / "net.safetensors")
    read = read_checkpoint(tmp_path / "net.safetensors")
    assert all(torch.equal(read[key], value) for key, value in weights.items())


def test_old_format_of_torch(weights, tmp_path):
    torch.save(weights, tmp_path / "net.pt", _use_new_zipfile_serialization=False)
    assert read_checkpoint(tmp_path / "net.pt").keys() == weights.keys()


@pytest.mark.parametrize(
    ("prefix", "notes"),
    [
        ("module.", ["took DataParallel's prefix 'module.' off the checkpoint's names"]),
        ("_orig_mod.", ["took torch.compile's prefix '_orig_mod.' off the checkpoint's names"]),
        ("net.", ["took the prefix 'net.' off the checkpoint's names"]),
        (
            "_orig_mod.module.",
            [
                "took torch.compile's prefix '_orig_mod.' off the checkpoint's names",
                "took DataParallel's prefix 'module.' off the checkpoint's names",
            ],
        ),
    ],
)
def test_prefixes_of_wrappers_are_taken_off_with_a_note(prefix, notes, weights):
    model = mlp(SIZES, seed=0)
    wrapped = {prefix + key: value for key, value in weights.items()}
    assert fit_checkpoint(model, wrapped, "net.pt") == notes
    assert torch.equal(model.fc1.weight, weights["fc1.weight"])


def test_a_checkpoint_that_does_not_fit_changes_nothing_and_lists_a_few_names(weights):
    model = mlp(SIZES, seed=0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    wrong = {
        **weights,
        "fc1.weight": torch.zeros(9, 6),
        **{f"head{i}.weight": torch.zeros(1) for i in range(6)},
    }
    del wrong["fc2.bias"]
    assert message(fit_checkpoint, model, wrong, "net.pt") == (
        "Expected the weights of Sequential but net.pt does not fit: missing: fc2.bias; unexpected: "
        "head0.weight, head1.weight, head2.weight, head3.weight and 2 more; other shapes: fc1.weight [9, 6] "
        "for [8, 6]. Build the model with the sizes it was trained with."
    )
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_counters_of_batch_norm_may_be_missing():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    weights = {key: value for key, value in model.state_dict().items() if "num_batches" not in key}
    assert fit_checkpoint(model, weights, "net.pt") == []


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("suffix", [".pt", ".bin", ".ckpt", ".pth", ".safetensors"])
def test_a_pickle_bomb_does_not_explode(protocol, suffix, tmp_path):
    path, marker = tmp_path / f"net{suffix}", tmp_path / "exploded"
    path.write_bytes(pickle.dumps({"state_dict": Bomb(marker)}, protocol=protocol))
    message(read_checkpoint, path)
    assert not marker.exists()


@pytest.mark.parametrize("old", [True, False])
def test_a_bomb_inside_a_real_checkpoint_does_not_explode(old, weights, tmp_path):
    path, marker = tmp_path / "net.pt", tmp_path / "exploded"
    torch.save({"state_dict": weights, "more": Bomb(marker)}, path, _use_new_zipfile_serialization=not old)
    assert message(read_checkpoint, path).startswith(
        f"Expected tensors and plain values only but {path} holds other Python objects"
    )
    assert not marker.exists()


def test_a_whole_pickled_model_is_refused_and_named(tmp_path):
    path = tmp_path / "model.pt"
    torch.save(mlp(SIZES), path)
    assert message(read_checkpoint, path) == (
        f"Expected tensors and plain values only but {path} holds other Python objects "
        "(torch.nn.modules.container.Sequential), which can run code when loaded; it was not loaded. "
        "Save torch.save(model.state_dict(), path) or a .safetensors file instead."
    )


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_truncated_file_is_refused(share, suffix, weights, tmp_path):
    path = tmp_path / f"net{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(weights, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert "is damaged, cut short or something else" in message(read_checkpoint, path)


def test_corrupted_bytes_never_escape_as_another_error(weights, tmp_path):
    path = tmp_path / "net.pt"
    torch.save(weights, path, _use_new_zipfile_serialization=False)
    whole = bytearray(path.read_bytes())
    for place in range(0, min(len(whole), 1200), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        path.write_bytes(damaged)
        with contextlib.suppress(CheckpointError):
            read_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "found"),
    [([1, 2], "list"), ({"epoch": 1}, "a dictionary with epoch"), ({}, "a dictionary with nothing")],
)
def test_a_file_without_tensors_is_refused(content, found, tmp_path):
    path = tmp_path / "net.pt"
    torch.save(content, path)
    assert message(read_checkpoint, path) == (
        "Expected a dictionary of tensors, perhaps under state_dict, model_state_dict, model, net, weights, "
        f"but {path} holds {found}. Save model.state_dict()."
    )


def test_folders_and_patterns_in_natural_order(tmp_path):
    for name in ("e10.pt", "e2.pt", "e1.safetensors", "notes.txt", "optimizer.pt"):
        (tmp_path / name).touch()
    (tmp_path / "deeper").mkdir()
    names = ["e1.safetensors", "e2.pt", "e10.pt"]
    assert [path.name for path in find_checkpoints([tmp_path])] == names
    assert [path.name for path in find_checkpoints([tmp_path / "e*.pt", tmp_path / "e2.pt"])] == names[1:]


def test_what_is_not_there(tmp_path):
    (tmp_path / "net.pt").touch()
    (tmp_path / "empty").mkdir()
    assert message(find_checkpoints, [tmp_path / "nett.pt"]) == (
        f"Expected a checkpoint, a folder or a pattern but there is no {tmp_path / 'nett.pt'}. "
        "Did you mean 'net.pt'?"
    )
    assert message(find_checkpoints, [tmp_path / "empty"]) == (
        "Expected checkpoints (.safetensors, .pt, .pth, .bin, .ckpt) in the folder "
        f"{tmp_path / 'empty'} but it has none. Name the files themselves."
    )


@pytest.mark.skipif(os.name == "nt" or os.getuid() == 0, reason="everything is readable here")
def test_a_file_that_may_not_be_read(weights, tmp_path):
    path = tmp_path / "net.pt"
    torch.save(weights, path)
    path.chmod(0)
    assert (
        message(read_checkpoint, path)
        == f"Expected a checkpoint that can be read but got {path}: Permission denied."
    )
