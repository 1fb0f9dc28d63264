"""The words of options, known without loading torch: what they take, and what the library says about them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from importlib import resources

DTYPES = ("float32", "float64", "bfloat16", "float16")
SPLITS = ("train", "test")
DEVICES = ("cpu", "cuda", "mps")


@functools.cache
def documented() -> dict[str, str]:
    """The first sentence about every argument of `flatness.measure`, from its docstring."""
    source = resources.files("flatness").joinpath("measuring", "measure.py").read_text(encoding="utf-8")
    arguments = source.partition("\ndef measure(")[2].partition("Args:\n")[2].partition("\n\n")[0]
    parts = re.split(r"^        (\w+): ", arguments, flags=re.MULTILINE)[1:]
    sentences = (" ".join(part.split()).replace('"', "").split(". ")[0].rstrip(".") for part in parts[1::2])
    return dict(zip(parts[::2], (f"{sentence}." for sentence in sentences), strict=True))


def complete_from(words: Callable[[], list[str]]) -> Callable[[str], list[str]]:
    """A completion function over words."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words() if word.startswith(incomplete)]

    return complete


def complete_measures(incomplete: str) -> list[str]:
    """Names of measures, also after a comma."""
    before, comma, last = incomplete.rpartition(",")
    names = ["default", "all", *measure_names()]
    return [f"{before}{comma}{name}" for name in names if name.startswith(last)]


def measure_names() -> list[str]:
    """Names of the measures in the catalogue, read from the source: importing it would take seconds."""
    return _read("catalogue", r'\bMeasure\(\s*name="(\w+)"')


def data_set_names() -> list[str]:
    """Names of the data sets of `flatness.data`, read from the source."""
    return _read("zoo/data", r'^register\(\s*\w+\(\s*name="([^"]+)"')


def model_names() -> list[str]:
    """Names of the networks in `flatness.models`, read from the source."""
    lists = _read("zoo/models", r"^__all__ = \[(.*?)\]")[1:]  # the first is the package's
    return [name for names in lists for name in re.findall(r'"(\w+)"', names)]


def _read(package: str, pattern: str) -> list[str]:
    """What a pattern finds in the sources of a package, file by file."""
    files = sorted(resources.files("flatness").joinpath(package).iterdir(), key=lambda file: file.name)
    texts = [file.read_text(encoding="utf-8") for file in files if file.name.endswith(".py")]
    return re.findall(pattern, "\n".join(texts), re.MULTILINE | re.DOTALL)


LOSSES = tuple(_read("losses", r'^    "(\w+)": "\w+\.\w+",$'))
LAYER_WORDS = tuple(re.findall(r'"(\w+)":', _read("network/layers", r"^LAYER_WORDS: [^{]*\{(.*?)\}")[0]))
