"""``flatness study``: list, run and show studies of many networks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flatness.cli import options as o
from flatness.cli.answers import FAILED, UsageError, blamed_on_words, printable
from flatness.cli.forms import terminal_width
from flatness.report.sheets import csv_text

_SCALES = ("smoke", "small", "gallery", "paper")
_EXECUTORS = ("local", "ray")
ABOUT = """\
Train many networks, measure them, and see whether flatness predicts the generalisation gap.

Example:
    flatness study list
    flatness study run petzka2021-cifar10 --scale smoke --out study
    flatness study show study
"""


def list_studies() -> None:
    """List the studies that come with the package, with their sizes.

    Example:
        flatness study list
    """
    from flatness.report.tables import Column, format_table
    from flatness.study.spec.spec import names, read_spec

    specs = [(name, read_spec(name)) for name in names()]
    columns = [Column(), Column(align="right"), Column(narrow="wrap")]
    rows = [(name, spec.size, spec.title) for name, spec in specs]
    typer.echo(format_table(columns, rows, terminal_width()))


def run(
    study: Annotated[
        str,
        typer.Argument(metavar="STUDY", help="A name from 'study list', or FILE.toml, which can run code."),
    ],
    out: Annotated[Path | None, o.option("Folder of the study.  [default: STUDY-SCALE]", "DIR")] = None,
    scale: Annotated[
        str | None,
        o.one_of(
            f"{', '.join(_SCALES)}.  [default: small; paper, which is everything, for your own FILE]",
            _SCALES,
        ),
    ] = None,
    executor: Annotated[str, o.one_of("", _EXECUTORS)] = "local",
    jobs: Annotated[int | None, o.option("Processes.  [default: one per GPU or core]", "N", min=1)] = None,
    device: Annotated[
        str | None, o.option("Where to train and measure.  [default: a GPU where there is one]", "NAME", None)
    ] = None,
    minutes: Annotated[float | None, o.option("Save everything and stop after N minutes.", "N")] = None,
    retry: Annotated[bool, o.option("Try failed networks again.", None, None, "--retry")] = False,
    trust: Annotated[
        bool, o.option("Run code named by a study from elsewhere.", None, None, "--trust")
    ] = False,
    data_dir: o.DataDir = None,
    progress: o.Progress = True,
) -> None:
    """Train the networks of a study, measure them and correlate; run it again to resume.

    A killed run loses at most a minute of training, or the measurement that was running.

    A study file is code: what it names as package.module:factory is imported and called. A file in a study
    folder that was unpacked, copied or received is refused if it names code, unless you pass --trust.

    Example:
        flatness study run petzka2019-mnist --scale smoke
        flatness study run mine.toml --out results --minutes 25
    """
    import math
    import os

    import flatness.study as studies
    from flatness.errors import SpecError
    from flatness.study.spec.spec import usual_scale

    if data_dir is not None:
        if not os.path.isdir(data_dir):
            raise UsageError(f"Expected --data-dir to be a folder but {data_dir} is not one.")
        os.environ["FLATNESS_DATA"] = data_dir  # workers look there too
    with blamed_on_words(SpecError):
        spec = studies.read_spec(study, scale or usual_scale(study))
    folder = out or Path(f"{spec.name}-{spec.scale}")
    if progress and usual_scale(study) == "small" and not folder.exists():
        _say_costs(spec.name, spec.scale, device, jobs)
    done = studies.run(
        spec,
        folder,
        executor,
        jobs=jobs,
        device=device,
        minutes=math.inf if minutes is None else minutes,
        retry=retry,
        trust=trust,
        progress=progress,
    )
    _present(done)
    raise typer.Exit(FAILED if "failed" in done.counts() else 0)


def _say_costs(name: str, scale: str, device: str | None, jobs: int | None) -> None:
    """Which scale of a study of the package runs, what it takes here, and what the others would."""
    from flatness.study.run.run import training_place
    from flatness.study.run.watch import scale_costs

    lines = [f"{name}, scale {scale}. On this machine:", *scale_costs(name, *training_place(device, jobs))]
    typer.echo("\n  ".join(lines), err=True)


def pack(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that 'study run' wrote.")],
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Where to.  [default: DIR.json.xz]")
    ] = None,
) -> None:
    """Write a study as one small file: all records, no weights. 'study show' reads it like the folder.

    Example:
        flatness study pack results
        flatness study show results.json.xz
    """
    from flatness.study import pack as pack_study

    path = pack_study(folder, file)
    typer.echo(f"{path}, {path.stat().st_size / 1024:,.0f} KiB")


def unpack(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that 'study pack' wrote.")],
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Where to.  [default: FILE without .json.xz]")
    ] = None,
) -> None:
    """Restore the folder of a packed study. 'study run' resumes there and trains nothing twice.

    Unpacking runs nothing. A study file in the folder that names package.module:factory needs --trust to run.

    Example:
        flatness study unpack results.json.xz
        flatness study run mine.toml --out results
    """
    from flatness.study import unpack as unpack_study

    typer.echo(unpack_study(file, folder))


def show(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A folder that 'study run' wrote, or a file of 'study pack'."),
    ],
    as_csv: Annotated[bool, o.option("Print the full table as CSV instead.", None, None, "--csv")] = False,
) -> None:
    """Show a study: print the summary, and remake its page, tables and figures.

    Example:
        flatness study show petzka2019-mnist-smoke
    """
    from flatness.study import ExperimentStudy, load

    study = load(folder)
    if not as_csv:
        _present(study)
    elif isinstance(study, ExperimentStudy):
        typer.echo(csv_text(study.summary_frame()), nl=False)
    else:
        for part in study.spec.parts:
            typer.echo(csv_text(study.correlations(part)), nl=False)


def _present(study: Any) -> None:
    from flatness.files import write_text
    from flatness.show.pages.study_page import render_study
    from flatness.show.plots.study import write_figures
    from flatness.study import Study
    from flatness.study.folder.records import readable_disk_errors

    typer.echo(
        printable(study.text(terminal_width()))
    )  # first: it is there also where nothing can be written
    page = ""
    with readable_disk_errors(study.path):
        study.path.mkdir(parents=True, exist_ok=True)
        study.write_tables()
        figures = write_figures(study)
        if isinstance(study, Study):
            write_text(study.path / "index.html", render_study(study))
            page = ", index.html"
    pictures = f", figures/ ({len(figures)} files)" if figures else ""
    tables = ", ".join(sorted(path.name for path in study.path.glob("*.csv")))
    typer.echo(f"\nwritten to {study.path}: {tables}{pictures}{page}")
