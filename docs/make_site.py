"""What MkDocs is told about the site: which pages there are, in what order, and what is generated.

Nothing has to be listed: a page in ``docs/how-to``, ``docs/concepts``, … is on the site, in the order in
which ``docs/README.md`` links to the pages. The pages on the public names are generated from
``flatness.__all__`` and the docstrings, those of the notebooks from the outputs they keep. ``make docs``
builds the site.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

import flatness

DOCS = Path(__file__).parent
ROOT = DOCS.parent
BESIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/RESULTS.md")  # pages outside docs
SECTIONS = {
    "Start": "*.md",
    "How to": "how-to/*.md",
    "Notebooks": "notebooks/*.ipynb",
    "Concepts": "concepts/*.md",
    "Reference": "reference/*.md",
    "Gallery": "gallery/*.md",
}
PROJECT = ("architecture.md", *BESIDE)
ROOMS = {
    "measuring": "Measuring",
    "report": "Reports",
    "catalogue": "The catalogue",
    "symmetry": "Symmetries",
    "generalization": "Generalisation",
    "integrations": "During training",
    "network": "Layers",
    "problem": "Problem and processes",
}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#:\s]+)(#[^)]*)?\)")
PICTURE = re.compile(
    r"<picture>.*?srcset=\"([^\"]+)\".*?<img ([^>]*?)src=\"([^\"]+)\"([^>]*)>.*?</picture>", re.DOTALL
)


class Examples(griffe.Extension):
    """Docstrings say ``Example:``, which griffe knows as a section only in the plural."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Read one object's docstring as meant."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE
            )


def on_config(config: Any) -> Any:
    """Tell MkDocs the order of the pages."""
    order = [target for _, _, target, _ in LINK.findall((DOCS / "README.md").read_text(encoding="utf-8"))]
    nav: list[dict[str, Any]] = []
    for title, pattern in SECTIONS.items():
        pages = [page.relative_to(DOCS).as_posix() for page in DOCS.glob(pattern)]
        pages = [page for page in pages if page not in PROJECT]
        pages.sort(key=lambda page: (not page.endswith("README.md"), _place(order, page), page))
        listed: list[Any] = [page.replace(".ipynb", ".md") for page in pages]
        if title == "Reference":
            listed = [{"Measures": listed}, {"Names": [{title: path} for path, title, _ in name_pages()]}]
        nav.append({title: listed})
    nav.append({"Project": list(PROJECT)})
    config["nav"] = nav
    return config


def _place(order: list[str], page: str) -> int:
    return order.index(page) if page in order else len(order)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are no files in docs."""
    for path, _, content in name_pages():
        files.append(File.generated(config, path, content=content))
    for path in BESIDE:
        files.append(File.generated(config, path, content=(ROOT / path).read_text(encoding="utf-8")))
    for notebook in sorted(DOCS.glob("notebooks/*.ipynb")):
        for path, content in notebook_files(notebook):
            files.append(File.generated(config, f"notebooks/{path}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links lead to pages of the site, pictures follow its scheme, and unseen examples stay unseen."""
    source = page.file.src_uri
    here = (ROOT if source in BESIDE else DOCS) / source
    markdown = re.sub(r"<!--.*?-->\n?", "", markdown, flags=re.DOTALL)
    markdown = PICTURE.sub(_two_pictures, markdown)
    return LINK.sub(lambda link: _link(link, here, source), markdown)


def _two_pictures(found: re.Match[str]) -> str:
    dark, before, light, after = found.groups()
    return "".join(
        f'<img {before}src="{name}#only-{scheme}"{after}>'
        for name, scheme in ((light, "light"), (dark, "dark"))
    )


def _link(found: re.Match[str], here: Path, source: str) -> str:
    """A link as the site has it; only its words where it leads to a file that is not on the site."""
    mark, words, target, anchor = found.groups()
    path = Path(os.path.normpath(here.parent / target))
    if path.relative_to(ROOT).as_posix() in BESIDE:
        there = path.relative_to(ROOT)
    elif path.is_relative_to(DOCS) and not path.is_dir():
        there = path.relative_to(DOCS)
        there = there.with_suffix(".md") if there.suffix == ".ipynb" else there  # a page is made of it
    elif path.exists():
        return words
    else:
        return found[0]  # MkDocs says that it leads nowhere
    return f"{mark}[{words}]({os.path.relpath(there, Path(source).parent)}{anchor or ''})"


def name_pages() -> Iterator[tuple[str, str, str]]:
    """Path, title and content of the pages on the public names: a room each, then a public module each."""
    rooms: dict[str, list[str]] = {room: [] for room in ROOMS}
    modules = []
    for name in flatness.__all__:
        value = getattr(flatness, name)
        if hasattr(value, "__path__") or not hasattr(value, "__qualname__"):
            modules.append(name)
        else:
            rooms.setdefault(value.__module__.split(".")[1], []).append(name)
    for room, names in rooms.items():
        title = ROOMS.get(room, room.capitalize())
        functions_first = sorted(names, key=lambda name: (name[0].isupper(), name))
        parts = [_section(getattr(flatness, name), f"flatness.{name}") for name in functions_first]
        yield f"names/{room}.md", title, "\n\n".join([f"# {title}", *parts]) + "\n"
    for name in modules:
        module = getattr(flatness, name)
        about = (module.__doc__ or "").strip()
        parts = [_section(getattr(module, each), f"flatness.{name}.{each}") for each in module.__all__]
        title = f"flatness.{name}"
        yield f"names/{name}.md", title, "\n\n".join([f"# {title}", about, *parts]) + "\n"


def _section(value: Any, heading: str) -> str:
    if not hasattr(value, "__qualname__"):
        return f"### {heading}\n\n`{value!r}`"
    path = f"{value.__module__}.{value.__qualname__}"
    return (
        f'::: {path}\n    options:\n      heading: "{heading}"\n      toc_label: "{heading.split(".", 1)[1]}"'
    )


def notebook_files(notebook: Path) -> Iterator[tuple[str, str | bytes]]:
    """A notebook as a page and its pictures, with the outputs that it keeps."""
    parts: list[str] = []
    for number, cell in enumerate(json.loads(notebook.read_text(encoding="utf-8"))["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for place, output in enumerate(cell["outputs"]):
            data = output.get("data", {})
            if "image/png" in data:
                picture = f"{notebook.stem}-{number}-{place}.png"
                yield picture, base64.b64decode(data["image/png"])
                parts.append(f"![]({picture})")
            elif "text/html" in data:
                inside = re.sub(r"\n\s*\n", "\n", "".join(data["text/html"]))
                parts.append(f'<div class="output">{inside}</div>')
            else:
                text = "".join(output.get("text", data.get("text/plain", "")))
                parts.append(f"```text\n{text.rstrip()}\n```")
    download = f"*This page is a notebook with the outputs of its last run: docs/notebooks/{notebook.name}.*"
    yield f"{notebook.stem}.md", "\n\n".join([*parts, download]) + "\n"
