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
from flatness.cli.answers import INTERRUPTED, UsageError, blamed_on_words, printable
from flatness.cli.forms import check_folder, folded, say_written, terminal_width
from flatness.cli.options import Compute, Drawing, Network
from flatness.cli.sources import arguments_of, as_built, checkpoints_of, data_of, network_of
from flatness.errors import LayerError, OptionError, ResumeError
from flatness.problem.batches import tensors_in
from flatness.report.sheets import csv_text
from flatness.show.pages.landscape_page import Landscape, write_landscape

_PENALISED = "the copies' curves differ in every metric, because rescaling changes the weight decay penalty"


@dataclass(frozen=True)
class Request:
    """What the three commands share; `asked` goes to the library as it is, the rest are words."""

    given: Network
    compute: Compute
    output: Drawing
    asked: dict[str, Any]

    def __post_init__(self) -> None:
        """Refuse a folder that cannot be written to before anything is computed for it."""
        if self.output.out is not None:
            check_folder(self.output.out)


def line(request: Request, between: str | None) -> Landscape:
    """Lines from every checkpoint, or from one to another."""
    networks = _networks(request)
    if between is None:
        return _called(request, flatness.landscape.line, networks)
    if len(networks) > 1:
        raise UsageError(f"Expected one checkpoint with --between but got {len(networks)}.")
    (path,) = checkpoints_of([between])
    return _called(request, flatness.landscape.line, networks, between=_loaded(request, path))


def surface(request: Request, trajectory: list[str]) -> Landscape:
    """A plane around one checkpoint, or that of trajectories."""
    paths = checkpoints_of(request.given.checkpoints)
    if len(paths) > 1:
        raise UsageError(
            f"Expected one checkpoint in the middle but got {len(paths)}. Give the others as --trajectory."
        )
    if not trajectory:
        return _called(request, flatness.landscape.surface, _networks(request))
    trajectories: dict[str, list[nn.Module]] = {}
    for given in trajectory:
        name, place = _named(given)
        steps = [_loaded(request, path) for path in checkpoints_of([place])]
        trajectories.setdefault(name, []).extend(steps)
    middle = _loaded(request, paths[0]) if paths else next(iter(trajectories.values()))[-1]
    return _called(request, flatness.landscape.surface, {"network": middle}, trajectory=trajectories)


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


def density(request: Request, copies: int) -> Landscape:
    """Spectra of every checkpoint, and of rescaled copies."""
    networks = _networks(request)
    if copies:
        if len(networks) > 1:
            raise UsageError(f"Expected one checkpoint with --copies but got {len(networks)}.")
        (original,) = networks.values()
        data = data_of(request.given).batches
        batch = data if isinstance(data, tuple | list) and len(data) == 2 else next(iter(data))
        example = next(tensors_in(batch))[:2]
        networks = {"original": original} | {
            f"rescaled {place + 1}": flatness.rescale(original, example, kind="layerwise", seed=place)
            for place in range(copies)
        }
    found = _called(request, flatness.landscape.density, networks)
    if copies and request.asked["weight_decay"]:
        found = replace(found, notes=tuple(dict.fromkeys([*found.notes, _PENALISED])))
    return found


def _networks(request: Request) -> dict[str, nn.Module]:
    """A network for every checkpoint by its name; the model as built where there is none."""
    paths = checkpoints_of(request.given.checkpoints)
    if not paths:
        for note in as_built(request.given):
            typer.echo(f"note: {note}", err=True)
        return {"network": _loaded(request, None)}
    names = [path.stem for path in paths]
    unique = len(set(names)) == len(names)
    return {
        name if unique else str(path): _loaded(request, path) for name, path in zip(names, paths, strict=True)
    }


def _loaded(request: Request, path: Path | None) -> nn.Module:
    return network_of(request.given, path, request.compute.seed)


def _called(request: Request, function: Any, networks: dict[str, nn.Module], **more: Any) -> Landscape:
    # One network goes as itself: its curve needs no name.
    model = next(iter(networks.values())) if len(networks) == 1 else networks
    arguments = {**arguments_of(request.given, request.compute), **request.asked, **more}
    with blamed_on_words(OptionError, LayerError), _file(request.output, function.__name__) as file:
        try:
            return function(model, data_of(request.given).batches, resume=file, **arguments)
        except ResumeError as error:
            raise ResumeError(f"{error} --fresh recomputes it.") from error


@contextmanager
def _file(output: Drawing, name: str) -> Iterator[Path | None]:
    """The file to go on with. With --fresh the one that is there is given up once there is a new one."""
    if output.out is None:
        yield None
        return
    output.out.mkdir(parents=True, exist_ok=True)
    file = output.out / f"{name}.npz"
    before = file.with_name(f".{file.name}.before")
    if output.fresh and file.exists():
        file.replace(before)
    try:
        yield file
    finally:
        if before.exists() and not file.exists():
            before.replace(file)
        before.unlink(missing_ok=True)


def finish(found: Landscape, out: Path | None, as_csv: bool) -> int:
    """Print and write; the exit status says whether Ctrl-C ended the work."""
    if as_csv:
        typer.echo(csv_text(found.to_frame()), nl=False)
    else:
        for text in str(found).splitlines():
            typer.echo(folded(printable(text.strip()), terminal_width()))
    if out is not None:
        say_written(out, write_landscape(out, found), aside=as_csv)
    if found.interrupted and out is not None:
        typer.echo("run the same command again to resume", err=True)
    return INTERRUPTED if found.interrupted else 0
