"""A trace as one page of HTML that needs nothing else: for talks, mails and papers' supplements."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from pathlib import Path

from pipeline.files import refusing, replace_file
from pipeline.traces import Trace

TITLE, DATA = "<!--title-->", "/*trace*/"  # where the template takes them
UNSAFE = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}  # inside a script element


def page(trace: Trace) -> str:
    """The page: the template with the trace as JSON, every sign that HTML reads escaped."""
    template = files("pipeline").joinpath("pages/trace.html").read_text(encoding="utf-8")
    head, _, rest = template.partition(TITLE)
    body, _, tail = rest.partition(DATA)
    header = trace.header
    title = f"{header['method'] or header['sampler']} on {header['model']}: {header['id']}"
    return "".join([head, escape(title), body, embedded({"header": header, "forwards": trace.forwards}), tail])


def embedded(data: object) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.translate(UNSAFE)


def write_page(trace: Trace) -> Path:
    """Write the page beside the trace; its path.

    Raises:
        UserError: where it cannot be written.
    """
    path = trace.path.with_suffix(".html")
    with refusing(path):
        replace_file(path, page(trace).encode("utf-8", "backslashreplace"))
    return path
