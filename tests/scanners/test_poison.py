from __future__ import annotations

from flowfabric.scanners.jobs import PoisonList


def test_rests_for_ten_cycles_after_three_failures_in_a_row() -> None:
    poison = PoisonList()
    rested: list[bool] = []
    for _ in range(3):
        poison.begin_cycle()
        assert not poison.skips("x")
        rested.append(poison.failed("x"))
    assert rested == [False, False, True]
    skipped = 0
    poison.begin_cycle()
    while poison.skips("x"):
        skipped += 1
        poison.begin_cycle()
    assert skipped == 10
    assert not poison.failed("x"), "the count starts from zero again"


def test_success_forgets() -> None:
    poison = PoisonList()
    for _ in range(5):
        poison.begin_cycle()
        assert not poison.failed("x")
        assert not poison.failed("x")
        poison.succeeded("x")
    assert len(poison) == 0


def test_items_do_not_share_a_count() -> None:
    poison = PoisonList()
    poison.begin_cycle()
    assert not any(poison.failed(f"item-{number}") for number in range(10))


def test_every_fiftieth_cycle_drops_what_does_not_rest_when_there_are_many() -> None:
    poison = PoisonList()
    poison.begin_cycle()
    for number in range(500):
        poison.failed(f"item-{number}")
    for _ in range(3):
        poison.failed("poison")
    for _ in range(48):
        poison.begin_cycle()
    for _ in range(3):
        poison.failed("late poison")
    assert len(poison) > 500
    poison.begin_cycle()
    assert poison.skips("late poison")
    assert not poison.failed("item-0"), "its first failure was dropped"
    assert not poison.failed("item-0")


def test_few_entries_are_kept() -> None:
    poison = PoisonList()
    poison.begin_cycle()
    poison.failed("x")
    for _ in range(60):
        poison.begin_cycle()
    poison.failed("x")
    assert poison.failed("x")


def test_what_left_its_index_is_forgotten_when_its_rest_is_over() -> None:
    poison = PoisonList()
    poison.begin_cycle()
    for number in range(1000):
        for _ in range(3):
            poison.failed(f"item-{number}")
    for _ in range(10):
        poison.begin_cycle()
    assert len(poison) == 1000
    assert poison.skips("item-0")
    poison.begin_cycle()
    assert len(poison) == 0
    assert not poison.skips("item-0")
