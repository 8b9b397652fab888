"""The live view of a run: a progress bar on a terminal, else a line every few seconds. Only replica 0 has one."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from overtone.common.limits import human_bytes
from overtone.errors import printable, visible
from overtone.runs.events import Event, Finish, Observed, Opening, Resume, Stop, Train

SECONDS = 5.0  # between two lines where there is no terminal


class View:
    """A sink of the run log that writes to a console."""

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
        self._observed: Observed | None = None  # what an observer says of itself
        self._latest = ""  # words on the newest round

    def write(self, event: Event) -> None:
        """Show one event."""
        if event["event"] == "start":
            self._start(event)
        elif event["event"] == "resume":
            self._resume(event)
        elif event["event"] == "round":
            self._latest = f"round {event['index'] + 1}: {human_bytes(event['bytes_sent'])}"
            if self._observed is not None:
                self._show_progress(event["step"], self._latest)
        elif event["event"] == "train":
            self._train(event)
        elif event["event"] == "eval":
            metrics, sent = metrics_line(event["metrics"]), human_bytes(event["bytes_sent"])
            self._say(f"step {event['step']}: {metrics}, {sent} sent")
        elif event["event"] == "stop":
            self._stop(event)
        elif event["event"] == "finish":
            self._finish(event)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self.bar.stop()

    def _start(self, event: Opening) -> None:
        self.steps, self.unit = event["steps"], event["unit"]
        self._observed = event.get("observed")
        data, world = escape(event["data"]["name"]), event["environment"]["world"]
        place = event["config"].get("store")
        who = f"{world} replica{'s' if world > 1 else ''}" if place is None else f"a replica of {escape(place)}"
        seen = f"observing {escape(self._observed['store'])}: " if self._observed is not None else ""
        self._say(
            f"{seen}[bold]{event['method']}[/bold] on {data}: {event['parameters']:,} parameters, {who}, "
            f"{self.steps} steps of {event['units_per_step']:,} {self.unit} each"
        )
        self._say(f"run directory: {escape(event['folder'])}")
        self._show(event["step"])

    def _resume(self, event: Resume) -> None:
        self._start(event)
        folded = f", saved by {event['from_replicas']} replicas" if event["folded"] else ""
        self._say(f"goes on from step {event['step']}{folded}")

    def _show(self, step: int) -> None:
        self.bar.update(self.task, completed=step, total=self.steps)
        if self.console.is_terminal:
            self.bar.start()

    def _train(self, event: Train) -> None:
        left = event["seconds_left"]
        note = "  ".join(
            part
            for part in (
                f"loss {event['loss']:.3f}",
                f"{_short(event['units_per_second'])} {self.unit}/s",
                self._latest,
                f"waiting {event['waiting_share']:.0%}",
                f"{int(left) // 3600}:{int(left) // 60 % 60:02d}:{int(left) % 60:02d} left",
            )
            if part
        )
        self._show_progress(event["step"], note)

    def _show_progress(self, step: int, note: str) -> None:
        self.bar.update(self.task, completed=step, note=note)
        if not self.console.is_terminal and time.monotonic() - self._said >= SECONDS:
            self._said = time.monotonic()
            self._say(f"step {step}/{self.steps}  {note}")

    def _stop(self, event: Stop) -> None:
        folder = escape(event["folder"])
        if self._observed is None:
            self._say(f"{event['why']}: saved step {event['step']}; overtone train --resume {folder} goes on")
        else:
            again = f"overtone follow {escape(self._observed['store'])} --out {folder} goes on"
            self._say(f"{event['why']}: observed up to step {event['step']}; {again}")

    def _finish(self, event: Finish) -> None:
        self.bar.update(self.task, completed=event["step"])
        self.bar.stop()
        if event["sample"]:
            self._say("sample:")
            self.console.print(visible(event["sample"]), markup=False, highlight=False, style="dim")
        shares = ", ".join(f"{name} {share:.1%}" for name, share in event["shares"].items())
        self._say(f"time: {shares}")
        self._say(
            f"[bold]finished[/bold] after {event['step']} steps: {metrics_line(event['metrics'])}; "
            f"{human_bytes(event['bytes_sent'])} sent per replica in {event['rounds']} rounds"
        )

    def _say(self, line: str) -> None:
        self.console.print(printable(line), highlight=False, soft_wrap=True)


def _short(value: float) -> str:
    return f"{value:.0f}" if value < 10_000 else f"{value / 1000:.0f}k"


def metrics_line(metrics: Mapping[str, float]) -> str:
    """Metrics on one line, such as "loss 2.204, perplexity 9.06"."""
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items())
