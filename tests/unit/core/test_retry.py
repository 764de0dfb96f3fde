"""Backoff and the short form of a retry policy."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core.errors import ValidationError
from flowfabric.core.policy import (
    ExecutionPolicy,
    ExponentialBackoff,
    FixedBackoff,
    RetryPolicy,
    backoff_ms,
    backoff_range,
    parse_policy,
)
from flowfabric.core.retry import Retry

U32 = 2**32 - 1
U64 = 2**64 - 1


def test_default_backoff_vector() -> None:
    delays = [backoff_ms(RetryPolicy(), n) for n in range(8)]
    assert delays == [1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000]


@pytest.mark.parametrize(
    ("backoff", "n", "expected"),
    [
        (FixedBackoff(250), 0, 250),
        (FixedBackoff(250), 9, 250),
        (FixedBackoff(U64), 0, 2**53 - 1),
        (ExponentialBackoff(100, 10_000, 1.5), 3, 337),
        (ExponentialBackoff(100, 10_000, 0.5), 3, 12),
        (ExponentialBackoff(1000, 500, 2.0), 0, 500),
        (ExponentialBackoff(1, U64, 2.0), 100, 2**53 - 1),
        (ExponentialBackoff(1, 60_000, 10.0), 5000, 60_000),
        (ExponentialBackoff(0, 60_000, 10.0), 5000, 0),
        (ExponentialBackoff(1000, 60_000, 0.5), 100_000, 0),
    ],
)
def test_backoff_values(backoff: FixedBackoff | ExponentialBackoff, n: int, expected: int) -> None:
    assert backoff_ms(RetryPolicy(backoff=backoff), n) == expected


@given(
    initial=st.integers(0, U64),
    limit=st.integers(0, U64),
    multiplier=st.floats(0, exclude_min=True, allow_infinity=False, allow_nan=False),
    n=st.integers(0, U32),
    jitter=st.booleans(),
)
def test_backoff_is_total_and_bounded(
    initial: int, limit: int, multiplier: float, n: int, *, jitter: bool
) -> None:
    policy = RetryPolicy(backoff=ExponentialBackoff(initial, limit, multiplier, jitter))
    low, high = backoff_range(policy, n)
    assert high == backoff_ms(policy, n)
    assert 0 <= high <= min(limit, 2**53 - 1)
    assert low == ((high + 1) // 2 if jitter else high)


def test_retry_is_the_short_form() -> None:
    assert Retry().policy() == RetryPolicy(3, ExponentialBackoff(jitter=True), (), True)
    assert Retry(5, backoff="2s", categories=("timeout",)).policy() == RetryPolicy(
        5, FixedBackoff(2000), ("timeout",), True
    )
    assert Retry(1, backoff=0.5).policy().backoff == FixedBackoff(500)
    assert Retry(jitter=False).policy().backoff == ExponentialBackoff()
    own = ExponentialBackoff(10, 20, 3.0)
    assert Retry(backoff=own).policy().backoff is own
    assert parse_policy(ExecutionPolicy(retry_policy=Retry(0).policy())) is not None


@pytest.mark.parametrize(
    ("arguments", "detail"),
    [
        ({"n": -1}, "retry.n: must be from 0 to 4294967295, got -1"),
        ({"n": True}, "retry.n: must be from 0 to 4294967295, got True"),
        ({"n": 2**32}, "retry.n: must be from 0 to 4294967295, got 4294967296"),
        ({"backoff": -1}, "retry.backoff: must not be negative"),
        ({"categories": "timeout"}, "retry.categories: must be a sequence of names, not one text"),
    ],
)
def test_retry_refuses_nonsense_at_once(arguments: dict[str, Any], detail: str) -> None:
    with pytest.raises(ValidationError) as error:
        Retry(**arguments)
    assert (error.value.code, error.value.detail) == ("invalid_input", detail)
