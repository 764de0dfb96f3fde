"""Spending from a budget inside a handler."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Generator, Mapping
from hashlib import sha1
from typing import Any, Self

from flowfabric.app.stopping import Interrupted
from flowfabric.core.contracts.budgets import UsageOutcome
from flowfabric.core.errors import EngineError, NotFoundError
from flowfabric.core.ids import new_uuid
from flowfabric.sdk.blocking import SyncTwin, blocking
from flowfabric.sdk.task import ClaimedTask

log = logging.getLogger(__name__)
_WALL_MS = "wall_ms"
_STOP_ERRORS = (asyncio.CancelledError, Interrupted)
"""Raised in a block that is stopped: by its own timeout, or because its attempt must stop."""
_COUNT_STOPPED_S = 1.0
"""How long a stopped block may take to count what it spent; shorter than the worker's wind-up."""


def _ended_early(kind: type[BaseException]) -> bool:
    """Whether a block failed or was stopped, rather than suspended."""
    return issubclass(kind, (Exception, *_STOP_ERRORS))


def _limit_s(kind: type[BaseException]) -> float | None:
    return _COUNT_STOPPED_S if issubclass(kind, _STOP_ERRORS) else None


async def _count_unfinished(
    budget: str, counting: Awaitable[object], within_s: float | None = None
) -> None:
    """Count what a failed or stopped block spent, without hiding what ended it."""
    try:
        async with asyncio.timeout(within_s):
            await counting
    except (EngineError, TimeoutError) as error:
        message = "could not count what an unfinished block spent of budget %s: %s"
        log.warning(message, budget, error or "no answer", extra={"action": "usage_lost"})


class UsageReport:
    """What `ctx.usage` returns: await it, or use it as a block to also count its duration."""

    def __init__(
        self,
        task: ClaimedTask,
        budget: str,
        amounts: Mapping[str, int],
        dedup_key: str | None,
        number: int,
    ) -> None:
        self._task = task
        self._budget = budget
        self._amounts = dict(amounts)
        self._key = dedup_key
        self._number = number
        self._started = 0.0

    def __await__(self) -> Generator[Any, None, UsageOutcome]:
        return self._report(self._default_key(), enforce=True).__await__()

    def _default_key(self) -> str:
        """A key that stays the same if the handler restarts in its attempt and reports again.

        The call number alone is not enough: a restarted handler may skip memoised work, so the
        key includes the amounts.
        """
        amounts = repr(sorted(self._amounts.items())).encode(errors="backslashreplace")
        digest = sha1(amounts, usedforsecurity=False).hexdigest()[:16]
        return f"{self._task.attempt_id}/usage#{self._number}/{digest}"

    async def _report(self, default_key: str, *, enforce: bool) -> UsageOutcome:
        key = default_key if self._key is None else self._key
        return await self._task.report_usage(self._budget, self._amounts, key, enforce=enforce)

    def add(self, **amounts: int) -> None:
        """Count more when the block ends."""
        for name, amount in amounts.items():
            self._amounts[name] = self._amounts.get(name, 0) + amount

    async def __aenter__(self) -> Self:
        self._started = time.monotonic()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Before adding the duration, which differs in every repeat.
        key = self._default_key()
        self.add(**{_WALL_MS: round((time.monotonic() - self._started) * 1000)})
        if kind is None:
            await self._report(key, enforce=True)
        elif _ended_early(kind):
            counting = self._report(key, enforce=False)
            await _count_unfinished(self._budget, counting, _limit_s(kind))
        # Otherwise the handler was suspended; it reports when it restarts.


class BudgetHold:
    """A part of a budget that is held while a block runs. Settle it with what you spent.

    If a block ends without `settle` or `release`, with an exception, or is stopped, the whole
    hold counts as spent: an unknown cost is never 0.
    """

    def __init__(
        self, task: ClaimedTask, budget: str, amounts: Mapping[str, int], reservation_id: str = ""
    ) -> None:
        self._task = task
        self._budget = budget
        self.held = dict(amounts)
        """What is held, by dimension."""
        self.reservation_id = reservation_id or new_uuid()
        self._open = False

    async def __aenter__(self) -> Self:
        await self._task.reserve(self._budget, self.held, self.reservation_id, enforce=True)
        self._open = True
        return self

    async def settle(self, **actual: int) -> UsageOutcome:
        """Count what was spent. A dimension that is not named counts as held."""
        outcome = await self._settled(actual)
        self._open = False
        await self._task.enforce(self._budget, outcome)
        return outcome

    async def _settled(self, actual: Mapping[str, int]) -> UsageOutcome:
        try:
            return await self._task.settle(self._budget, self.reservation_id, actual)
        except NotFoundError as error:
            if error.code != "reservation_not_found":
                raise
        # The hold expired or its lease ended, but the cost was incurred.
        key = f"reservation {self.reservation_id}"
        return await self._task.report_usage(self._budget, {**self.held, **actual}, key)

    async def release(self) -> None:
        """Release the hold: nothing was spent."""
        await self._task.release_reservation(self._budget, self.reservation_id)
        self._open = False

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._open:
            return
        self._open = False
        if kind is None:
            await self.settle()
        elif _ended_early(kind):
            await _count_unfinished(self._budget, self._settled({}), _limit_s(kind))
        # Otherwise the handler was suspended, which releases the hold.


class SyncBudgetHold(SyncTwin[BudgetHold]):
    """`BudgetHold` without `await`, for `def` handlers."""

    settle = blocking(BudgetHold.settle)
    release = blocking(BudgetHold.release)

    @property
    def held(self) -> Mapping[str, int]:
        """What is held, by dimension."""
        return self._target.held

    def __enter__(self) -> Self:
        self._call(lambda hold: hold.__aenter__())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._call(lambda hold: hold.__aexit__(kind))
