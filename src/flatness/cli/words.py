"""The words of options, known without loading torch: what they take, and what the library says about them."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any

DTYPES = ("float32", "float64", "bfloat16", "float16")
SPLITS = ("train", "test")
DEVICES = ("cpu", "cuda", "mps")


@functools.cache
def documented() -> dict[str, str]:
    """The first sentence about every argument of `flatness.measure`, from its docstring."""
    source = resources.files("flatness").joinpath("measuring", "measure.py").read_text(encoding="utf-8")
    functions = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    text = ast.get_docstring(next(node for node in functions if node.name == "measure")) or ""
    arguments = text.partition("Args:\n")[2].partition("\n\n")[0]
    parts = re.split(r"^    (\w+): ", arguments, flags=re.MULTILINE)[1:]
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
    return [name for call in _calls("catalogue", "Measure") for name in _names(call)]


def data_set_names() -> list[str]:
    """Names of the data sets of `flatness.data`, read from the source."""
    return [name for call in _calls("zoo/data", "register") for name in _names(call.args[0])]


def model_names() -> list[str]:
    """Names of the networks in `flatness.models`, read from the source."""
    assigned = (node for tree in _sources("zoo/models") for node in tree.body if isinstance(node, ast.Assign))
    lists = [node.value for node in assigned if ast.unparse(node.targets[0]) == "__all__"]
    return [name for names in lists[1:] for name in ast.literal_eval(names)]  # the first is the package's


def _calls(package: str, function: str) -> Iterator[ast.Call]:
    """Every call of a function in the modules of a package."""
    for tree in _sources(package):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == function:
                yield node


def _names(call: Any) -> list[str]:
    """What a call has as its argument ``name``, where that is a text."""
    given = [word.value for word in call.keywords if word.arg == "name"]
    return [str(value.value) for value in given if isinstance(value, ast.Constant)]


def _sources(package: str) -> Iterator[ast.Module]:
    for file in sorted(resources.files("flatness").joinpath(package).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".py"):
            yield ast.parse(file.read_text(encoding="utf-8"))


def _keys(package: str, name: str) -> tuple[str, ...]:
    """The keys of a dict that a package declares, read from the source."""
    for tree in _sources(package):
        for node in tree.body:
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
                assert isinstance(node.value, ast.Dict)
                return tuple(ast.literal_eval(key) for key in node.value.keys if key is not None)
    return ()


LOSSES = _keys("losses", "_NAMED")
LAYER_WORDS = _keys("network/layers", "LAYER_WORDS")
