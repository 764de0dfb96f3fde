"""The server's time, estimated between two answers: good enough to decide when to ask again."""

from __future__ import annotations

import asyncio
import math


class ServerClock:
    """Carries the last server time forward on the loop's clock. It lags by at most one trip."""

    def __init__(self) -> None:
        self._offset_ms = 0.0
        self._seen_at: float | None = None

    def observe(self, server_ms: int) -> None:
        self._seen_at = asyncio.get_running_loop().time()
        self._offset_ms = server_ms - self._seen_at * 1000

    @property
    def age_s(self) -> float:
        """Seconds since the last observation; infinite before the first."""
        if self._seen_at is None:
            return math.inf
        return asyncio.get_running_loop().time() - self._seen_at

    def now_ms(self) -> float:
        return asyncio.get_running_loop().time() * 1000 + self._offset_ms

    def loop_time(self, server_ms: float) -> float:
        """When, on the loop's clock, the server's time will be `server_ms`."""
        return (server_ms - self._offset_ms) / 1000
