"""The newest executions, each read as it is now."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec

from flowfabric.cli.fleet import server_now_ms
from flowfabric.core.contracts.executions import ExecutionSummary
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.backend import Backend
from flowfabric.engine.listing import Filter

__all__ = ["Listed", "Row", "collect"]

_PAGE = 1000
_PAGES = 10
"""So many pages are walked unless everything is asked for: about a second of work."""
_FIELDS = (
    "public_state",
    "total_attempt_count",
    "current_worker_instance_id",
    "progress_pct",
    "completed_at",
)


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One execution in the list; the fields of a line of `--json`."""

    execution_id: ExecutionId
    execution_kind: str
    lane_id: str
    namespace: str
    public_state: str
    priority: int
    created_at: str
    """Milliseconds as decimal text, as everywhere in answers for programs."""
    total_attempt_count: int
    completed_at: str | None = None
    progress_pct: int | None = None
    worker_instance_id: str | None = None


class Listed(msgspec.Struct, frozen=True):
    """The newest executions of all that were looked at."""

    rows: list[Row]
    states: Counter[str]
    complete: bool
    now_ms: int

    @property
    def total(self) -> int:
        """How many executions matched."""
        return self.states.total()


async def collect(backend: Backend, where: Filter, limit: int | None) -> Listed:
    """Walk the listing page by page, keep the newest, and read those once more as they are now."""
    found: list[ExecutionSummary] = []
    states: Counter[str] = Counter()
    cursor: str | None = ""
    pages = 0
    while cursor is not None and (limit is None or pages < _PAGES):
        page = await backend.list_executions(cursor=cursor, limit=_PAGE, where=where)
        states.update(row.public_state.value for row in page.executions)
        found = _newest([*found, *page.executions], limit)
        cursor = page.next_cursor
        pages += 1
    rows: list[Row] = []
    for start in range(0, len(found), _PAGE):
        rows += await asyncio.gather(
            *(_row(backend, each) for each in found[start : start + _PAGE])
        )
    return Listed(rows, states, cursor is None, await server_now_ms(backend))


def _newest(found: list[ExecutionSummary], limit: int | None) -> list[ExecutionSummary]:
    found.sort(key=lambda row: (-int(row.created_at), row.execution_id))
    return found if limit is None else found[:limit]


async def _row(backend: Backend, summary: ExecutionSummary) -> Row:
    fields = await backend.read_exec_core_fields(summary.execution_id, _FIELDS)
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
