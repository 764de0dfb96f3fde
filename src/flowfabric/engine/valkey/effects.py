"""Counts the side effects that a reply reports in the metrics of this process."""

from collections.abc import Iterable
from urllib.parse import unquote

from flowfabric.engine.metrics import Meter


def count_effects(meter: Meter, effects: Iterable[str]) -> None:
    """Count each effect: a letter, and what it is about. Unknown ones are of a later version.

    >>> count_effects(Meter(), ["Fcompleted", "Stimed_out:1500"])
    """
    for effect in effects:
        # A reason may contain a colon.
        kind, (first, _, last) = effect[0], effect[1:].rpartition(":")
        if kind == "F":
            meter.count("ff_flow_terminal_total", last)
        elif kind == "H":
            meter.observe("ff_dag_hop_seconds", int(last) / 1000)
        elif kind == "S":
            meter.observe("ff_suspension_seconds", int(last) / 1000, first)
        elif kind == "C":
            meter.count("ff_sibling_cancel_dispatched_total", first)
            meter.count("ff_sibling_cancel_disposition_total", last)
        elif kind == "A":
            meter.count("ff_attempt_outcome_total", unquote(first), last)
