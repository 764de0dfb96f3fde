"""Reading a page of metrics as Prometheus does."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[str, ...]


def samples(text: bytes) -> dict[tuple[str, Labels], float]:
    """Every sample of ours, by name and label values."""
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name.startswith("ff_")
    }


def label_sets(text: bytes) -> dict[str, set[Labels]]:
    """The label sets of every metric of the page, ours and others; buckets do not count apart."""
    found: dict[str, set[Labels]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            name = re.sub("_(bucket|count|sum)$", "", sample.name)
            labels = (value for label, value in sample.labels.items() if label != "le")
            found.setdefault(name, set()).add(tuple(labels))
    return found
