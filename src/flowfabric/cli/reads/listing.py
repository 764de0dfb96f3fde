"""The newest executions, with their current state."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec

from flowfabric.core.contracts.executions import ExecutionSummary
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.listings import Filter
from flowfabric.engine.valkey.backend import ValkeyBackend

_PAGE = 1000
_PAGES = 10
"""Pages read unless the caller asks for everything: about a second of work."""
_FIELDS = (
    "public_state",
    "total_attempt_count",
    "current_worker_instance_id",
    "progress_pct",
    "completed_at",
)


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One execution; the fields of a line of `ps --json`."""

    execution_id: ExecutionId
    execution_kind: str
    lane_id: str
    namespace: str
    public_state: str
    priority: int
    created_at: str
    """Milliseconds as decimal text."""
    total_attempt_count: int
    completed_at: str | None = None
    progress_pct: int | None = None
    worker_instance_id: str | None = None


class ExecutionListing(msgspec.Struct, frozen=True):
    """The newest executions, and how many there are in each state."""

    rows: list[Row]
    states: Counter[str]
    complete: bool
    """Whether every execution was read, or only the first pages."""
    now_ms: int

    @property
    def total(self) -> int:
        """How many executions match."""
        return self.states.total()


async def read_newest(backend: ValkeyBackend, where: Filter, limit: int | None) -> ExecutionListing:
    """Page through the listing, keep the newest, and read the current state of those."""
    found: list[ExecutionSummary] = []
    states: Counter[str] = Counter()
    cursor: str | None = ""
    pages = 0
    while cursor is not None and (limit is None or pages < _PAGES):
        page = await backend.listings.list_executions(cursor=cursor, limit=_PAGE, where=where)
        states.update(row.public_state.value for row in page.executions)
        found = _newest([*found, *page.executions], limit)
        cursor = page.next_cursor
        pages += 1
    rows: list[Row] = []
    for start in range(0, len(found), _PAGE):
        rows += await asyncio.gather(
            *(_row(backend, each) for each in found[start : start + _PAGE])
        )
    return ExecutionListing(rows, states, cursor is None, await backend.meta.server_time_ms())


def _newest(found: list[ExecutionSummary], limit: int | None) -> list[ExecutionSummary]:
    found.sort(key=lambda row: (-int(row.created_at), row.execution_id))
    return found if limit is None else found[:limit]


async def _row(backend: ValkeyBackend, summary: ExecutionSummary) -> Row:
    fields = await backend.reads.read_exec_core_fields(summary.execution_id, _FIELDS)
    return Row(
        execution_id=summary.execution_id,
        execution_kind=summary.execution_kind,
        lane_id=summary.lane_id,
        namespace=summary.namespace,
        # Retention may have deleted the record between the two reads.
        public_state=fields["public_state"] or summary.public_state.value,
        priority=summary.priority,
        created_at=summary.created_at,
        total_attempt_count=int(fields["total_attempt_count"] or 0),
        completed_at=fields["completed_at"],
        progress_pct=_number(fields["progress_pct"]),
        worker_instance_id=fields["current_worker_instance_id"],
    )


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)
