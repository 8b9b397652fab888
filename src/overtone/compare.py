"""Several runs side by side: what each method keeps of DiLoCo's gain, and for how many bytes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import replace
from typing import Any

import torch
from rich.table import Table

from overtone.config import MethodChoice, Simulation, Training
from overtone.simulation import simulate
from overtone.tasks import Language, TaskOptions
from overtone.words import human_bytes

DEMO = Simulation(
    training=Training(steps=600, batch=8), task=TaskOptions(language=Language(width=64, layers=2, heads=4))
)
DEMO_LEGEND = (
    "[dim]loss: nats per byte on held-out text, after finish(). bytes sent: by one replica over the whole run.\n"
    "gain kept: the share of DiLoCo's gain over `alone` (one replica, no communication) that survives.\n"
    "published has no shared model: its loss is that of replica 0; «mean» is the average of its replicas.[/dim]"
)


def run_side_by_side(
    configs: Mapping[str, Simulation],
    *,
    workers: int,
    progress: Callable[[str, int, float], None],
    done: Callable[[str, dict[str, Any]], None],
) -> None:
    """All simulations, ``workers`` at a time in processes of one thread; each reports its steps and then its result."""
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_take_queue, initargs=(queue,)) as pool:
        running = {pool.submit(_work, name, config): name for name, config in configs.items()}
        while running:
            ended, _ = wait(running, timeout=0.1, return_when=FIRST_COMPLETED)
            while not queue.empty():
                progress(*queue.get())
            for future in ended:
                done(running.pop(future), future.result())


_queue: Any = None  # a worker's way to tell its progress


def _take_queue(queue: Any) -> None:
    global _queue
    _queue = queue
    torch.set_num_threads(1)


def _work(name: str, config: Simulation) -> dict[str, Any]:
    return simulate(config, lambda step, loss: _queue.put((name, step, loss)) if step % 10 == 0 else None)


def demo_configs(steps: int) -> dict[str, Simulation]:
    choices = (
        MethodChoice("alone"),
        MethodChoice("ddp"),
        MethodChoice("diloco", every=10, outer_lr=0.9, momentum=0.8),
        MethodChoice("published", every=10),
        MethodChoice("decoupled", every=10, outer_lr=0.9, momentum=0.8),
    )
    training = replace(DEMO.training, steps=steps)
    return {choice.method: replace(DEMO, choice=choice, training=training) for choice in choices}


def share_of_gain(loss: float, *, alone: float, diloco: float) -> str:
    """100 %: as good as DiLoCo; 0 %: no better than training alone; below: worse. Nothing to share if DiLoCo is."""
    if diloco >= alone:
        return "no gain"
    return f"{round((alone - loss) / (alone - diloco), 2) + 0.0:.0%}"


def table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Loss, bytes and gain kept of runs that differ only in their method; needs `alone` and `diloco` among them."""
    by_name = {result["method"]: result for result in results}
    alone, diloco = by_name["alone"]["val_loss"], by_name["diloco"]["val_loss"]
    reference = by_name["diloco"]["bytes_sent"]
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("method", "loss", "bytes sent", "vs DiLoCo", "gain kept", "drift"):
        shown.add_column(column, justify="left" if column == "method" else "right")
    for result in results:
        sent = result["bytes_sent"]
        for name, loss in losses(result).items():
            shown.add_row(
                name,
                f"{loss:.3f}",
                human_bytes(sent),
                ratio(reference, sent),
                share_of_gain(loss, alone=alone, diloco=diloco),
                f"{result['max_drift']:.1%}",
            )
    return shown


def losses(result: Mapping[str, Any]) -> dict[str, float]:
    """The losses worth showing: of the shared model; where there is none, of replica 0 and of the mean as well."""
    name = result["method"]
    if result["consensus"] or not result["rounds"]:
        return {name: result["val_loss"]}
    return {name: result["val_loss"], f"{name}, mean": result["val_loss_average"]}


def ratio(reference: int, sent: int) -> str:
    """«56x fewer», «7x more», or what fits when one of the two is nothing."""
    if not sent:
        return "nothing"
    if sent == reference:
        return "1x"
    return f"{reference / sent:.3g}x fewer" if sent < reference else f"{sent / reference:.3g}x more"


def headline(result: Mapping[str, Any]) -> str:
    return (
        f"{result['parameters']:,} parameters, {result['replicas']} replicas, {result['steps']} steps, "
        f"{result['units_per_replica']:,} {result['unit']} per replica ({result['data']['name']})"
    )


def summary(result: Mapping[str, Any]) -> str:
    """One run in a few lines."""
    return (
        f"{headline(result)}\n"
        f"[bold]{result['method']}[/bold]: loss {result['val_loss']:.4f} "
        f"(anchor {result['val_loss_anchor']:.4f}, mean of replicas {result['val_loss_average']:.4f}), "
        f"{human_bytes(result['bytes_sent'])} sent per replica in {result['rounds']} rounds, "
        f"drift {result['max_drift']:.1%}, {result['simulated_seconds']:.0f} s on the virtual network"
    )
