"""Reads the current state of the demo's executions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

import flowfabric as ff
from flowfabric.core.contracts.executions import AttemptRecord
from flowfabric.core.state import PublicState

_ENDED = frozenset(
    {
        PublicState.COMPLETED,
        PublicState.FAILED,
        PublicState.CANCELLED,
        PublicState.EXPIRED,
        PublicState.SKIPPED,
    }
)


class Row(msgspec.Struct, frozen=True):
    """One execution at one moment."""

    label: str
    state: PublicState
    progress: int | None
    attempts: tuple[AttemptRecord, ...]
    result: str
    failure: str

    @property
    def ended(self) -> bool:
        """Whether the execution has ended."""
        return self.state in _ENDED

    @property
    def worker(self) -> str:
        """The worker of the current or last attempt."""
        if not self.attempts or self.state in (PublicState.WAITING, PublicState.DELAYED):
            return ""
        return self.attempts[-1].worker_id

    @property
    def tries(self) -> str:
        """Its attempts in words: `1`, `2 (reclaim)`, …"""
        if not self.attempts:
            return ""
        why = self.attempts[-1].attempt_type
        return f"{len(self.attempts)}" if why == "initial" else f"{len(self.attempts)} ({why})"

    def runs_on(self, worker: str) -> bool:
        """Whether this worker holds it now."""
        return self.state is PublicState.ACTIVE and self.worker == worker


class Watch:
    """The submitted executions, in the order of submission."""

    def __init__(self, client: ff.Client, runs: Sequence[tuple[str, ff.Run[Any]]]) -> None:
        self._client = client
        self._runs = runs
        self._results: dict[str, str] = {}

    async def rows(self) -> list[Row]:
        """Read the current state of all executions."""
        return list(await asyncio.gather(*(self._row(*entry) for entry in self._runs)))

    async def _row(self, label: str, run: ff.Run[Any]) -> Row:
        attempts, info = await asyncio.gather(
            self._client.backend.reads.read_attempts(run.id), run.info()
        )
        if info.public_state is PublicState.COMPLETED and run.id not in self._results:
            self._results[run.id] = _shown(await run.result())
        return Row(
            label,
            info.public_state,
            info.progress_pct,
            tuple(attempts),
            self._results.get(run.id, ""),
            _first_line(info.failure_reason),
        )


def _first_line(reason: str | None) -> str:
    # What follows is the traceback, which `flowfabric show` prints.
    return reason.splitlines()[0] if reason else ""


def _shown(result: Any) -> str:
    cents = getattr(result, "total_cents", None)
    return str(result) if cents is None else f"{cents / 100:,.2f} EUR"
