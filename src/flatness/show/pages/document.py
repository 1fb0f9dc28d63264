"""The frame of every page: one HTML file with its style, its scripts and its data, that loads nothing.

Text from files or users is escaped where it becomes HTML (`markup`) and where it becomes JSON (here); the
page's policy forbids any script but its own, and its scripts can make no markup from text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

FOOT = "Smaller values are flatter. Press a column's heading to sort by it."
"""How to read tables of measures."""


def document(
    title: str,
    lead: Sequence[str],
    body: str,
    scripts: Sequence[str] = ("tables",),
    data: object = None,
    foot: str = FOOT,
) -> str:
    """A whole page.

    Args:
        title: Its heading.
        lead: Paragraphs under the heading, as text.
        body: What comes after them, as HTML.
        scripts: Names of the scripts it runs, in this order; ``tables`` sorts.
        data: What the scripts read, if anything.
        foot: How to read the page, under it.
    """
    script = '"use strict";\n' + "".join(_asset(f"{name}.js") for name in scripts)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )
    paragraphs = "".join(f"<p>{escape(text)}</p>" for text in lead)
    block = "" if data is None else f'<script type="application/json" id="data">{json_text(data)}</script>\n'
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_asset('page.css')}</style>\n</head>\n<body>\n"
        f'<a class="skip" href="#main">Skip to the results</a>\n'
        f"<header><h1>{escape(title)}</h1>{paragraphs}</header>\n"
        f'<main id="main">\n{body}\n</main>\n'
        f"<footer><p>{escape(foot)}</p>"
        f'<p id="said" role="status" aria-live="polite"></p></footer>\n'
        f"{block}<script>{script}</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return resources.files("flatness.show").joinpath("assets", name).read_text(encoding="utf-8")


def json_text(data: object) -> str:
    r"""Data as JSON inside HTML: no text in it can end the element it stands in.

    >>> json_text({"name": "</script>", "values": [1.5, float("nan")]})
    '{"name":"\\u003c/script\\u003e","values":[1.5,"nan"]}'
    """
    text = json.dumps(_finite(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _finite(data: Any) -> Any:
    """The same with nan and infinities as words, which JSON has no numbers for."""
    if isinstance(data, dict):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data
