"""What scanners call: due timers, lapsed leases, retention, index repair; and who runs them."""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from flowfabric.core.errors import EngineError
from flowfabric.core.state import ExpireReason
from flowfabric.engine.api.concern import Concern

Mode = Literal["check", "repair"]

ALL_EXECUTIONS = "all_executions"
"""The index of every execution of a partition, by id."""
SOUGHT_AT_ONCE = 2500
"""How many indexes one command checks; more would block other calls for over 1 ms."""


class Index(NamedTuple):
    """An index of a partition, or of one lane in it."""

    tag: str
    name: str
    lane: str = ""

    def __str__(self) -> str:
        return f"lane:{self.lane}:{self.name}" if self.lane else self.name


class DueScan(msgspec.Struct, frozen=True):
    """The contents of time-ordered indexes. An index in neither mapping is empty."""

    now_ms: int
    due: dict[Index, list[str]]
    """Due members of each index; malformed ones as `core.text.lossless` returns them."""
    armed: dict[Index, int]
    """The earliest time in each index that has nothing due yet."""
    unreadable: dict[Index, EngineError]


class Audit(msgspec.Struct, frozen=True):
    """One verdict per execution, and the lanes that their records name."""

    verdicts: list[str]
    lanes: list[str]


class DependencyAudit(NamedTuple):
    """The result of checking a member that waits for others."""

    verdict: str
    """`consistent`, `resolved`, `unblocked`, or `error:<why>`."""
    cursor: str
    """Where the next check of its edges continues; `0` after the last edge."""


class FlowBacklog(msgspec.Struct, frozen=True):
    """Flow updates that calls left for the engine to do in the background."""

    queued: dict[str, int]
    """The number of entries of each queue that is not empty."""
    parked: dict[str, str]
    """The flow updates that failed too often, with the reason."""


class Drain(NamedTuple):
    """A worker process that gets no more work."""

    namespace: str
    worker_instance_id: str
    ends_at_ms: int
    """When the leases that it still holds are revoked."""
    namespaces: tuple[str, ...]
    """The namespaces that it serves, whose work it no longer gets."""


class SurveyRequest(msgspec.Struct, frozen=True):
    """A partition to survey, its lanes, and the indexes that the last survey found there."""

    tag: str
    lanes: Sequence[str]
    known: Sequence[Index] = ()


class Survey(msgspec.Struct, frozen=True):
    """The state of a partition's indexes."""

    tag: str
    fingerprint: str
    """Changes when an entry is added, removed or rescored, but not when a lease is renewed."""
    indexes: tuple[Index, ...]
    """The indexes that exist, except the list of all executions."""


class Upkeep(Concern, Protocol):
    """What scanners call. Calls with several ids answer with one word per id."""

    async def scan_due(self, indexes: Sequence[Index], limit: int, offset: int = 0) -> DueScan:
        """Up to `limit` due members per index after `offset`; raises if no index can be read."""
        ...

    async def any_exists(self, indexes: Sequence[Index]) -> bool:
        """Whether any of the indexes has entries: one cheap command on a single server."""
        ...

    async def earliest(self, index: Index) -> int | None: ...  # 0 if it cannot be read.
    async def waitpoint_owner(self, tag: str, waitpoint_id: str) -> str: ...  # Empty if unreadable.
    async def mark_lease_expired_if_due(self, tag: str, ids: Iterable[str]) -> list[str]: ...
    async def promote_delayed(self, tag: str, lane_id: str, ids: Iterable[str]) -> list[str]: ...
    async def trim_retention(self, tag: str, lane_id: str, ids: Iterable[str]) -> list[str]: ...
    async def expire_execution(
        self, tag: str, reason: ExpireReason, ids: Iterable[str]
    ) -> list[str]: ...

    async def purge(self, tag: str) -> int:
        """Continue to delete the data of trimmed executions; returns how many are left."""
        ...

    async def rescore(self, tag: str) -> tuple[int, bool]:
        """Rescore waiting executions after a change of their lane's weight: how many, any left."""
        ...

    async def trim_events(self, tag: str, older_than_ms: int) -> int: ...
    async def trim_policy_events(self, older_than_ms: int) -> int: ...  # Of budgets and quotas.
    async def trim_worker_events(self, namespace: str, older_than_ms: int) -> int: ...
    async def sweep_workers(self, namespace: str) -> int: ...  # Removes expired workers.

    async def list_drains(self) -> list[Drain]:
        """The worker processes that are being drained."""
        ...

    async def continue_drain(self, drain: Drain) -> int:
        """Keep refusing its claims; past its end, revoke its leases. Returns how many."""
        ...

    async def forget_idle_lanes(self) -> int: ...  # Those empty and unregistered for a minute.

    async def reconcile_execution_index(
        self, tag: str, ids: Iterable[str], mode: Mode = "repair"
    ) -> list[str]:
        """Compare executions with the indexes of up to 100 lanes; repair them if asked."""
        ...

    async def audit_indexes(
        self, tag: str, ids: Iterable[str], lanes: Sequence[str], mode: Mode
    ) -> Audit:
        """The same, given the lanes to search for entries under a wrong lane."""
        ...

    async def drain_flow_cancels(self, tag: str, ids: Iterable[str]) -> list[str]:
        """Cancel the remaining members of cancelled flows."""
        ...

    async def delete_due_flows(self, tag: str, ids: Iterable[str]) -> list[str]:
        """Delete flows whose retention is over, or whose submission was interrupted."""
        ...

    async def audit_dependencies(
        self, tag: str, members: Sequence[tuple[str, str]]
    ) -> list[DependencyAudit]:
        """Check members (id, cursor), and resolve edges whose upstream ended unnoticed."""
        ...

    async def parked_units(self, tag: str) -> dict[str, str]:
        """The flow updates of a partition that failed too often, with the reason."""
        ...

    async def flow_backlog(self, tags: Sequence[str]) -> FlowBacklog:
        """The steps that remain to be done for the flows of these partitions."""
        ...

    async def sibling_groups(self, tag: str, limit: int) -> list[str]:
        """Some joins, as `<flow id>|<child's uuid>`, whose siblings may have to be cancelled."""
        ...

    async def forget_sibling_groups(self, tag: str, names: Iterable[str]) -> int:
        """Remove malformed names from them."""
        ...

    async def survey_indexes(self, requests: Sequence[SurveyRequest]) -> list[Survey]: ...
    async def list_index(self, index: Index, start: int, limit: int) -> list[str]: ...

    async def unlisted(self, tag: str, ids: Sequence[str]) -> list[str]:
        """The executions that the partition's list of all executions lacks."""
        ...


class Leader(msgspec.Struct, frozen=True):
    """A process that runs scanners."""

    process: str
    """`<host>:<pid>`"""
    partial: bool
    """It has a filter, or some of its scanners are disabled."""


class Leadership(Concern, Protocol):
    """The advisory leases of the processes that run scanners, one per duty. They save commands.

    A duty is what a process would scan; the empty one is everything. An identity is
    `<host>:<pid>:<anything unique>`. Acquiring also renews our own lease; both return whether we
    hold it.
    """

    async def acquire(self, duty: str, identity: str, ttl_ms: int) -> bool: ...
    async def renew(self, duty: str, identity: str, ttl_ms: int) -> bool: ...  # One cheap command.
    async def resign(self, duty: str, identity: str) -> None: ...
    async def remaining_ms(self, duty: str) -> int | None: ...  # None if the lease is free.
    async def leaders(self) -> list[Leader]: ...  # Those with every duty first.

    async def put_report(self, report: bytes, ttl_ms: int) -> None:
        """Store the report of the leader with every duty, for people."""

    async def get_report(self) -> bytes | None: ...  # None after its time.
