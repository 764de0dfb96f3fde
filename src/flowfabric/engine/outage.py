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
    """What the threads of a process know of the server's absence."""

    def __init__(self, peer: str = "Valkey") -> None:
        self._peer = peer
        self._gate = threading.Lock()
        self._began_at: float | None = None
        self._ended_at = -math.inf

    @property
    def lasts(self) -> bool:
        """Whether the server was away when last heard of."""
        return self._began_at is not None

    @staticmethod
    def causes(error: BaseException) -> bool:
        """Whether a call failed because the server was away."""
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
        # Without the lock at first: this is asked after every claim.
        if self._began_at is None:
            return
        now = time.monotonic()
        with self._gate:
            began, self._began_at, self._ended_at = self._began_at, None, now
        if began:
            ms = round((now - began) * 1000)
            extra = {"action": "outage_ended", "duration_ms": ms}
            # As visible as its begin.
            text = "%s answers again after %s"
            log.warning(text, self._peer, duration(ms), extra=extra)

    def explains(self, error: BaseException) -> bool:
        """Whether an attempt was lost to an outage, so that no line of its own is needed."""
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
