"""The live view of a run: a bar on a terminal, a line now and then elsewhere. One voice: replica 0's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from overtone.common.limits import human_bytes
from overtone.errors import printable, visible

SECONDS = 5.0  # between two lines where there is no terminal


class View:
    """A sink of the run log."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar = Progress(
            BarColumn(bar_width=10),
            TextColumn("{task.completed:.0f}/{task.total}", table_column=Column(no_wrap=True, min_width=9)),
            TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("train", total=None, note="")
        self.steps = 0
        self.unit = "samples"
        self._said = 0.0
        self._latest = ""  # of the newest round
        self._shows: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "start": self._start, "resume": self._resume, "round": self._round, "train": self._train,
            "eval": self._eval, "stop": self._stop, "finish": self._finish,
        }  # fmt: skip

    def write(self, record: Mapping[str, Any]) -> None:
        if record["event"] in self._shows:
            self._shows[record["event"]](record)

    def close(self) -> None:
        self.bar.stop()

    def _start(self, record: Mapping[str, Any]) -> None:
        self.steps, self.unit = record["steps"], record["unit"]
        data, world = escape(record["data"]["name"]), record["environment"]["world"]
        self._say(
            f"[bold]{record['method']}[/bold] on {data}: {record['parameters']:,} parameters, {world} "
            f"replica{'s' if world > 1 else ''}, {self.steps} steps of {record['units_per_step']:,} {self.unit} each"
        )
        self._say(f"run directory: {escape(record['folder'])}")
        self._show(record["step"])

    def _resume(self, record: Mapping[str, Any]) -> None:
        self._start(record)
        folded = f", saved by {record['from_replicas']} replicas" if record["folded"] else ""
        self._say(f"goes on from step {record['step']}{folded}")

    def _show(self, step: int) -> None:
        self.bar.update(self.task, completed=step, total=self.steps)
        if self.console.is_terminal:
            self.bar.start()

    def _round(self, record: Mapping[str, Any]) -> None:
        self._latest = f"round {record['index'] + 1}: {human_bytes(record['bytes_sent'])}"

    def _train(self, record: Mapping[str, Any]) -> None:
        left = record["seconds_left"]
        note = "  ".join(
            part
            for part in (
                f"loss {record['loss']:.3f}",
                f"{_short(record['units_per_second'])} {self.unit}/s",
                self._latest,
                f"waiting {record['waiting_share']:.0%}",
                f"{int(left) // 3600}:{int(left) // 60 % 60:02d}:{int(left) % 60:02d} left",
            )
            if part
        )
        self.bar.update(self.task, completed=record["step"], note=note)
        if not self.console.is_terminal and time.monotonic() - self._said >= SECONDS:
            self._said = time.monotonic()
            self._say(f"step {record['step']}/{self.steps}  {note}")

    def _eval(self, record: Mapping[str, Any]) -> None:
        self._say(f"step {record['step']}: {metrics_line(record['metrics'])}, {human_bytes(record['bytes_sent'])} sent")

    def _stop(self, record: Mapping[str, Any]) -> None:
        self._say(
            f"{record['why']}: saved step {record['step']}; overtone train --resume {escape(record['folder'])} goes on"
        )

    def _finish(self, record: Mapping[str, Any]) -> None:
        self.bar.update(self.task, completed=record["step"])
        self.bar.stop()
        if record["sample"]:
            self._say("sample:")
            self.console.print(visible(str(record["sample"])), markup=False, highlight=False, style="dim")
        shares = ", ".join(f"{name} {share:.1%}" for name, share in record["shares"].items())
        self._say(f"time: {shares}")
        self._say(
            f"[bold]finished[/bold] after {record['step']} steps: {metrics_line(record['metrics'])}; "
            f"{human_bytes(record['bytes_sent'])} sent per replica in {record['rounds']} rounds"
        )

    def _say(self, line: str) -> None:
        self.console.print(printable(line), highlight=False, soft_wrap=True)


def _short(value: float) -> str:
    return f"{value:.0f}" if value < 10_000 else f"{value / 1000:.0f}k"


def metrics_line(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items())
