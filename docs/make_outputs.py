"""Run the examples of a page, and write what they print into it.

A page is read from top to bottom, all its examples sharing one folder and one namespace:

- ``python`` runs; a block that begins with ``# name.py`` becomes that file instead.
- ``console`` runs its ``$ flatness …`` lines as the command line would; other lines are what they print.
- ``text`` is what the last ``python`` or ``console`` block printed; a line ``...`` stands for any lines.
- ``toml`` is read, and checked as a study where it is one.
- ``<!-- python … -->`` runs and is not shown: what a page takes for granted.
- ``<!-- not run: REASON -->`` before a block leaves it out, ``<!-- status: 1 -->`` says how its last command
  ends, and ``<!-- within 20 % -->`` before what is printed says how far numbers may be off.

``make outputs`` runs all pages and writes what has changed; the tests run them and compare.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")],
    key=lambda page: (page.parent != ROOT, page),
)
LANGUAGES = ("python", "console", "text", "toml")
PRINTED = ("python", "console")
TOLERANCE = 0.02  # networks trained on another processor differ in their last digits, and these add up

ITEM = re.compile(
    r"^<!-- (?P<mark>python\n.*?\n|[^>\n]*?) ?-->\n|^```(?P<language>\S*)\n(?P<body>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
# Numbers as small are rounding, which differs between machines.
_ROUNDING = 1e-13
NUMBER = re.compile(r"[-−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
TOKEN = re.compile(rf"{NUMBER.pattern}|[^\s\d─█]+")


@dataclass
class Block:
    """One fenced block of a page, and the marks before it."""

    language: str
    body: str
    start: int
    page: Path
    marks: dict[str, str] = field(default_factory=dict)
    unseen: bool = False
    printed: str = ""  # when it ran

    @property
    def place(self) -> str:
        """File and line, to find it."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def line(self) -> int:
        """The line of the page that opens the block."""
        return self.page.read_text(encoding="utf-8").count("\n", 0, self.start) + 1

    @property
    def not_run(self) -> str | None:
        """Why the block is left out, if it is."""
        return self.marks.get("not run")

    @property
    def tolerance(self) -> float:
        """How far its numbers may be off, relatively."""
        within = [mark for mark in self.marks if mark.startswith("within ")]
        return float(within[0].split()[1]) / 100 if within else TOLERANCE


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks and the unseen Python of a page, in order."""
    blocks, marks = [], {}
    for found in ITEM.finditer(page.read_text(encoding="utf-8")):
        mark = found["mark"]
        if mark is None:
            blocks.append(Block(found["language"], found["body"], found.start(), page, marks))
            marks = {}
        elif mark.startswith("python\n"):
            blocks.append(Block("python", mark.removeprefix("python\n"), found.start(), page, unseen=True))
        else:
            name, _, value = mark.partition(": ")
            marks = {**marks, name: value}
    return blocks


class Session:
    """The folder and the namespace that the examples of one page share."""

    def __init__(self, page: Path, folder: Path) -> None:
        self.folder = folder
        self.namespace: dict[str, Any] = {"__name__": page.stem}

    def run(self, block: Block) -> str:
        """Run one block and return what it printed."""
        return getattr(self, f"_{block.language}")(block)

    def _python(self, block: Block) -> str:
        file = re.match(r"# ([\w/]+\.py)\n", block.body)
        if file is not None:
            (self.folder / file[1]).write_text(block.body, encoding="utf-8")
            return ""
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile("\n" * block.line + block.body, str(block.page), "exec"), self.namespace)
        return out.getvalue()

    def _console(self, block: Block) -> str:
        commands = re.findall(r"^\$ ((?:.*\\\n)*.*)$", block.body, re.MULTILINE)
        assert commands, "a line of a console block that is run begins with '$ '"
        last, printed = len(commands) - 1, []
        for number, command in enumerate(commands):
            words = shlex.split(command.replace("\\\n", " "), comments=True)
            assert words[0] == "flatness", f"only 'flatness' is run, not '{words[0]}'"
            status, out, err = self._command(words[1:])
            wanted = int(block.marks.get("status", "0")) if number == last else 0
            assert status == wanted, f"{command}\nended with status {status}:\n{out}{err}"
            printed.append(f"$ {command}\n{out}" if "\n" in block.body.strip() else out)
        return "".join(printed)

    def _command(self, words: list[str]) -> tuple[int, str, str]:
        from flatness.cli import main

        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main(words)
            except SystemExit as left:
                return int(left.code or 0), out.getvalue(), err.getvalue()

    def _toml(self, block: Block) -> str:
        from flatness.study import read_spec

        content = tomllib.loads(block.body)
        if "experiment" in content or {"data", "model", "grid"} <= content.keys():
            read_spec(content)
        return ""

    def _text(self, block: Block) -> str:
        raise AssertionError("a text block is what the python or console block before it prints")


@contextlib.contextmanager
def fresh(folder: Path) -> Iterator[None]:
    """Work in a folder, 80 columns wide, and forget the modules that are imported from it."""
    kept = set(sys.modules)
    environment = {"COLUMNS": "80", "NO_COLOR": "1"}
    with contextlib.chdir(folder), mock.patch.dict("os.environ", environment):
        sys.path.insert(0, str(folder))
        try:
            yield
        finally:
            sys.path.remove(str(folder))
            for name in set(sys.modules) - kept:
                if str(getattr(sys.modules[name], "__file__", "") or "").startswith(str(folder)):
                    del sys.modules[name]


def run_page(page: Path, folder: Path) -> Iterator[tuple[Block, str]]:
    """Run the blocks of a page; yield each piece of text that is to be printed, with what was printed."""
    session, last = Session(page, folder), None
    with fresh(folder):
        for block in blocks_of(page):
            try:
                if block.language == "text" and last is not None:
                    if last.not_run is None:
                        yield block, last.printed
                    last = None
                    continue
                last = block if block.language in PRINTED else last
                if block.not_run is None:
                    block.printed = session.run(block)
                    if block.language == "console" and shows_output(block):
                        yield block, block.printed
                        last = None
            except Exception as error:
                error.add_note(f"in {block.place}")
                raise


def shows_output(block: Block) -> bool:
    """Whether a console block shows what its commands print."""
    lines = re.sub(r"\\\n", " ", block.body).splitlines()
    return any(line and not line.startswith("$ ") for line in lines)


def difference(wanted: str, printed: str, tolerance: float) -> str:
    """What of the wanted text was not printed; "" if it says the same, but for white space and rounding."""
    got = TOKEN.findall(printed)
    chunks = re.split(r"^\s*\.\.\.\s*$", wanted, flags=re.MULTILINE)
    place = 0
    for number, chunk in enumerate(chunks):
        tokens = TOKEN.findall(chunk)
        starts = range(place, len(got) - len(tokens) + 1) if number else [0]
        if number and number == len(chunks) - 1:
            starts = [max(place, len(got) - len(tokens))]
        found = next((start for start in starts if _alike(tokens, got[start:], tolerance)), None)
        if found is None:
            return chunk
        place = found + len(tokens)
    return "" if place == len(got) or len(chunks) > 1 else "(more was printed)"


def _alike(wanted: list[str], got: list[str], tolerance: float) -> bool:
    if len(got) < len(wanted):
        return False
    for place, (one, other) in enumerate(zip(wanted, got, strict=False)):
        if one == other:
            continue
        if not (NUMBER.fullmatch(one) and NUMBER.fullmatch(other)):
            return False
        if abs(_value(one) - _value(other)) > _margin(wanted, place, tolerance):
            return False
    return True


def _margin(wanted: list[str], place: int, tolerance: float) -> float:
    """How far a number may be off: by 4 of its standard errors, and an error by as much as itself."""
    number = abs(_value(wanted[place]))
    if wanted[place + 1 : place + 2] == ["±"]:
        return max(4 * abs(_value(wanted[place + 2])), tolerance * number)
    if place and wanted[place - 1] == "±":
        return number
    return max(tolerance * number, 1.01 * _unit(wanted[place]), _ROUNDING)


def _value(number: str) -> float:
    return float(number.replace(",", "").replace("−", "-"))


def _unit(number: str) -> float:
    """What the last printed place counts for, where there are decimals."""
    mantissa, _, exponent = number.partition("e")
    _, dot, decimals = mantissa.partition(".")
    return 10.0 ** (int(exponent or 0) - len(decimals)) if dot else 0.0


def rewritten(page: Path, folder: Path) -> str:
    """The page with every output that has changed replaced by what was printed."""
    text, moved = page.read_text(encoding="utf-8"), 0
    for block, printed in run_page(page, folder):
        if not difference(block.body, printed, block.tolerance):
            continue
        if re.search(r"^\s*\.\.\.\s*$", block.body, re.MULTILINE):
            sys.exit(f"{block.place}: write this one by hand, it leaves lines out. Printed:\n{printed}")
        new = "\n".join(line.rstrip() for line in printed.strip("\n").splitlines()) + "\n"
        at = text.index(block.body, block.start + moved)
        text = text[:at] + new + text[at + len(block.body) :]
        moved += len(new) - len(block.body)
    return text


def main() -> None:
    """Rewrite the pages that are named, or all."""
    for page in [Path(name).resolve() for name in sys.argv[1:]] or PAGES:
        with tempfile.TemporaryDirectory() as folder:
            page.write_text(rewritten(page, Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
