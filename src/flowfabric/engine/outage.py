"""An outage of the server, logged once per process: when it begins and when it ends."""

import logging
import math
import threading
import time

from flowfabric.core.errors import AuthError, EngineError, LeaseLost, TransportError
from flowfabric.core.text import duration

log = logging.getLogger(__name__)

_OUTAGES = frozenset({"transport", "timeout", "busy_loading", "cluster"})
_AFTERMATH_S = 15.0
"""How long calls that began during an outage may fail after its end."""


class Outage:
    """The outage state of a server, shared by the threads of a process."""

    def __init__(self, peer: str = "Valkey") -> None:
        self._peer = peer
        self._gate = threading.Lock()
        self._began_at: float | None = None
        self._ended_at = -math.inf

    @property
    def lasts(self) -> bool:
        """Whether the server was unreachable at the last call."""
        return self._began_at is not None

    @staticmethod
    def causes(error: BaseException) -> bool:
        """Whether a call failed because the server was unreachable."""
        return isinstance(error, TransportError) and error.kind in _OUTAGES

    def noticed(self, error: BaseException, what: str) -> bool:
        """Whether an outage made `what` fail. The first such failure is a warning."""
        if not isinstance(error, TransportError) or not self.causes(error):
            return False
        now = time.monotonic()
        with self._gate:
            begins = self._began_at is None and now - self._ended_at > _AFTERMATH_S
            if begins:
                self._began_at = now
        if begins:
            extra = {"action": "outage_began", "error": str(error)}
            text = "cannot reach %s, trying again: %s"
            log.warning(text, self._peer, error.message, extra=extra)
        log.debug("%s: %s", what, error, extra={"action": "outage", "error": str(error)})
        return True

    def ended(self) -> None:
        """A call reached the server."""
        # Check without the lock first, because this runs after every claim.
        if self._began_at is None:
            return
        now = time.monotonic()
        with self._gate:
            began, self._began_at, self._ended_at = self._began_at, None, now
        if began:
            ms = round((now - began) * 1000)
            extra = {"action": "outage_ended", "duration_ms": ms}
            # At the same level as the line about its beginning.
            text = "%s answers again after %s"
            log.warning(text, self._peer, duration(ms), extra=extra)

    def explains(self, error: BaseException) -> bool:
        """Whether an outage explains the loss of an attempt, so that it needs no separate line."""
        lost = self.causes(error) or self.causes(error.__cause__ or error)
        if isinstance(error, LeaseLost):
            lost = error.code == "lease_expired"
        recent = time.monotonic() - self._ended_at <= _AFTERMATH_S
        return lost and (self._began_at is not None or recent)


def is_permanent(error: EngineError) -> bool:
    """Whether the login is wrong, so that no retry helps."""
    return isinstance(error, AuthError) or (
        isinstance(error, TransportError) and error.kind == "auth"
    )
