"""The options of ``flatness measure``: one for everything `flatness.measure` takes, and for the output."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatness.cli import words
from flatness.cli.words import complete_from

_DATA, _HOW, _OUTPUT = "Data", "How to measure", "Output"

Checkpoints = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CHECKPOINT",
        help="Files (.safetensors, .pt, .pth, .bin, .ckpt), folders or patterns; none: the model as built.",
    ),
]
ModelSpec = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="SPEC",
        help="package.module:factory, timm:NAME, or a network of flatness.models such as lenet5.",
        autocompletion=words.complete_models,
    ),
]
ModelArguments = Annotated[
    list[str] | None,
    typer.Option(
        "--model-arg", metavar="KEY=VALUE", help="An argument of the factory, such as sizes=64,32,10."
    ),
]
DataSpec = Annotated[
    str,
    typer.Option(
        "--data",
        "-d",
        metavar="SPEC",
        help=f"{', '.join(words.data_set_names())}, FILE.npz or package.module:factory.",
        autocompletion=words.complete_data_sets,
    ),
]
Split = Annotated[
    str,
    typer.Option(
        help="train or test.",
        metavar="NAME",
        rich_help_panel=_DATA,
        autocompletion=complete_from(*words.SPLITS),
    ),
]
Limit = Annotated[
    int | None, typer.Option(help="Only the first N samples.", metavar="N", rich_help_panel=_DATA)
]
Standardize = Annotated[
    bool, typer.Option("--standardize", help="Mean 0, deviation 1 in every channel.", rich_help_panel=_DATA)
]
DataDir = Annotated[
    str | None, typer.Option(help="Folder with the data sets.", metavar="DIR", rich_help_panel=_DATA)
]
Loss = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(words.LOSSES)}, or package.module:loss.",
        metavar="NAME",
        rich_help_panel=_HOW,
        autocompletion=complete_from(*words.LOSSES),
    ),
]
Forward = Annotated[
    str | None,
    typer.Option(
        help="package.module:function of (model, batch) that returns (output, target).",
        metavar="SPEC",
        rich_help_panel=_HOW,
    ),
]
Measures = Annotated[
    list[str] | None,
    typer.Option(
        help="Names with commas between, default, or all.  [default: default]",
        metavar="NAMES",
        rich_help_panel=_HOW,
        autocompletion=words.complete_measures,
    ),
]
Layers = Annotated[
    list[str] | None,
    typer.Option(
        help="Names with commas between, or last.  [default: every layer]",
        metavar="NAMES",
        rich_help_panel=_HOW,
    ),
]
Method = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(words.METHODS)}.",
        metavar="NAME",
        rich_help_panel=_HOW,
        autocompletion=complete_from(*words.METHODS),
    ),
]
Curvature = Annotated[
    str,
    typer.Option(
        help=f"{' or '.join(words.CURVATURES)}.",
        metavar="NAME",
        rich_help_panel=_HOW,
        autocompletion=complete_from(*words.CURVATURES),
    ),
]
Precision = Annotated[
    float,
    typer.Option(
        help="Relative standard error that sampled values aim at.", metavar="X", rich_help_panel=_HOW
    ),
]
MaxPasses = Annotated[
    int, typer.Option(help="The most random probes per sample.", metavar="N", rich_help_panel=_HOW)
]
DataStderr = Annotated[
    bool,
    typer.Option(
        "--data-stderr",
        help="Also the standard error with respect to the data's distribution.",
        rich_help_panel=_HOW,
    ),
]
MeasureOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        help="An option of one measure, such as layer_flatness.tolerance=1e-9.",
        metavar="MEASURE.KEY=VALUE",
        rich_help_panel=_HOW,
    ),
]
WeightDecay = Annotated[
    float, typer.Option(help="Adds the penalty's Hessian.", metavar="X", rich_help_panel=_HOW)
]
BatchSize = Annotated[
    int | None,
    typer.Option(help="Samples at a time.  [default: what fits]", metavar="N", rich_help_panel=_HOW),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda, cuda:1.",
        metavar="NAME",
        rich_help_panel=_HOW,
        autocompletion=complete_from(*words.DEVICES),
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(words.DTYPES)}.  [default: the model's]",
        metavar="NAME",
        rich_help_panel=_HOW,
        autocompletion=complete_from(*words.DTYPES),
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of everything random.", metavar="N", rich_help_panel=_HOW)]
Sort = Annotated[
    str | None,
    typer.Option(
        help="Order of the checkpoints: name, risk or a measure.", metavar="COLUMN", rich_help_panel=_OUTPUT
    ),
]
Reverse = Annotated[bool, typer.Option("--reverse", help="Largest first.", rich_help_panel=_OUTPUT)]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON instead of the table.", rich_help_panel=_OUTPUT)
]
AsCsv = Annotated[
    bool, typer.Option("--csv", help="Print CSV instead of the table.", rich_help_panel=_OUTPUT)
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder for JSON, CSV, LaTeX and an HTML page.", metavar="DIR", rich_help_panel=_OUTPUT
    ),
]
StatisticsTo = Annotated[
    Path | None,
    typer.Option(
        help="File for the sums of this part of the data, for 'flatness merge'.",
        metavar="FILE",
        rich_help_panel=_OUTPUT,
    ),
]
Progress = Annotated[
    bool,
    typer.Option(
        "--progress/--no-progress", help="A bar on work of more than two seconds.", rich_help_panel=_OUTPUT
    ),
]
