"""Writes docs/run-log.md from the schema in src/overtone/runs/events.py.

python tools/document_run_log.py
"""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from pathlib import Path
from typing import Any, NotRequired, get_origin, get_type_hints, is_typeddict

from overtone.runs import events

FILE = Path(__file__).parent.parent / "docs" / "run-log.md"
CLASSES = {
    node.name: node for node in ast.parse(inspect.getsource(events)).body if isinstance(node, ast.ClassDef)
}  # of the schema's source: the texts below the fields are in no object
INTRODUCTION = f"""# The run log

`run.jsonl` in the directory of a run is its log: one JSON object per line, one line per event, only ever appended to.
Everything that overtone shows of a run comes from its log, and real runs and simulations write the same events.

This page lists every event and every field of **format {events.FORMAT}**. It is made from
`src/overtone/runs/events.py` by `python tools/document_run_log.py`; a test keeps the two equal.

- The first line of each session, "start" or "resume", carries the number of the format. overtone refuses a log of a
  format that it does not know, and names the file, the line and the formats that it reads.
- Logs without a number are of format 0: overtone 0.1.0 wrote them. They and logs of formats 1 to 3 are read
  too. A number that they lack reads as NaN (not known). Logs before format 2 are of runs without a delay, so no seconds
  of an exchange were hidden.
- A field is always there, unless the table says *optional*; then its text says why. An event without a field that it
  must have is refused.
- A line that is not JSON, or has no event and step, is damaged: it is left out, with a warning that names file and
  line. Events with other names are ignored.
- A number that is not finite is written as NaN or Infinity, as Python's `json` does.
- After a "resume", readers leave out the earlier lines of later steps, which were lost, and earlier "stop", "fail" and
  "finish" lines.
- A log with `observed` in its first line is that of an observer of a run in a store (`overtone follow`). It trains
  nothing, and has no events of training. `step` counts the local steps that the rounds stand for. `bytes_sent` and
  `bytes_received` are of members: the sizes of the messages and commits in the store, over the members that spoke in
  the round, and the rest of that round, which each of them had to read. `units` are those that messages tell, of all
  members that were heard. Seconds are the observer's own. So are, of `bytes`, the phases "setup" and "upkeep": what
  this session has read from the store. What nobody tells (norms, seconds of trainers) is NaN.

```python
from pathlib import Path

from overtone.runs import log

for event in log.read(Path("runs/mine")):
    if event["event"] == "eval":
        print(event["step"], event["metrics"]["loss"], event["bytes_sent"])
```
"""


def document() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    tables: dict[str, type] = {}
    for name, kind in events.EVENTS.items():
        parts.append(f"## {name}\n\n{_text(kind.__doc__)}\n\n{_table(kind)}")
        tables |= {hint.__name__: hint for hint in map(_inner, _hints(kind).values()) if is_typeddict(hint)}
    for hint in list(tables.values()):  # tables inside tables
        tables |= {below.__name__: below for below in map(_inner, _hints(hint).values()) if is_typeddict(below)}
    parts += [f"## {name}\n\n{_text(kind.__doc__)}\n\n{_table(kind)}" for name, kind in tables.items()]
    return "\n".join(parts)


def _table(kind: type) -> str:
    lines = ["| field | type | |", "|---|---|---|"]
    texts = _texts(kind.__name__)
    for key, hint in _hints(kind).items():
        if key == "event":
            continue
        optional = "*optional.* " if key in kind.__optional_keys__ else ""  # type: ignore[attr-defined]
        lines.append(f"| `{key}` | {_type(hint)} | {optional}{texts[key]} |")
    return "\n".join(lines) + "\n"


def _hints(kind: type) -> dict[str, Any]:
    return {
        key: hint.__args__[0] if get_origin(hint) is NotRequired else hint
        for key, hint in get_type_hints(kind, include_extras=True).items()
    }


def _texts(name: str) -> dict[str, str]:
    """The text below each field in the source, of the class with this name and of its bases."""
    found: dict[str, str] = {}
    for base in CLASSES[name].bases:
        assert isinstance(base, ast.Name)
        found |= _texts(base.id) if base.id in CLASSES else {}
    for field, below in pairwise(CLASSES[name].body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = _text(ast.literal_eval(below.value))
    return found


def _text(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _inner(hint: Any) -> Any:
    """The table that a field holds, also by name or in a list."""
    return hint.__args__[-1] if get_origin(hint) in (dict, list) else hint


def _type(hint: Any) -> str:
    inner = _inner(hint)
    if get_origin(hint) is list:
        return f"list of {_type(inner)}"
    if get_origin(hint) is dict:
        return "object" if inner is Any else f"object: name to {_type(inner)}"
    if is_typeddict(hint):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    return {int: "integer", float: "number", str: "text", bool: "true or false"}.get(hint, "integer or null")


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
