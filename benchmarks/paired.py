"""Differences between runs that are paired by their seed, with an interval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean, stdev

STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # t for a 95 % interval, by the number of pairs


def difference(losses: Mapping[int, float], others: Mapping[int, float]) -> tuple[float, float]:
    """The mean of the relative differences in per cent over the seeds that both have, and half of its 95 % interval.

    The interval is NaN if there is only one seed.
    """
    found = [100 * (losses[seed] / others[seed] - 1) for seed in sorted(losses.keys() & others.keys())]
    if not found:
        return math.nan, math.nan
    half = STUDENT[len(found)] * stdev(found) / math.sqrt(len(found)) if len(found) in STUDENT else math.nan
    return fmean(found), half


def shown(losses: Mapping[int, float], others: Mapping[int, float]) -> str:
    """The difference as a text, with its interval if there is one."""
    mean, half = difference(losses, others)
    return f"{mean:+.2f} %" if math.isnan(half) else f"{mean:+.2f} ± {half:.2f} %"
