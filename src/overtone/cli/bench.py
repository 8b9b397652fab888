"""`overtone bench codec` and `overtone bench train`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from overtone.bench.options import CodecBench, TrainBench
from overtone.cli.console import check_writable, err, write_json
from overtone.errors import ConfigError
from overtone.runs import launch
from overtone.world.join import check_environment


def run_bench_codec(flags: CodecBench) -> None:
    """Measure the codec, and print the report."""
    codec = _import("overtone.bench.codec", "bench codec", "bench")
    if flags.json is not None:
        check_writable(flags.json)
    torch.set_num_threads(flags.threads)
    report = codec.run(flags, lambda what: err.print(f"measuring: {what}", highlight=False))
    _show(report, codec.markdown(report), flags.json)


def run_bench_train(flags: TrainBench) -> None:
    """Measure the loop in several processes; that of rank 0 prints the report."""
    bench = _import("overtone.bench.train", "bench train", "train")
    if flags.json is not None:
        check_writable(flags.json)
    torch.set_num_threads(flags.threads)
    check_environment()
    if flags.replicas > 1 and not launch.is_replica():
        launch.refuse_too_many(flags.replicas)
        launch.spawn(sys.argv[1:], replicas=flags.replicas, threads=flags.threads)
        return
    report = launch.in_world(lambda: bench.run(flags))
    if report["rank"] == 0:
        _show(report, bench.markdown(report), flags.json)


def _import(module: str, command: str, extra: str) -> Any:
    """The module with the measurement. It may need a package that is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"{command}: needs {error.name}; pip install 'overtone[{extra}]'") from error


def _show(report: dict[str, Any], text: str, json: Path | None) -> None:
    if json is not None:
        write_json(json, report)
    print(text)
