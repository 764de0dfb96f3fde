"""The private loop of the blocking twins: calls and closing from many threads."""

from __future__ import annotations

import asyncio
import atexit
import gc
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any

import pytest

from flowfabric.core.errors import TransportError
from flowfabric.sdk.client import Client
from flowfabric.sdk.loop_thread import Portal, PortalClosed
from flowfabric.sdk.sync import SyncClient


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


class Caller(threading.Thread):
    """Makes one call in a thread of its own, and keeps what was raised."""

    def __init__(self, portal: Portal, make: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        super().__init__(daemon=True)
        self._portal = portal
        self._make = make
        self.raised: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._portal.call(self._make)
        except BaseException as error:  # noqa: BLE001 - whatever it is
            self.raised = error

    def ended_by(self) -> type[BaseException] | None:
        """What ended the call; it must end."""
        self.join(10)
        assert not self.is_alive(), "the call hangs"
        return None if self.raised is None else type(self.raised)


def test_a_client_that_cannot_connect_leaves_nothing() -> None:
    async def refused() -> Client:
        raise TransportError("auth", "WRONGPASS")

    gc.collect()
    before = descriptors()
    for _ in range(3):
        with pytest.raises(TransportError, match="WRONGPASS"):
            SyncClient(refused)
    assert threads("ff-sync-client") == []
    assert descriptors() <= before


def test_the_end_of_the_process_knows_all_portals_by_one_entry() -> None:
    entries = atexit._ncallbacks()
    for _ in range(10):
        Portal().close()
    assert atexit._ncallbacks() == entries


def test_a_call_that_races_with_close_ends() -> None:
    """It has found the portal open when another thread closes it."""
    portal = Portal()
    winding_up, posted = threading.Event(), threading.Event()

    async def slow_to_stop() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            winding_up.set()
            await asyncio.to_thread(posted.wait, 5)
            raise

    async def begin() -> None:
        slow.append(asyncio.create_task(slow_to_stop()))

    async def endless() -> None:
        posted.set()
        await asyncio.Event().wait()

    def late() -> Coroutine[Any, Any, None]:
        # Time enough for a close that does not wait for us.
        entered.set()
        winding_up.wait(1)
        return endless()

    slow: list[asyncio.Task[None]] = []
    entered = threading.Event()
    portal.call(begin)
    caller = Caller(portal, late)
    assert entered.wait(10)
    portal.close()
    assert caller.ended_by() in (CancelledError, PortalClosed)


async def endless() -> None:
    await asyncio.Event().wait()


def waiting(portal: Portal) -> Caller:
    """A call under way that does not end by itself."""
    begun = threading.Event()

    async def wait() -> None:
        begun.set()
        await endless()

    caller = Caller(portal, wait)
    assert begun.wait(10)
    return caller


def test_a_last_step_that_fails_is_raised_when_all_is_ended() -> None:
    portal = Portal("ff-failing")
    caller = waiting(portal)

    async def broken() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        portal.close(broken)
    assert caller.ended_by() is CancelledError
    assert threads("ff-failing") == []
    with pytest.raises(PortalClosed):
        portal.call(endless)


def test_a_last_step_without_end_does_not_keep_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowfabric.sdk.loop_thread._CLEANUP_S", 0.01)
    portal = Portal("ff-endless")
    caller = waiting(portal)
    portal.close(endless)
    assert caller.ended_by() is CancelledError
    assert threads("ff-endless") == []
