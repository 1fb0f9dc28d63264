"""One run of ``flatness landscape``: networks loaded, the landscape computed, files written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from typing import Any

import typer
from torch import nn

import flatness
from flatness.cli.answers import INTERRUPTED, UsageError, printable, usage_of
from flatness.cli.forms import say_written
from flatness.cli.inputs import Inputs
from flatness.cli.loading import arguments_of, check_folder, checkpoints_of, data_of, network_of
from flatness.cli.output import terminal_width
from flatness.errors import LayerError, OptionError
from flatness.problem.batches import tensors_in
from flatness.report.sheets import csv_text
from flatness.show.pages.landscape_page import Landscape, write_landscape

_PENALISED = "the copies' curves differ in every metric: rescaling changes the penalty of weight decay"


@dataclass(frozen=True)
class Request:
    """What the three commands share, in the words of the command line."""

    given: Inputs
    setting: dict[str, Any]
    out: Path | None
    fresh: bool

    def __post_init__(self) -> None:
        """Refuse a folder that cannot be written to before anything is computed for it."""
        if self.out is not None:
            check_folder(self.out)


def line(request: Request, asked: dict[str, Any], between: str | None) -> Landscape:
    """Lines from every checkpoint, or from one to another."""
    networks = _networks(request)
    if between is not None:
        if len(networks) > 1:
            raise UsageError(f"Expected one checkpoint with --between but got {len(networks)}.")
        (path,) = checkpoints_of([between])
        asked = {**asked, "between": _loaded(request, path)}
    return _called(request, flatness.landscape.line, _alone(networks), asked)


def surface(request: Request, asked: dict[str, Any], trajectory: list[str]) -> Landscape:
    """A plane around one checkpoint, or that of trajectories."""
    paths = checkpoints_of(request.given.network.checkpoints)
    if len(paths) > 1:
        raise UsageError(
            f"Expected one checkpoint in the middle but got {len(paths)}. Give the others as --trajectory."
        )
    if not trajectory:
        return _called(request, flatness.landscape.surface, _alone(_networks(request)), asked)
    trajectories: dict[str, list[nn.Module]] = {}
    for given in trajectory:
        name, place = _named(given)
        steps = [_loaded(request, path) for path in checkpoints_of([place])]
        trajectories.setdefault(name, []).extend(steps)
    middle = _loaded(request, paths[0]) if paths else next(iter(trajectories.values()))[-1]
    asked = {**asked, "trajectory": trajectories}
    return _called(request, flatness.landscape.surface, middle, asked)


def _named(given: str) -> tuple[str, str]:
    """The name of a trajectory and its path; a path that is there may hold a "=" of its own.

    >>> _named("adam=runs/adam"), _named("runs/adam"), _named("runs/adam/*.pt")
    (('adam', 'runs/adam'), ('runs/adam', 'runs/adam'), ('runs/adam', 'runs/adam/*.pt'))
    """
    name, equals, place = given.partition("=")
    if equals and name and not Path(given).exists() and not glob(given):
        return name, place
    folder = Path(given).parent if any(sign in given for sign in "*?[") else Path(given)
    return str(folder), given


def density(request: Request, asked: dict[str, Any], copies: int) -> Landscape:
    """Spectra of every checkpoint, and of rescaled copies."""
    networks = _networks(request)
    if copies:
        if len(networks) > 1:
            raise UsageError(f"Expected one checkpoint with --copies but got {len(networks)}.")
        (original,) = networks.values()
        example = next(tensors_in(next(iter(_batches(data_of(request.given.data).batches)))))[:2]
        networks = {"original": original} | {
            f"rescaled {place + 1}": flatness.rescale(original, example, kind="layerwise", seed=place)
            for place in range(copies)
        }
    found = _called(request, flatness.landscape.density, _alone(networks), asked)
    if copies and request.setting["weight_decay"]:
        found = replace(found, notes=tuple(dict.fromkeys([*found.notes, _PENALISED])))
    return found


def _batches(data: Any) -> Any:
    """Something whose first element holds inputs: a pair of tensors, or batches."""
    return [data] if isinstance(data, (tuple, list)) and len(data) == 2 else data


def _networks(request: Request) -> dict[str, nn.Module]:
    """A network for every checkpoint by its name; the model as built where there is none."""
    paths = checkpoints_of(request.given.network.checkpoints)
    if not paths:
        typer.echo(
            "note: no checkpoint was given: the weights are those that the model was built with", err=True
        )
        return {"network": _loaded(request, None)}
    names = [path.stem for path in paths]
    unique = len(set(names)) == len(names)
    return {
        name if unique else str(path): _loaded(request, path) for name, path in zip(names, paths, strict=True)
    }


def _alone(networks: dict[str, nn.Module]) -> Any:
    """One network as itself: its curve needs no name."""
    return next(iter(networks.values())) if len(networks) == 1 else networks


def _loaded(request: Request, path: Path | None) -> nn.Module:
    return network_of(request.given.network, path, request.setting["seed"])


def _called(request: Request, function: Any, networks: Any, asked: dict[str, Any]) -> Landscape:
    try:
        with _file(request, function.__name__) as file:
            return function(
                networks,
                data_of(request.given.data).batches,
                **arguments_of(request.given),
                resume=file,
                **request.setting,
                **asked,
            )
    except (OptionError, LayerError) as error:
        hint = " --fresh computes it anew." if "Expected resume" in str(error) else ""
        raise usage_of(type(error)(f"{error}{hint}")) from error


@contextmanager
def _file(request: Request, name: str) -> Iterator[Path | None]:
    """The file to go on with. With --fresh the one that is there is given up once there is a new one."""
    if request.out is None:
        yield None
        return
    request.out.mkdir(parents=True, exist_ok=True)
    file = request.out / f"{name}.npz"
    before = file.with_name(f".{file.name}.before")
    if request.fresh and file.exists():
        file.replace(before)
    try:
        yield file
    finally:
        if before.exists() and not file.exists():
            before.replace(file)
        before.unlink(missing_ok=True)


def finish(found: Landscape, out: Path | None, as_csv: bool) -> int:
    """Print and write; the exit status says whether Ctrl-C ended the work."""
    import textwrap

    if as_csv:
        typer.echo(csv_text(found.to_frame()), nl=False)
    else:
        for text in str(found).splitlines():
            typer.echo(printable(textwrap.fill(text.strip(), terminal_width(), subsequent_indent="  ")))
    if out is not None:
        say_written(out, write_landscape(out, found), aside=as_csv)
    interrupted = any(note.startswith("interrupted:") for note in found.notes)
    if interrupted and out is not None:
        typer.echo("run the same command again to go on", err=True)
    return INTERRUPTED if interrupted else 0
