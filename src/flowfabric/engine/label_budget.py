"""Limits how many label sets the metrics of a process have.

A label set is one combination of label values of one metric; a histogram counts as one, however
many buckets it has. A process shows at most `LABEL_SETS` of them (10 §9). Labels with few fixed
values always keep them. Other labels, such as lanes, get the value `other` once their metric is
full:

- Counters and histograms keep the label sets that come first. Each metric has a reserved share and
  may take more from a common pool. A full metric stays full: a shown series stays shown and a
  folded one stays folded, so that every series only grows.
- Gauges divide the rest at each scrape, so that none lacks room that another does not need. They
  keep their largest values.
"""

from collections.abc import Mapping
from heapq import nlargest
from typing import Final, Literal

import msgspec

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]

LABEL_SETS: Final = 1000
"""The most label sets that a process shows."""
FIXED: Final = 330
"""Reserved for metrics that only have fixed labels, and for the `other` series."""
COUNTED: Final = 520
"""The most that counters and histograms may show. Gauges have at least the remaining ones."""
OTHER: Final = "other"
"""The value of a label whose own value is not shown."""

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metric(msgspec.Struct, frozen=True):
    """One metric: its name, and what it counts."""

    name: str
    kind: Kind
    help: str
    labels: Labels = ()
    buckets: tuple[float, ...] = SECONDS
    folds: Labels = ()
    """The labels that become `other`. The others have few values, which are always shown."""
    share: int = 16
    """The reserved number of label sets, for a counter or histogram that folds."""
    most: int = LABEL_SETS
    """How many label sets to show before folding, if there is room."""
    peak: bool = False
    """Whether `other` is the largest folded value, as for ages. Otherwise it is their sum."""

    def folded(self, labels: Labels) -> Labels:
        """The label set under which to count one that is not shown."""
        pairs = zip(self.labels, labels, strict=True)
        return tuple(OTHER if label in self.folds else value for label, value in pairs)


class LabelBudget:
    """The label sets that counters and histograms have taken."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        counted = [each for each in metrics.values() if each.folds and each.kind != "gauge"]
        self._used = dict.fromkeys((each.name for each in counted), 0)
        self._pool = COUNTED - sum(each.share for each in counted)

    def admits(self, metric: Metric) -> bool:
        """Take one more label set for a metric that folds; False if it is full, permanently.

        Not thread-safe.
        """
        used = self._used[metric.name]
        if used >= metric.most:
            return False
        if used >= metric.share:
            if not self._pool:
                return False
            self._pool -= 1
        self._used[metric.name] = used + 1
        return True

    def fold_gauges(
        self, gauges: Mapping[Metric, Mapping[Labels, float]]
    ) -> dict[str, Mapping[Labels, float]]:
        """What to show of each gauge that folds. Needs no lock."""
        room = LABEL_SETS - FIXED - sum(self._used.values())
        shown: dict[str, Mapping[Labels, float]] = {}
        # A gauge that needs less than an equal part leaves the rest to those that need more.
        ascending = sorted(gauges.items(), key=lambda each: len(each[1]))
        for left, (metric, values) in zip(range(len(gauges), 0, -1), ascending, strict=True):
            shown[metric.name] = _largest(metric, values, room // left)
            room -= min(len(values), room // left)
        return shown


def _largest(metric: Metric, values: Mapping[Labels, float], most: int) -> Mapping[Labels, float]:
    if len(values) <= most:
        return values
    found = dict(nlargest(most, values.items(), key=lambda each: (each[1], each[0])))
    for labels in values.keys() - found.keys():
        folded, value = metric.folded(labels), values[labels]
        known = found.get(folded, 0)
        found[folded] = max(known, value) if metric.peak else known + value
    return found
