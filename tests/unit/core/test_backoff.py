"""Pauses between tries."""

from __future__ import annotations

from flowfabric.core.backoff import Backoff, jittered


def test_pauses_double_up_to_the_limit_and_start_again_after_a_success() -> None:
    backoff = Backoff(0.1, 0.3)
    assert [backoff.next_s() for _ in range(4)] == [0.1, 0.2, 0.3, 0.3]
    backoff.reset()
    assert backoff.next_s() == 0.1


def test_jitter_only_shortens_and_by_at_most_half() -> None:
    drawn = [jittered(2.0) for _ in range(1000)]
    assert 1.0 <= min(drawn) < 1.2
    assert 1.8 < max(drawn) <= 2.0
    backoff = Backoff(2.0, 8.0)
    assert 1.0 <= backoff.jittered_s() <= 2.0
    assert backoff.next_s() == 4.0
