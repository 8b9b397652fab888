"""A page as one HTML file: a shell with a body, styles, scripts and data in a single text that needs no network.

There are two pages: the report of runs side by side, and the spectrum of the signal of each run. The scripts are plain
JavaScript, one file per idea, joined in the order of the list; Chart.js draws.
"""

from __future__ import annotations

import html as markup
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

SCRIPTS = ("dom", "words", "theme", "canvas", "link", "series", "names", "charts", "table", "runs", "page")
SPECTRUM_SCRIPTS = ("dom", "words", "theme", "canvas", "spectrum_view", "spectrum_charts", "spectrum_page")
# Inside a script element these texts would end it, hide the rest of the page, or break a line of JavaScript.
ESCAPES = {"</": "<\\/", "<!--": "<\\u0021--", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def html(data: Mapping[str, Any]) -> str:
    """The report page. ``data`` comes from `page_data.data`; numbers that are not finite become null."""
    return _filled("report.html", ("page.css",), SCRIPTS, data)


def spectrum_html(data: Mapping[str, Any]) -> str:
    """The page of the signal. ``data`` comes from `spectrum_data.data`."""
    return _filled("spectrum.html", ("page.css", "spectrum.css"), SPECTRUM_SCRIPTS, data)


def _filled(body: str, styles: Sequence[str], scripts: Sequence[str], data: Mapping[str, Any]) -> str:
    parts = {
        "title": markup.escape(str(data["title"])),
        "style": "\n".join(map(_text, styles)),
        "dark": _text("dark.css"),
        "chart": _text("vendor/chart.umd.min.js"),
        "scripts": "\n".join(_text(f"{name}.js") for name in scripts),
        "data": _embedded(data),
    }
    template = _text("shell.html").replace("{{body}}", _text(body))
    # In one pass, so that a placeholder inside a part is not replaced.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def _text(name: str) -> str:
    return (resources.files(__name__) / name).read_text(encoding="utf-8")


def _embedded(data: Mapping[str, Any]) -> str:
    text = json.dumps(_finite(data), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for found, escaped in ESCAPES.items():
        text = text.replace(found, escaped)
    return text


def _finite(value: Any) -> Any:
    """The value with null in place of NaN and infinity, which JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value
