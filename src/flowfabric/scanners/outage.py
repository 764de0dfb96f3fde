"""An outage concerns all scanners of a process and is logged once."""

from __future__ import annotations

import asyncio
import logging

from flowfabric.core.errors import EngineError, TransportError

log = logging.getLogger(__name__)

_KINDS = frozenset({"transport", "timeout", "busy_loading", "cluster"})


class Outage:
    """Counts cycles that failed because the server was out of reach."""

    def __init__(self) -> None:
        self.failed_cycles = 0
        self._ended_at: float | None = None

    @staticmethod
    def causes(error: EngineError) -> bool:
        return isinstance(error, TransportError) and error.kind in _KINDS

    def noticed(self, error: EngineError, started: float) -> None:
        """A cycle that began at `started`, on the loop's clock, did not reach the server."""
        if not self.failed_cycles and self._ended_at is not None and started < self._ended_at:
            # This cycle began before the last outage ended.
            return
        self.failed_cycles += 1
        if self.failed_cycles == 1:
            log.warning(
                "scanners cannot reach the server: %s",
                error,
                extra={"action": "scanners_cut_off", "error": str(error)},
            )

    def ended(self) -> None:
        if not self.failed_cycles:
            return
        failed, self.failed_cycles = self.failed_cycles, 0
        self._ended_at = asyncio.get_running_loop().time()
        log.info(
            "scanners reach the server again after %d failed cycles",
            failed,
            extra={"action": "scanners_reconnected", "failed_cycles": failed},
        )
