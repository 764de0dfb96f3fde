"""`Retry`: the short way to write a retry policy."""

from __future__ import annotations

import msgspec

from flowfabric.core.durations import Duration, to_ms
from flowfabric.core.errors import invalid_input
from flowfabric.core.policy import Backoff, ExponentialBackoff, FixedBackoff, RetryPolicy

_MAX_RETRIES = 2**32 - 1


class Retry(msgspec.Struct, frozen=True):
    """How often, and after which delay, a task is tried again.

    `backoff` is a fixed delay (``"5s"``), a backoff object, or None for 1 s doubling to 60 s;
    `jitter` belongs to that default, a backoff object carries its own. `categories` limits retries
    to the named failure categories. An attempt that times out counts as failed and is retried.

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
        """The retry policy this stands for."""
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
