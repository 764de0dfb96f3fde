"""The leading process's report about its scanners, for people on other machines."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from flowfabric.core.errors import EngineError
from flowfabric.engine.api.backend import Backend
from flowfabric.scanners.base import wait_until
from flowfabric.scanners.leader import LeaderElection

log = logging.getLogger(__name__)

_EVERY_S = 5.0
_NOT_LEADING_S = 0.5
_KEPT_MS = 60_000


class ScannerLine(msgspec.Struct, frozen=True, kw_only=True):
    """How one scanner of the leading process is doing."""

    name: str
    interval_ms: int
    last_cycle_at: int | None
    """When the store last answered it, by the clock of its host; None before the first answer."""
    processed: int
    errors: int
    restarts: int
    stuck: bool


class ScannerBoard(msgspec.Struct, frozen=True, kw_only=True):
    """The leading process's scanners as of a few seconds ago."""

    process: str
    """`<host>:<pid>`"""
    at: int
    scanners: list[ScannerLine]


class _Status(Protocol):
    """The part of `ScannerStatus` that the board shows."""

    interval_s: float
    processed: int
    errors: int
    restarts: int
    last_progress_at: float | None
    stuck: bool


def _lines(statuses: Mapping[str, _Status], now_ms: int) -> list[ScannerLine]:
    clock = asyncio.get_running_loop().time()
    return [
        ScannerLine(
            name=name,
            interval_ms=round(status.interval_s * 1000),
            last_cycle_at=None
            if status.last_progress_at is None
            else now_ms - round((clock - status.last_progress_at) * 1000),
            processed=status.processed,
            errors=status.errors,
            restarts=status.restarts,
            stuck=status.stuck,
        )
        for name, status in statuses.items()
    ]


async def keep_board(
    backend: Backend,
    leadership: LeaderElection,
    statuses: Callable[[], Mapping[str, _Status]],
    stop: asyncio.Event,
) -> None:
    """While this process leads, store the state of its scanners every few seconds."""
    process = leadership.identity.rpartition(":")[0]
    while not stop.is_set():
        pause_s = _NOT_LEADING_S
        # Leaders with another duty run only some of the scanners, or look only at some work.
        if leadership.is_leader and not leadership.duty:
            pause_s = _EVERY_S
            now_ms = round(time.time() * 1000)
            board = ScannerBoard(process=process, at=now_ms, scanners=_lines(statuses(), now_ms))
            try:
                await backend.leadership.put_report(msgspec.json.encode(board), _KEPT_MS)
            except EngineError as error:
                log.debug("cannot write the report of the scanners: %s", error)
        await wait_until(stop, pause_s)


async def read_board(backend: Backend) -> ScannerBoard | None:
    """The last report of the leading process; None if none has led for a minute."""
    stored = await backend.leadership.get_report()
    try:
        return None if stored is None else msgspec.json.decode(stored, type=ScannerBoard)
    except msgspec.DecodeError:
        # Written by another version.
        return None
