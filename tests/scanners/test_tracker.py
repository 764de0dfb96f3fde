from __future__ import annotations

from flowfabric.scanners.tracker import FailureTracker


def test_rests_for_ten_cycles_after_three_failures_in_a_row() -> None:
    tracker = FailureTracker()
    rested: list[bool] = []
    for _ in range(3):
        tracker.begin_cycle()
        assert not tracker.skips("x")
        rested.append(tracker.failed("x"))
    assert rested == [False, False, True]
    skipped = 0
    tracker.begin_cycle()
    while tracker.skips("x"):
        skipped += 1
        tracker.begin_cycle()
    assert skipped == 10
    assert not tracker.failed("x"), "the count starts from zero again"


def test_success_forgets() -> None:
    tracker = FailureTracker()
    for _ in range(5):
        tracker.begin_cycle()
        assert not tracker.failed("x")
        assert not tracker.failed("x")
        tracker.succeeded("x")
    assert len(tracker) == 0


def test_items_do_not_share_a_count() -> None:
    tracker = FailureTracker()
    tracker.begin_cycle()
    assert not any(tracker.failed(f"item-{number}") for number in range(10))


def test_every_fiftieth_cycle_drops_what_does_not_rest_when_there_are_many() -> None:
    tracker = FailureTracker()
    tracker.begin_cycle()
    for number in range(500):
        tracker.failed(f"item-{number}")
    for _ in range(3):
        tracker.failed("poison")
    for _ in range(48):
        tracker.begin_cycle()
    for _ in range(3):
        tracker.failed("late poison")
    assert len(tracker) > 500
    tracker.begin_cycle()
    assert tracker.skips("late poison")
    assert not tracker.failed("item-0"), "its first failure was dropped"
    assert not tracker.failed("item-0")


def test_few_entries_are_kept() -> None:
    tracker = FailureTracker()
    tracker.begin_cycle()
    tracker.failed("x")
    for _ in range(60):
        tracker.begin_cycle()
    tracker.failed("x")
    assert tracker.failed("x")


def test_what_left_its_index_is_forgotten_when_its_rest_is_over() -> None:
    tracker = FailureTracker()
    tracker.begin_cycle()
    for number in range(1000):
        for _ in range(3):
            tracker.failed(f"item-{number}")
    for _ in range(10):
        tracker.begin_cycle()
    assert len(tracker) == 1000
    assert tracker.skips("item-0")
    tracker.begin_cycle()
    assert len(tracker) == 0
    assert not tracker.skips("item-0")
