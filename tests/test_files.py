"""Files that are written whole or not at all, also where there is no room."""

from __future__ import annotations

import errno
import os
import secrets

import pytest
import torch

from flatness.errors import OptionError, StudyError
from flatness.files import digest, intact, sealed, write_tensors, write_text
from flatness.study.folder.records import Folder

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")


@pytest.fixture
def full(monkeypatch):
    """Makes the next file of a path one of a full disk."""
    monkeypatch.setattr(secrets, "token_hex", lambda _: "now")

    def fill(path):
        path.with_name(f".{path.name}.now.part").symlink_to("/dev/full")

    return fill


@pytest.mark.parametrize("length", [10, 1_000_000])
def test_tensors_on_a_full_disk_are_an_error_of_the_disk(tmp_path, full, length):
    path = tmp_path / "sums.pt"
    write_tensors(path, {"a": torch.arange(3)})
    full(path)
    with pytest.raises(OSError, match="No space left") as caught:
        write_tensors(path, {"a": torch.zeros(length)})
    assert caught.value.errno == errno.ENOSPC
    assert torch.load(path)["a"].tolist() == [0, 1, 2]  # the old file, whole
    assert os.listdir(tmp_path) == ["sums.pt"]


def test_weights_on_a_full_disk_do_not_make_a_network_fail(tmp_path, full):
    folder = Folder(tmp_path)
    folder.make()
    full(folder.weights_of("one"))
    with pytest.raises(StudyError) as caught:
        folder.write_weights("one", {"weight": torch.zeros(3)})
    assert str(caught.value) == (
        f"Expected space on the disk for {tmp_path} but it is full. Free some space and run the same command "
        "again: finished networks are kept."
    )


def test_digests_tell_every_number_apart():
    x = torch.tensor([1.0, 2.0])
    lists = [[x], [1, 2], ["1", 2], [[1], 2], [1.0, 2]]
    different = [x, x.double(), x[None], {"x": x}, None, "None", x + 1e-7, *lists]
    assert len({digest(one) for one in different}) == len(different)


def test_sealed_content_is_known_to_be_as_it_was():
    content = sealed({"sums": torch.arange(4.0), "count": 4})
    assert intact(content)
    assert not intact({**content, "count": 5})
    assert not intact({**content, "sums": torch.arange(1.0, 5.0)})


def test_a_folder_is_no_file_to_write(tmp_path):
    with pytest.raises(OptionError) as caught:
        write_text(tmp_path, "text")
    assert str(caught.value) == (
        f"Expected the name of a file but got the folder {str(tmp_path)!r}. Add a file name."
    )
    assert not list(tmp_path.parent.glob("*.part"))
