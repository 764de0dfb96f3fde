"""The event dispatcher: mirrors what operators do to the audit log (09 §4, 10 §8).

Waiting requests and event streams read the feeds themselves, through readers that this process
shares.
"""

import asyncio
import logging

from flowfabric.core.backoff import Backoff
from flowfabric.core.errors import CorruptionError, EngineError
from flowfabric.engine import metrics
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.events import Event, Start
from flowfabric.scanners.settings import ScannerSettings
from flowfabric.server.entries import entry_of

log = logging.getLogger(__name__)
audit = logging.getLogger("flowfabric.audit")
_PAUSES_S = (0.2, 5.0)
_TAKEN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class EventDispatcher:
    """Follows the operator events of all partitions. Every replica may run one."""

    def __init__(self, backend: Backend, settings: ScannerSettings) -> None:
        self._backend = backend
        self._where = settings.filter
        self._restart_pause_s = settings.restart_backoff_s
        self._cursor: Start = "now"
        self._running: asyncio.Task[None] | None = None
        self._lost = False
        """Whether the feeds could not be read the last time."""

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
        """Follow; after a failure, resume after the last event."""
        backoff, crashes = Backoff(*_PAUSES_S), 0
        while True:
            before = self._cursor
            try:
                await self._follow()
            except EngineError as error:
                if error.code == "cursor_expired":
                    # The feeds keep fewer events than happened: log that some are lost.
                    text = "operator events were trimmed before they were read: %s"
                    log.warning(text, error, extra={"action": "events_trimmed"})
                    self._cursor = error.details[0] if error.details else "now"
                log.debug("cannot follow the operator events, trying again: %s", error)
                self._lost = True
                if self._cursor != before:
                    backoff.reset()
                await asyncio.sleep(backoff.jittered_s())
            except Exception:
                crashes += 1
                text = "event dispatcher: crashed, restarting in %g s"
                extra = {"action": "dispatcher_crashed", "restart_count": crashes}
                log.exception(text, self._restart_pause_s, extra=extra)
                await asyncio.sleep(self._restart_pause_s)

    async def _follow(self) -> None:
        subscription = await self._backend.events.subscribe_operator_events(self._cursor)
        if self._lost:
            self._lost = False
            log.info("the server follows operator events again", extra={"action": "feed_resumed"})
        async with subscription:
            try:
                async for event in subscription:
                    if isinstance(event, CorruptionError):
                        extra = {"action": "event_unreadable"}
                        log.warning("cannot read an entry of the feed: %s", event, extra=extra)
                    elif await self._is_ours(event):
                        _mirror(event)
                    await self._measure(event)
            finally:
                # Even without any event, the subscription has a position.
                self._cursor = subscription.cursor

    async def _measure(self, event: Event | CorruptionError) -> None:
        if (meter := metrics.active()) is not None:
            meter.count("ff_event_dispatch_total", "ok" if isinstance(event, Event) else "corrupt")
            if isinstance(event, Event):
                age_ms = await self._backend.meta.server_time_ms() - event.at
                meter.set("ff_event_dispatch_lag_seconds", max(0, age_ms) / 1000)

    async def _is_ours(self, event: Event) -> bool:
        """Whether the filter of this process accepts an event (09 §2.3)."""
        if event.execution_id is not None:
            return bool(await self._where.accepted(self._backend, [event.execution_id]))
        # Flows belong to a namespace; budgets and quotas do not.
        return event.namespace is None or self._where.namespace in (None, event.namespace)


def _mirror(event: Event) -> None:
    fields = {name: value for name, value in entry_of(event).items() if name not in _TAKEN}
    extra = {**fields, "action": f"operator_{event.type}"}
    audit.info("%s %s", event.type, event.execution_id or event.get("flow_id", ""), extra=extra)
