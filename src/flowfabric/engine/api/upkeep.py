"""What scanners call: due timers, lapsed leases, retention, index repair."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from flowfabric.core.state import ExpireReason
from flowfabric.engine.api.concern import Concern

Mode = Literal["check", "repair"]


class DuePage(msgspec.Struct, frozen=True):
    """Due members of one index; a malformed one is as `core.text.lossless` gives it."""

    tag: str
    index: str
    ids: list[str]


class DueScan(msgspec.Struct, frozen=True):
    """What a look at time-ordered indexes found. An index in none of the parts is empty."""

    now_ms: int
    pages: list[DuePage]
    armed: dict[tuple[str, str], int]
    """The earliest time in each (tag, index) where nothing is due yet."""
    unreadable: dict[tuple[str, str], str]
    """Why a (tag, index) could not be read."""


class Audit(msgspec.Struct, frozen=True):
    """One verdict per execution, and the lanes that their records name."""

    verdicts: list[str]
    lanes: list[str]


class SurveyPart(msgspec.Struct, frozen=True):
    """What a survey is to look at in a partition."""

    tag: str
    lanes: Sequence[str]
    known: Sequence[str]
    """Indexes that existed before: they are found more cheaply."""
    whole: bool
    """Look at the indexes of the partition itself, too."""


class Survey(msgspec.Struct, frozen=True):
    """What the indexes of a partition, or of some of its lanes, look like."""

    tag: str
    looks: str
    """The same as before when nothing was added to an index, lost from it or scored anew."""
    executions: int
    names: tuple[str, ...]
    """The indexes that exist, after `ff:idx:T:`."""


class Upkeep(Concern, Protocol):
    """What scanners call: due timers, lapsed leases, retention, index repair."""

    async def scan_due(
        self, indexes: Mapping[str, Sequence[str]], limit: int, offset: int = 0
    ) -> DueScan:
        """Members of each partition's named indexes whose time has come.

        In a cluster a call covers one partition. Name at most a few hundred indexes.
        """
        ...

    async def mark_lease_expired_if_due(self, tag: str, ids: Iterable[str]) -> list[str]:
        """Move lapsed leases to where the next claim finds them."""
        ...

    async def promote_delayed(self, tag: str, lane_id: str, ids: Iterable[str]) -> list[str]:
        """Make due delayed executions eligible."""
        ...

    async def expire_execution(
        self, tag: str, reason: ExpireReason, ids: Iterable[str]
    ) -> list[str]:
        """End executions whose attempt ran too long or whose lifetime is over."""
        ...

    async def trim_retention(self, tag: str, lane_id: str, ids: Iterable[str]) -> list[str]:
        """Delete terminal executions whose retention is over."""
        ...

    async def purge(self, tag: str) -> int:
        """Go on deleting what trimmed executions left; how many executions are still to do."""
        ...

    async def trim_events(self, key: str, older_than_ms: int) -> int:
        """Drop the entries of a feed from before a time."""
        ...

    async def reconcile_execution_index(
        self, tag: str, ids: Iterable[str], mode: Mode = "repair"
    ) -> list[str]:
        """Compare executions with the indexes their records demand; repair where asked.

        Entries under another lane than that of the record are found in so many lanes.
        """
        ...

    async def audit_indexes(
        self, tag: str, ids: Iterable[str], lanes: Sequence[str], mode: Mode
    ) -> Audit:
        """The same for who knows the lanes whose indexes exist in the partition."""
        ...

    async def survey_indexes(self, parts: Sequence[SurveyPart]) -> list[Survey]:
        """What these parts of partitions look like. In a cluster a call covers one partition."""
        ...

    async def idle_lanes(self, tag: str, lanes: Sequence[str]) -> list[str]:
        """Those of the lanes of which nothing is stored in a partition."""
        ...

    async def forget_places(self, tag: str, stamps: Mapping[str, str]) -> int:
        """Take lanes out of the registry whose stamp is still the same; how many left.

        The tag is a partition's, or `ANYWHERE` for lanes that no partition has.
        """
        ...

    async def sweep_workers(self, namespace: str, cursor: str = "0") -> tuple[str, int]:
        """Take expired workers out of the index; the next cursor, `0` at the end, and how many."""
        ...
