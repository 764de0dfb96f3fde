"""The event dispatcher: mirrors what operators do to the audit log (09 §4, 10 §8).

Waiting requests and event streams read the feeds themselves, through readers that this process
shares.
"""

import asyncio
import logging

from flowfabric.core.errors import CorruptionError, EngineError
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.events import Event, Start
from flowfabric.server.entries import entry_of

log = logging.getLogger(__name__)
audit = logging.getLogger("flowfabric.audit")
_FIRST_PAUSE_S = 0.2
_LAST_PAUSE_S = 5.0
_TAKEN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class EventDispatcher:
    """Follows the operator events of all partitions. Every replica may run one."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._running: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it still follows the feeds."""
        return self._running is not None and not self._running.done()

    def start(self) -> None:
        """Follow the feeds from now on."""
        self._running = asyncio.create_task(self._run(), name="ff-dispatcher")

    async def stop(self) -> None:
        """Stop following."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self) -> None:
        cursor: Start = "now"
        pause = _FIRST_PAUSE_S
        while True:
            try:
                subscription = await self._backend.events.subscribe_operator_events(cursor)
                async with subscription:
                    async for event in subscription:
                        pause = _FIRST_PAUSE_S
                        if isinstance(event, CorruptionError):
                            extra = {"action": "event_unreadable"}
                            log.warning("cannot read an entry of the feed: %s", event, extra=extra)
                        else:
                            _mirror(event)
                        cursor = subscription.cursor
            except EngineError as error:
                if error.code == "cursor_expired":
                    # More happened than the feeds keep: the rest is gone, and says so.
                    text = "operator events were trimmed before they were read: %s"
                    log.warning(text, error, extra={"action": "events_trimmed"})
                    cursor = error.details[0] if error.details else "now"
                log.debug("cannot follow the operator events, trying again: %s", error)
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LAST_PAUSE_S)


def _mirror(event: Event) -> None:
    fields = {name: value for name, value in entry_of(event).items() if name not in _TAKEN}
    extra = {**fields, "action": f"operator_{event.type}"}
    audit.info("%s %s", event.type, event.execution_id or event.get("flow_id", ""), extra=extra)
