"""The table of a group of runs: for the terminal, as Markdown, as CSV."""

from __future__ import annotations

import csv
import html
import io
import math
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from overtone.common.limits import human_bytes
from overtone.errors import one_line, printable
from overtone.report.standings import Group, Row, difference

LEGEND = {  # by column
    "loss": "on validation data, after the last messages; ± half the difference between the best and the worst seed.",
    "loss vs DiLoCo": "against the row of `diloco` with the smallest `every`, then the smallest `delay`, then most "
    "seeds, then the lowest loss.",
    "gain kept": "the share of DiLoCo's gain over `alone` (one replica, no communication) that the method keeps.",
    "bytes sent": "bytes that one replica sent in the whole run, as its ledger counted them; likewise received.",
    "bytes vs DiLoCo": "by the bytes sent, or by those received where these are more.",
    "time on link": "on the virtual network of the runs (of real runs: the default one): local steps, and waiting for "
    "exchanges that they do not hide.",
    "drift": "the largest distance of a replica's weights from the mean of all replicas, before the last messages.",
}
FORMULA = ("=", "+", "-", "@", "\t", "\n", "\\")  # a backslash, because control characters are spelt out with one
CLOCK = ((86400, "days"), (3600, "h"), (60, "min"), (1, "s"))
SAME = ("perplexity", "bits_per_byte", "top5")  # repeat what loss and top1 say; only the page and the CSV show them


def cells(group: Group, *, both: bool = False) -> tuple[list[str], list[list[str]]]:
    """The headers, and the cells of all rows as text. Empty columns are left out. So are the bytes received if all rows
    sent as many, unless ``both`` are asked for."""
    both = both or any(row.received != row.bytes for row in group.rows)
    extra = list(dict.fromkeys(name for row in group.rows for name in row.metrics if name not in SAME))
    words = [name.replace("_", " ") for name in extra]
    headers = ["method", "loss", *words, "loss vs DiLoCo", "gain kept", "bytes sent", "bytes received",
               "bytes vs DiLoCo", "vs DDP", "time on link", "drift", ""]  # fmt: skip
    body = []
    for row in group.rows:
        versus = group.versus(row)
        body.append(
            [
                row.label,
                loss_words(row),
                *(number(row.metrics.get(name)) for name in extra),
                percent(versus.loss_vs_diloco, signed=True),
                percent(versus.gain_kept),
                "" if row.bytes is None else human_bytes(row.bytes),
                "" if row.received is None or not both else human_bytes(row.received),
                ratio(versus.less_than_diloco),
                ratio(versus.less_than_ddp),
                duration(group.seconds(row)),
                percent(row.drift, digits=1),
                "; ".join(row.caveats),
            ]
        )
    kept = [i for i, name in enumerate(headers) if any(line[i] for line in body) or name in ("method", "loss")]
    return [headers[i] for i in kept], [[line[i] for i in kept] for line in body]


def notes(group: Group, first: Group) -> list[str]:
    """The sentences above the table of a group: why it may not be compared with the first, and its own notes."""
    apart = difference(group, first)
    return [*([apart] if apart else []), *group.notes]


def legend(groups: Sequence[Group]) -> list[str]:
    """A sentence for each column that is shown and needs an explanation."""
    there = {header for group in groups for header in cells(group)[0]}
    return [f"{column}: {words}" for column, words in LEGEND.items() if column in there]


def terminal(group: Group) -> Table:
    """The table for a terminal."""
    headers, body = cells(group)
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for header in headers:
        words = header in ("method", "")
        shown.add_column(escape(printable(header)), justify="left" if words else "right", no_wrap=header == "method")
    for line in body:
        shown.add_row(*(escape(printable(cell)) for cell in line))
    return shown


def markdown(groups: Sequence[Group]) -> str:
    """The tables of all groups as Markdown."""
    parts = []
    for group in groups:
        headers, body = cells(group, both=True)
        parts += [f"## {plain(group.name)}", "", *(f"{plain(note)}\n" for note in notes(group, groups[0]))]
        parts += [_line(headers), _line(["---"] * len(headers)), *map(_line, body), ""]
    return "\n".join([*parts, *(f"- {line}" for line in legend(groups))]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(plain(cell).replace("|", "\\|") for cell in cells) + " |"


def plain(text: str) -> str:
    """A text from a log, safe in one line of Markdown. Markdown passes HTML through, so HTML is escaped."""
    return html.escape(one_line(text), quote=False)


def as_csv(groups: Sequence[Group]) -> str:
    """The rows of all groups as CSV, with unrounded numbers."""
    lines = [_raw(group, row) for group in groups for row in group.rows]
    columns = list(dict.fromkeys(column for line in lines for column in line))
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writerow({column: harmless(column) for column in columns})
    writer.writerows({column: harmless(value) for column, value in line.items()} for line in lines)
    return file.getvalue()


def harmless(value: Any) -> Any:
    """The value, safe in a spreadsheet: a text that would be taken for a formula gets a quote; numbers stay numbers."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(FORMULA) else text


def _raw(group: Group, row: Row) -> dict[str, Any]:
    return {
        "group": group.name,
        "method": row.method,
        "label": row.label,
        "seeds": " ".join(map(str, row.seeds)),
        "loss": row.loss,
        "spread": row.spread,
        "bytes_sent": row.bytes,
        "bytes_received": row.received,
        **vars(group.versus(row)),
        "drift": row.drift,
        "rounds": row.rounds,
        "waiting": row.waiting,
        "seconds_on_link": group.seconds(row),
        "residual": row.residual,
        "marks": "; ".join(row.caveats),
        **row.metrics,
    }


def loss_words(row: Row) -> str:
    """The loss with its spread, such as "2.204 ± 0.010"."""
    if row.loss is None:
        return "none yet"
    return f"{row.loss:.3f}" + ("" if row.spread is None else f" ± {row.spread / 2:.3f}")


def percent(share: float | None, *, digits: int = 0, signed: bool = False) -> str:
    """A share in per cent; empty for None."""
    if share is None:
        return ""
    if not math.isfinite(share):
        return "–"
    share = round(share, digits + 2 + signed) + 0.0
    return f"{share:+.1%}" if signed else f"{share:.{digits}%}"


def number(value: float | None) -> str:
    """A number with four digits; empty for None."""
    return "" if value is None else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """A time in the largest unit of which there are at least two; empty for None."""
    if seconds is None:
        return ""
    size, unit = next((one for one in CLOCK if seconds >= 2 * one[0]), CLOCK[-1])
    return f"{float(f'{seconds / size:.3g}'):g} {unit}"


def ratio(fewer: float | None) -> str:
    """A ratio of bytes: "56x fewer", "7x more"; "nothing" if the row sends nothing; empty for None."""
    if fewer is None:
        return ""
    if math.isinf(fewer):
        return "nothing"
    if round(fewer, 3) == 1:
        return "1x"
    return f"{_times(fewer)}x fewer" if fewer > 1 else f"{_times(1 / fewer)}x more"


def _times(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"
