"""Checkpoints: found by path, read without running anything in them, fitted to a model, measured in turn."""

from __future__ import annotations

import copy
import glob
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flatness.errors import CheckpointError, listed, nearest
from flatness.files import DamagedFileError, read_tensors
from flatness.measuring.measure import measure
from flatness.problem.progress import ProgressBar
from flatness.report.trajectory import Trajectory
from flatness.report.unpacking import TooLargeError, check_unpacked

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""What a file in a folder must end with to be taken for a checkpoint."""

# What trainers put beside their checkpoints.
_NOT_WEIGHTS = {"optimizer.pt", "scheduler.pt", "scaler.pt", "training_args.bin", "rng_state.pth"}
# Where training scripts and Lightning keep the weights inside a larger dictionary.
_INSIDE = ("state_dict", "model_state_dict", "model", "net", "weights")
_SHOWN_KEYS = 4


def find_checkpoints(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The checkpoint files that paths, folders and patterns like ``runs/*.pt`` name, each once.

    Folders are not searched below their first level; files in them come in natural order, epoch 2 before 10.

    Raises:
        CheckpointError: When a path, folder or pattern gives no file.
    """
    found: dict[Path, None] = {}
    for path in paths:
        for file in _expanded(os.fspath(path)):
            found.setdefault(file)
    return list(found)


def _expanded(path: str) -> list[Path]:
    if os.path.isfile(path):
        return [Path(path)]
    if os.path.isdir(path):
        files = [file for file in Path(path).iterdir() if _is_checkpoint(file)]
        missing = (
            f"Expected checkpoints ({', '.join(SUFFIXES)}) in the folder {path} but it has none. "
            "Name the files themselves."
        )
    else:
        files = [file for file in map(Path, glob.glob(path, recursive=True)) if file.is_file()]
        folder = os.path.dirname(path) or "."
        around = os.listdir(folder) if os.path.isdir(folder) else []
        hint = nearest(os.path.basename(path), around)
        missing = f"Expected a checkpoint, a folder or a pattern but there is no {path}.{hint}"
    if not files:
        raise CheckpointError(missing)
    return sorted(files, key=natural_order)


def _is_checkpoint(file: Path) -> bool:
    return file.suffix in SUFFIXES and file.is_file() and file.name not in _NOT_WEIGHTS


def natural_order(path: Path) -> list[tuple[int, int, str]]:
    """A sorting key that reads digits as numbers.

    >>> [path.name for path in sorted(map(Path, ["e10.pt", "e2.pt"]), key=natural_order)]
    ['e2.pt', 'e10.pt']
    """
    parts = re.split(r"(\d+)", str(path))
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


def entry_names(paths: Sequence[Path]) -> list[str]:
    """Short names of files, without their folder where that leaves them distinct.

    >>> entry_names([Path("a/net.pt"), Path("b/net.pt")]), entry_names([Path("a/x.pt"), Path("a/y.pt")])
    (['a/net.pt', 'b/net.pt'], ['x.pt', 'y.pt'])
    """
    names = [path.name for path in paths]
    if len(set(names)) == len(names):
        return names
    parents = [os.path.abspath(path) for path in paths]
    common = os.path.commonpath(parents)
    return [os.path.relpath(path, common) for path in parents]


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, on the host. Nothing in the file is executed.

    Raises:
        CheckpointError: When the file is not a checkpoint, is damaged, or holds more than plain values.
    """
    path = Path(path)
    try:
        content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    except OSError as error:
        raise CheckpointError(
            f"Expected a checkpoint that can be read but got {path}: {error.strerror or error}."
        ) from error
    return _tensors(content, path)


def _read_safetensors(path: Path) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(
            f"Expected a whole safetensors file but {path} is damaged, cut short or something else: {error}."
        ) from error


def _read_torch(path: Path) -> Any:
    _check_size(path)
    try:
        with warnings.catch_warnings():
            # About old pickle protocols: what cannot be read is refused below.
            warnings.simplefilter("ignore")
            return read_tensors(path)
    except DamagedFileError as error:
        said = str(error) if isinstance(error.__cause__, pickle.UnpicklingError) else ""
        if "weights_only" in said or "Unsupported" in said:
            raise CheckpointError(
                f"Expected tensors and plain values only but {path} holds other Python objects"
                f"{_culprit(said)}, which can run code when loaded; it was not loaded. Save "
                "torch.save(model.state_dict(), path) or a .safetensors file instead."
            ) from error
        raise CheckpointError(
            f"Expected a checkpoint written by torch.save but {path} is damaged, cut short or something else."
            " Copy or save it again."
        ) from error


def _check_size(path: Path) -> None:
    """Refuse a file that was compressed to hide its size; torch.save compresses nothing."""
    try:
        with zipfile.ZipFile(path) as archive:
            check_unpacked(path, sum(member.file_size for member in archive.infolist()))
    except TooLargeError as error:
        raise CheckpointError(f"Expected a checkpoint of a usual size but {path} {error}.") from error
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile):
        pass  # another format, or damaged: the reader says so


def _culprit(said: str) -> str:
    """The name of the refused object, where torch says it."""
    found = re.search(r"GLOBAL\s+(\w+(?:\.\w+)+)", said)
    return f" ({found[1]})" if found else ""


def _tensors(content: Any, path: Path) -> dict[str, Tensor]:
    """The dictionary of tensors inside what was read, which may be up to two dictionaries deep."""
    for _ in range(2):
        inner = (content[key] for key in _INSIDE if isinstance(_entries(content).get(key), Mapping))
        content = next(inner, content)
    tensors = {str(name): value for name, value in _entries(content).items() if isinstance(value, Tensor)}
    if tensors:
        return tensors
    named = f"a dictionary with {listed(content, 6) or 'nothing'}"
    found = named if isinstance(content, Mapping) else type(content).__name__
    raise CheckpointError(
        f"Expected a dictionary of tensors, perhaps under {listed(_INSIDE)}, but {path} holds {found}. "
        "Save model.state_dict()."
    )


def _entries(content: Any) -> Mapping[Any, Any]:
    return content if isinstance(content, Mapping) else {}


def fit_checkpoint(model: nn.Module, tensors: Mapping[str, Tensor], name: str) -> list[str]:
    """Load tensors into a model, all or none, and say what was adapted.

    Prefixes that wrappers leave in names (DataParallel's ``module.``, torch.compile's ``_orig_mod.``, the
    attribute under which a LightningModule holds its network) are taken off.

    Raises:
        CheckpointError: When names or shapes differ; the message lists a few of each kind.
    """
    wanted = model.state_dict()
    fitted, notes = _without_wrappers(dict(tensors), wanted)
    problems = _problems(fitted, wanted)
    if problems:
        raise CheckpointError(
            f"Expected the weights of {type(model).__name__} but {name} does not fit: {'; '.join(problems)}. "
            "Build the model with the sizes it was trained with."
        )
    model.load_state_dict({**wanted, **fitted})
    return notes


def _problems(fitted: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Tensors that are missing, too many or of another shape, a few of each."""
    missing = [key for key in wanted if key not in fitted and not key.endswith("num_batches_tracked")]
    shapes = [
        f"{key} {list(fitted[key].shape)} for {list(value.shape)}"
        for key, value in wanted.items()
        if key in fitted and fitted[key].shape != value.shape
    ]
    found = {"missing": missing, "unexpected": sorted(fitted.keys() - wanted), "other shapes": shapes}
    return [f"{what}: {listed(keys, _SHOWN_KEYS)}" for what, keys in found.items() if keys]


def _without_wrappers(
    tensors: dict[str, Tensor], wanted: Mapping[str, Any]
) -> tuple[dict[str, Tensor], list[str]]:
    notes: list[str] = []
    if "_orig_mod." in " ".join(tensors) and "_orig_mod." not in " ".join(wanted):
        tensors = {key.replace("_orig_mod.", ""): value for key, value in tensors.items()}
        notes.append("took torch.compile's prefix '_orig_mod.' off the checkpoint's names")
    shorter, taken = tensors, []
    while shorter and not set(shorter) & set(wanted):
        prefix = next(iter(shorter)).partition(".")[0] + "."
        if not all(key.startswith(prefix) for key in shorter):
            return tensors, notes
        shorter = {key.removeprefix(prefix): value for key, value in shorter.items()}
        whose = "DataParallel's" if prefix == "module." else "the"
        taken.append(f"took {whose} prefix {prefix!r} off the checkpoint's names")
    return shorter, [*notes, *taken]


def trajectory(
    model: nn.Module,
    checkpoints: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    data: Any,
    loss: Any = "cross_entropy",
    *,
    progress: bool = True,
    **arguments: Any,
) -> Trajectory:
    """Measure every checkpoint of a training run: flatness against epoch.

    Args:
        model: The network that the checkpoints fit; a copy is measured.
        checkpoints: A folder, a pattern such as "runs/*.pt", a file, or a list of these. Files of a folder or
            a pattern come in natural order, epoch 2 before 10.
        data: As for `flatness.measure`; the same for all.
        loss: As for `flatness.measure`.
        progress: Whether to show a bar.
        **arguments: Further arguments of `flatness.measure`.

    Returns:
        A `Trajectory`: print it, or use ``.plot()``, ``.to_frame()``, ``.reports``.

    Example:
        >>> import tempfile, torch, flatness
        >>> _ = torch.manual_seed(0)
        >>> model, data = torch.nn.Linear(4, 3), (torch.randn(50, 4), torch.randint(3, (50,)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for epoch in (1, 2):
        ...         torch.save(model.state_dict(), f"{folder}/epoch-{epoch}.pt")
        ...     found = flatness.trajectory(model, folder, data, measures="relative_flatness")
        >>> found.unit, found.steps
        ('epoch', (1.0, 2.0))
    """
    given = [checkpoints] if isinstance(checkpoints, str | os.PathLike) else checkpoints
    paths = find_checkpoints(given)
    network, reports = copy.deepcopy(model), []
    with ProgressBar("checkpoints", len(paths), progress) as bar:
        for path in paths:
            notes = fit_checkpoint(network, read_checkpoint(path), str(path))
            report = measure(network.eval(), data, loss, progress=False, **arguments)
            meta = {**report.meta, "checkpoint": str(path)}
            reports.append(replace(report, meta=meta, notes=(*notes, *report.notes)))
            bar.advance()
    return Trajectory.of(entry_names(paths), reports)
