"""Riding out an outage: a call is sent again until it is answered, refused for good, or too late.

An outage that passes by itself (a restart, a server that loads its data, a failover, a slot on
the move) is ridden out for `PATIENCE` request timeouts: 10 s by default. A refused call never
ran, so any call is repeated after a refusal. After a lost reply only reads and replay-safe calls
are. A call with a `timeout` of its own ends with it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from flowfabric.core.errors import TransportError
from flowfabric.valkey.connection import Arg
from flowfabric.valkey.reads import is_read

FIRST_BACKOFF: Final = 0.020
LAST_BACKOFF: Final = 1.0
PATIENCE: Final = 2
"""For how many request timeouts a call is sent again; twice 5 s is as long as connecting takes."""
_LAST_PAUSE: Final = 0.5

T = TypeVar("T")


def jittered(delay: float) -> float:
    """Half to all of a delay, so that many clients do not come back together."""
    return delay * random.uniform(0.5, 1.0)  # noqa: S311 - not a secret


class PatientCall:
    """One call that met an outage. `begun` is on the loop's clock."""

    __slots__ = ("_leaving", "_safe", "_timeout", "args", "give_up", "reads")

    def __init__(
        self,
        args: tuple[Arg, ...],
        begun: float,
        timeout: float | None,
        request_timeout: float,
        *,
        replay_safe: bool = False,
        leaving: Callable[[], bool],
    ) -> None:
        self.args = args
        self.reads = is_read(args)
        self.give_up = begun + (PATIENCE * request_timeout if timeout is None else timeout)
        """When the call is sent for the last time."""
        self._timeout = request_timeout if timeout is None else None
        self._safe = replay_safe or self.reads
        self._leaving = leaving

    @property
    def deadline(self) -> float:
        """When a reply must be here to what is sent now."""
        if self._timeout is None:
            return self.give_up
        return asyncio.get_running_loop().time() + self._timeout

    async def run(
        self,
        attempt: Callable[[TransportError | None], Awaitable[T]],
        failed: TransportError | None = None,
    ) -> T:
        """What `attempt` returns; it is told how the one before `failed`."""
        loop = asyncio.get_running_loop()
        backoff = FIRST_BACKOFF
        while True:
            if failed is not None:
                pause = jittered(backoff)
                late = loop.time() + pause >= self.give_up
                if late or self._leaving() or not self._worth_repeating(failed):
                    if self.reads:
                        failed.ambiguous = False
                    raise failed
                await asyncio.sleep(pause)
                backoff = min(backoff * 2, _LAST_PAUSE)
            try:
                return await attempt(failed)
            except TransportError as error:
                # A later clean failure does not undo that an earlier send may have run.
                error.ambiguous = error.ambiguous or (failed is not None and failed.ambiguous)
                failed = error

    def _worth_repeating(self, failed: TransportError) -> bool:
        return failed.passing and (self._safe or not failed.ambiguous)
