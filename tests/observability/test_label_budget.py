"""The limit of label sets: which are shown, which become `other`, and the total."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flowfabric import observability
from flowfabric.engine.label_budget import COUNTED, FIXED, LABEL_SETS
from flowfabric.engine.metrics import METRICS, Meter
from flowfabric.scanners.settings import INTERVALS_S
from tests.support.metrics import label_sets, samples

VALUES = {
    "scanner": len(INTERVALS_S),
    "outcome": 5,
    "reason": 6,
    "effect": 8,
    "mode": 3,
    "op": 2,
    "policy": 3,
    "path": 3,
    "state": 2,
    "disposition": 3,
    "action": 3,
    "kind": 2,
    "result": 2,
    "status": 25,
}
"""How many values a label has at most that is not folded."""


def shown() -> int:
    """How many label sets a scrape shows."""
    page = label_sets(observability.render())
    return sum(len(sets) for name, sets in page.items() if name in METRICS)


def flood(meter: Meter, name: str, number: int) -> None:
    """One more value of each label of a metric, as far as the label has that many."""
    metric = METRICS[name]
    labels = tuple(
        f"v{number}" if label in metric.folds else f"v{number % VALUES[label]}"
        for label in metric.labels
    )
    if metric.kind == "histogram":
        meter.observe(name, 0.1, *labels)
    elif metric.kind == "counter":
        meter.count(name, *labels)
    elif metric.folds:
        meter.replace(name, {**meter.numbers[name], labels: 1})
    else:
        meter.set(name, 1, *labels)


def test_the_shares_leave_a_pool_for_those_that_need_more() -> None:
    shares = [each.share for each in METRICS.values() if each.folds and each.kind != "gauge"]
    assert COUNTED - 200 < sum(shares) < COUNTED - 100


def test_the_fixed_part_has_room_for_every_fixed_label_and_for_what_is_folded() -> None:
    needed = 0
    for metric in METRICS.values():
        sets = 1
        for label in metric.labels:
            sets *= 1 if label in metric.folds else VALUES[label]
        needed += sets
    assert needed <= FIXED


def test_no_flood_of_names_exceeds_the_budget(meter: Meter) -> None:
    for number in range(2000):
        for name in METRICS:
            flood(meter, name, number)
    assert LABEL_SETS - 100 < shown() <= LABEL_SETS


def test_a_flooded_metric_leaves_the_others_their_shares(meter: Meter) -> None:
    for number in range(5000):
        meter.count("ff_attempt_outcome_total", f"lane-{number}", "ok")
    for number in range(16):
        meter.observe("ff_claim_wait_seconds", 1, f"lane-{number}")
        meter.count("ff_http_requests_total", "GET", f"/{number}", "200")
    assert ("lane-15",) in meter.histograms["ff_claim_wait_seconds"]
    assert ("GET", "/15", "200") in meter.numbers["ff_http_requests_total"]


def test_forty_lanes_are_exact(meter: Meter) -> None:
    lanes = [f"lane-{number}" for number in range(40)]
    for lane in lanes:
        meter.observe("ff_claim_from_grant_duration_seconds", 0.1, lane)
        meter.observe("ff_claim_wait_seconds", 0.1, lane)
        for outcome in ("granted", "no_work"):
            meter.count("ff_claim_outcome_total", lane, outcome)
        meter.count("ff_attempt_outcome_total", lane, "ok")
    for state in ("eligible", "reclaimable"):
        meter.replace(f"ff_{state}_depth", {(lane,): 1 for lane in lanes})
    meter.replace("ff_oldest_eligible_age_seconds", {(lane,): 1 for lane in lanes})
    found = {labels for _, labels in samples(observability.render())}
    assert not any("other" in labels for labels in found)


def test_fixed_labels_are_never_folded(meter: Meter) -> None:
    for number in range(5000):
        for outcome in ("ok", "retry"):
            meter.count("ff_attempt_outcome_total", f"lane-{number}", outcome)
    counts = meter.numbers["ff_attempt_outcome_total"]
    assert {outcome for lane, outcome in counts if lane == "other"} == {"ok", "retry"}
    assert sum(counts.values()) == 10_000
    meter.count("ff_attempt_outcome_total", "late", "timeout")
    assert counts["other", "timeout"] == 1


def test_folded_counters_only_grow(meter: Meter) -> None:
    name = "ff_attempt_outcome_total"
    lanes = [f"lane-{number}" for number in range(1000)]
    meter.replace("ff_eligible_depth", {(lane,): 1 for lane in lanes})
    before: dict[tuple[str, ...], float] = {}
    for number in range(3):
        for lane in lanes:
            meter.count(name, lane, "ok")
        # Gauges that disappear make no room for counters, or a folded lane would get a series.
        meter.replace("ff_eligible_depth", {})
        series = meter.numbers[name]
        assert number == 0 or series.keys() == before.keys()
        assert all(series[labels] >= value for labels, value in before.items())
        before = dict(series)
    assert before["lane-0", "ok"] == 3
    assert before["other", "ok"] == 3 * (1001 - len(before))


def test_dimensions_beyond_the_first_32(meter: Meter) -> None:
    for number in range(40):
        meter.count("ff_budget_hit_total", f"d{number}")
    found = meter.numbers["ff_budget_hit_total"]
    assert len(found) == 33
    assert found["other",] == 8
    meter.count("ff_budget_hit_total", "d0")
    assert found["d0",] == 2


@pytest.mark.parametrize(
    ("name", "together"), [("ff_eligible_depth", sum), ("ff_oldest_eligible_age_seconds", max)]
)
def test_gauges_name_their_largest_values(
    meter: Meter, name: str, together: Callable[[list[int]], int]
) -> None:
    meter.replace(name, {(f"lane-{number}",): number for number in range(10_000)})
    found = {labels[0]: value for labels, value in meter.shown()[name].items()}
    assert found["lane-9999"] == 9999
    rest = [number for number in range(10_000) if f"lane-{number}" not in found]
    assert rest == list(range(len(rest)))
    assert found["other"] == together(rest)


def test_gauges_share_their_room(meter: Meter) -> None:
    """A gauge that needs less leaves the rest of its part to others."""
    flooded = {(f"lane-{number}",): 1.0 for number in range(5000)}
    meter.replace("ff_eligible_depth", flooded)
    alone = len(meter.shown()["ff_eligible_depth"])
    meter.replace("ff_reclaimable_depth", flooded)
    meter.replace("ff_workers_alive", {("default",): 3})
    values = meter.shown()
    assert values["ff_workers_alive"] == {("default",): 3}
    both = len(values["ff_eligible_depth"]), len(values["ff_reclaimable_depth"])
    assert abs(both[0] - both[1]) <= 1
    assert alone - 3 <= sum(both) <= alone + 1
