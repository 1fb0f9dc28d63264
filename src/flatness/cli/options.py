"""Every option of the command line, declared once, and those that several commands share as one argument.

What `flatness.measure` says about its arguments is the help of the options that have their names.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from flatness.cli import words
from flatness.cli.answers import UsageError, choice
from flatness.cli.values import number_or_word, split_list
from flatness.cli.words import complete_from, documented
from flatness.measuring import CURVATURES, METHODS

DATA, HOW, DRAW, OUTPUT = "Data", "How to measure", "What to draw", "Output"
"""Groups of options on help pages."""


def option(text: str, metavar: str | None = None, group: str | None = None, *names: str, **more: Any) -> Any:
    """An option: what it is, what its value is called, its group, and its names where they are special."""
    return typer.Option(*names, help=text, metavar=metavar, rich_help_panel=group, **more)


def one_of(text: str, known: tuple[str, ...], group: str | None = None) -> Any:
    """An option that takes one of some words, in the library's spelling or with dashes."""

    def check(parameter: typer.CallbackParam, value: str | None) -> str | None:
        return None if value is None else choice(value, parameter.opts[0], known)

    text = text or f"{(' or ' if len(known) == 2 else ', ').join(known)}."
    complete = complete_from(lambda: list(known))
    return option(text, "NAME", group, callback=check, autocompletion=complete)


# ---- the network, its data and its loss
ModelSpec = Annotated[
    str,
    option(
        "package.module:factory, timm:NAME, hf:PATH, or a network of flatness.models such as lenet5.", "SPEC",
        None,
        "--model", "-m", autocompletion=complete_from(words.model_names),
    ),
]  # fmt: skip
DataSpec = Annotated[
    str,
    option(
        "mnist, fashion-mnist, cifar10, digits, FILE.npz, hf:PATH or package.module:factory.", "SPEC", None,
        "--data", "-d", autocompletion=complete_from(words.data_set_names),
    ),
]  # fmt: skip
Checkpoints = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CHECKPOINT",
        help="Files (.safetensors, .pt, .pth, .bin, .ckpt), folders or patterns; none: the model as built.",
    ),
]
ModelArguments = Annotated[
    list[str] | None, option("An argument of the factory, such as sizes=64,32,10.", "KEY=VALUE", None)
]
Standardize = Annotated[
    bool, option("Scale every channel to mean 0 and deviation 1.", None, DATA, "--standardize")
]
DataDir = Annotated[str | None, option("Folder with the data sets.", "DIR", DATA)]
_LOSS = f"{', '.join(words.LOSSES)}, or package.module:loss."
_FORWARD = "package.module:function of (model, batch) that returns (output, target)."

# ---- what to measure and how
Measures = Annotated[
    list[str] | None,
    option(
        "Comma-separated names, default, or all.  [default: default]", "NAMES", HOW,
        callback=split_list, autocompletion=words.complete_measures,
    ),
]  # fmt: skip
Layers = Annotated[
    list[str] | None,
    option(
        f"Comma-separated names, {' or '.join(words.LAYER_WORDS)}.  [default: every layer]", "NAMES", HOW,
        callback=split_list,
    ),
]  # fmt: skip
MeasureOptions = Annotated[
    list[str] | None,
    option("An option of one measure, such as layer_flatness.tolerance=1e-9.", "MEASURE.KEY=VALUE", HOW),
]
WeightDecay = Annotated[float, option(documented()["weight_decay"], "X", HOW)]
Device = Annotated[
    str | None,
    option(documented()["device"], "NAME", HOW, autocompletion=complete_from(lambda: list(words.DEVICES))),
]
Progress = Annotated[bool, option(documented()["progress"], None, OUTPUT, "--progress/--no-progress")]

# ---- output
AsJson = Annotated[bool, option("Print JSON instead of the table.", None, OUTPUT, "--json")]
AsCsv = Annotated[bool, option("Print CSV instead of the table.", None, OUTPUT, "--csv")]
Out = Annotated[Path | None, option("Folder for JSON, CSV, LaTeX and an HTML page.", "DIR", OUTPUT)]


@dataclass(frozen=True)
class Network:
    """A network, data and a loss, in the words of the command line."""

    model: ModelSpec
    data: DataSpec
    checkpoints: Checkpoints = None
    model_arg: ModelArguments = None
    split: Annotated[str, one_of("", words.SPLITS, DATA)] = "train"
    limit: Annotated[int | None, option("Only the first N samples.", "N", DATA, min=1)] = None
    standardize: Standardize = False
    data_dir: DataDir = None
    loss: Annotated[
        str, option(_LOSS, "NAME", HOW, autocompletion=complete_from(lambda: list(words.LOSSES)))
    ] = "cross_entropy"
    forward: Annotated[str | None, option(_FORWARD, "SPEC", HOW)] = None


@dataclass(frozen=True)
class Compute:
    """Where and in which precision to compute, in the words of the command line."""

    batch_size: Annotated[int | None, option(documented()["batch_size"], "N", HOW)] = None
    device: Device = None
    dtype: Annotated[
        str | None, one_of(f"{documented()['dtype']}  [{', '.join(words.DTYPES)}]", words.DTYPES, HOW)
    ] = None
    seed: Annotated[int, option(documented()["seed"], "N", HOW)] = 0
    progress: Progress = True


@dataclass(frozen=True)
class Measuring:
    """What goes to `flatness.measure` as it is."""

    method: Annotated[str, one_of(documented()["method"], METHODS, HOW)] = "auto"
    curvature: Annotated[str, one_of(documented()["curvature"], CURVATURES, HOW)] = "hessian"
    precision: Annotated[float, option(documented()["precision"], "X", HOW)] = 0.01
    max_passes: Annotated[int, option(documented()["max_passes"], "N", HOW)] = 100
    data_stderr: Annotated[bool, option(documented()["data_stderr"], None, HOW, "--data-stderr")] = False
    samples: Annotated[
        str | None, option(documented()["samples"], "N|enough", HOW, callback=number_or_word)
    ] = None
    tf32: Annotated[bool, option(documented()["tf32"], None, HOW, "--tf32")] = False
    weight_decay: WeightDecay = 0.0


@dataclass(frozen=True)
class Form:
    """How to print results."""

    as_json: AsJson = False
    as_csv: AsCsv = False

    def __post_init__(self) -> None:
        """Refuse two forms at once before anything is loaded."""
        if self.as_json and self.as_csv:
            raise UsageError("Expected one of --json and --csv but got both.")

    @property
    def name(self) -> str:
        """What to print: "json", "csv" or "table"."""
        return "json" if self.as_json else "csv" if self.as_csv else "table"


@dataclass(frozen=True)
class Drawing:
    """Where data and pictures go."""

    as_csv: AsCsv = False
    out: Annotated[
        Path | None,
        option("Folder for data, pictures and a page; resumes from what it holds.", "DIR", OUTPUT),
    ] = None
    fresh: Annotated[bool, option("Recompute what --out already holds.", None, OUTPUT, "--fresh")] = False


def grouped(function: Callable[..., Any]) -> Callable[..., Any]:
    """A command whose arguments of the classes above are made from an option for each of their fields."""
    own = inspect.signature(function, eval_str=True).parameters.values()
    groups: dict[str, Any] = {one.name: one.annotation for one in own if is_dataclass(one.annotation)}
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = []
    for one in own:
        expanded = (
            inspect.signature(one.annotation, eval_str=True).parameters.values()
            if one.name in groups
            else [one]
        )
        parameters += [each.replace(kind=keyword) for each in expanded]

    @functools.wraps(function)
    def command(**given: Any) -> Any:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        return function(**given)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {}
    return command
