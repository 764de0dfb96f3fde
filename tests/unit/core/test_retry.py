"""The short form of a retry policy."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.errors import ValidationError
from flowfabric.core.policy import (
    ExecutionPolicy,
    ExponentialBackoff,
    FixedBackoff,
    Retry,
    RetryPolicy,
    parse_policy,
)

U32 = 2**32 - 1
U64 = 2**64 - 1


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
        ({"categories": "timeout"}, "retry.categories: must be a list of names, not a single text"),
    ],
)
def test_retry_refuses_nonsense_at_once(arguments: dict[str, Any], detail: str) -> None:
    with pytest.raises(ValidationError) as error:
        Retry(**arguments)
    assert (error.value.code, error.value.detail) == ("invalid_input", detail)
