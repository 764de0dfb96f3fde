"""`Retry`: a retry policy in one line."""

from __future__ import annotations

import msgspec

from flowfabric.core.durations import Duration, to_ms
from flowfabric.core.errors import invalid_input
from flowfabric.core.policy import Backoff, ExponentialBackoff, FixedBackoff, RetryPolicy

_MAX_RETRIES = 2**32 - 1


class Retry(msgspec.Struct, frozen=True):
    """How often a failed task is retried, and after which delay.

    `backoff` is a fixed delay (`"5s"`), a backoff object, or None for 1 s doubling up to 60 s, with
    `jitter`. `categories` limits retries to these failure categories. An attempt that times out is
    retried as well.

    >>> Retry(5, backoff="2s").policy().max_retries
    5
    """

    n: int = 3
    backoff: Backoff | Duration | None = None
    categories: tuple[str, ...] = ()
    jitter: bool = True

    def __post_init__(self) -> None:
        if type(self.n) is not int or not 0 <= self.n <= _MAX_RETRIES:
            raise invalid_input("retry.n", f"must be from 0 to {_MAX_RETRIES}, got {self.n!r}")
        if isinstance(self.categories, str):
            raise invalid_input("retry.categories", "must be a sequence of names, not one text")
        self._backoff()

    def policy(self) -> RetryPolicy:
        """The retry policy."""
        return RetryPolicy(
            max_retries=self.n,
            backoff=self._backoff(),
            retryable_categories=tuple(self.categories),
            retry_on_timeout=True,
        )

    def _backoff(self) -> Backoff:
        if self.backoff is None:
            return ExponentialBackoff(jitter=self.jitter)
        if isinstance(self.backoff, (FixedBackoff, ExponentialBackoff)):
            return self.backoff
        return FixedBackoff(to_ms(self.backoff, "retry.backoff"))
