"""Percentiles, and the run that stands for several."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flowfabric.bench.options import Figures


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least so many percent of all do not exceed.

    >>> percentile([4.0, 1.0, 3.0, 2.0], 50)
    2.0
    """
    rank = max(1, math.ceil(len(values) * percent / 100))
    return sorted(values)[rank - 1]


def median_run(runs: Sequence[Figures], key: str) -> Figures:
    """The run whose figure is the median one: its other figures belong to it.

    >>> median_run([{"a": 3.0}, {"a": 1.0}, {"a": 2.0}], "a")
    {'a': 2.0}
    """
    return sorted(runs, key=lambda run: run[key])[(len(runs) - 1) // 2]
