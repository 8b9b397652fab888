"""Runs in a few words, for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overtone.common.limits import human_bytes


def headline(facts: Mapping[str, Any]) -> str:
    """One line on what the runs of a group have in common."""
    return (
        f"{facts['parameters']:,} parameters, {facts['replicas']} replicas, {facts['steps']} steps, "
        f"{facts['units'] // facts['replicas']:,} {facts['unit']} per replica ({facts['data']})"
    )


def summary(result: Mapping[str, Any]) -> str:
    """The result of a simulation in a few lines."""
    replicas, units = result["replicas"], result["units_per_replica"]
    facts = {**result, "units": units * replicas, "data": result["data"]["name"]}
    sent, received = result["bytes_sent"], result["bytes_received"]
    apart = "" if received == sent else f" and {human_bytes(received)} received"
    return (
        f"{headline(facts)}\n"
        f"[bold]{result['method']}[/bold]: loss {result['val_loss']:.4f} "
        f"(anchor {result['val_loss_anchor']:.4f}, mean of replicas {result['val_loss_average']:.4f}), "
        f"{human_bytes(sent)} sent{apart} per replica in {result['rounds']} rounds, "
        f"drift {result['max_drift']:.1%}, {result['simulated_seconds']:.0f} s on the virtual network"
    )
