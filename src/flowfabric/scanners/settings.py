"""How often scanners run, which are disabled, and which part of a shared keyspace is theirs."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Self

import msgspec

from flowfabric.core.environment import invalid, whole_number
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import stored_id, validate_namespace
from flowfabric.engine.api.backend import Backend

INTERVALS_S: Mapping[str, float] = {
    "lease_expiry": 1.5,
    "delayed_promoter": 0.75,
    "attempt_timeout": 2.0,
    "execution_deadline": 5.0,
    "suspension_timeout": 2.0,
    "pending_wp_expiry": 5.0,
    "unblock": 5.0,
    "doorbell": 2.0,
    "lane_rescore": 1.0,
    "cascade_drain": 1.0,
    "cancel_reconciler": 15.0,
    "dependency_reconciler": 15.0,
    "edge_cancel_dispatcher": 1.0,
    "edge_cancel_reconciler": 10.0,
    "flow_projector": 15.0,
    "index_reconciler": 45.0,
    "retention_trimmer": 60.0,
    "quota_reconciler": 30.0,
    "budget_reset": 15.0,
    "budget_reconciler": 30.0,
    "worker_sweeper": 30.0,
    "worker_drain": 5.0,
}
"""Every scanner with its interval: the longest wait after something is due."""

FAMILIES: Mapping[str, str] = {
    "budget_reset": "budget",
    "budget_reconciler": "budget",
    "quota_reconciler": "quota",
}
"""The scanners of other partitions than those of executions."""

_DAY_MS = 86_400_000


class ScannerFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Accepts executions of one namespace, or with one tag; an empty filter accepts all.

    >>> ScannerFilter(namespace="acme", instance_tag=("region", "eu")).is_empty
    False
    """

    namespace: str | None = None
    instance_tag: tuple[str, str] | None = None

    @property
    def is_empty(self) -> bool:
        return self.namespace is None and self.instance_tag is None

    async def accepted(self, backend: Backend, ids: Sequence[str]) -> list[str]:
        """The ids that match, in order. An execution that cannot be read does not match."""
        if self.is_empty:
            return list(ids)
        verdicts = await asyncio.gather(*(self._accepts(backend, member) for member in ids))
        return [member for member, ok in zip(ids, verdicts, strict=True) if ok]

    async def _accepts(self, backend: Backend, member: str) -> bool:
        try:
            execution_id, reads = stored_id(member, "index"), backend.reads
            if self.namespace is not None:
                found = await reads.get_execution_namespace(execution_id)
                if found != self.namespace:
                    return False
            if self.instance_tag is not None:
                name, value = self.instance_tag
                return await reads.get_execution_tag(execution_id, name) == value
        except EngineError:
            return False
        return True


class ScannerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one process's scanners.

    >>> ScannerSettings.from_env({"FF_LEASE_EXPIRY_INTERVAL_MS": "500"}).interval("lease_expiry")
    0.5
    """

    intervals_s: Mapping[str, float] = {}
    """The intervals that differ from `INTERVALS_S`."""
    disabled: frozenset[str] = frozenset()
    filter: ScannerFilter = ScannerFilter()
    """The executions these scanners may touch."""
    events_retention_ms: int = _DAY_MS
    restart_backoff_s: float = 5.0
    """The pause before a crashed scanner restarts."""
    territory_refresh_s: float = 5.0
    """How often to read which lanes and partitions other processes use."""
    clock_trust_s: float = 5.0
    """How long to estimate the server's time before reading it again."""
    leader_ttl_s: float = 1.5
    """How long a leader that no longer renews keeps other processes from scanning."""

    def interval(self, scanner: str) -> float:
        """Seconds between two cycles; never less than 0.1."""
        return max(0.1, self.intervals_s.get(scanner, INTERVALS_S[scanner]))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """The settings of the environment; a bad value is a `ConfigError` that names it."""
        env = os.environ if environ is None else environ
        intervals = {name: _interval(env, name) for name in INTERVALS_S}
        return cls(
            intervals_s={name: value for name, value in intervals.items() if value is not None},
            disabled=_disabled(env),
            filter=_filter(env),
            events_retention_ms=whole_number(env, "FF_EVENTS_RETENTION_MS", _DAY_MS, 1, 2**53 - 1),
        )


def _interval(env: Mapping[str, str], scanner: str) -> float | None:
    found: float | None = None
    stem = f"FF_{scanner.upper()}_INTERVAL"
    for variable, unit in ((f"{stem}_S", 1.0), (f"{stem}_MS", 0.001)):
        if not env.get(variable, "").strip():
            continue
        if found is not None:
            raise invalid(variable, f"{stem}_S is also set; keep only one of them")
        found = whole_number(env, variable, 0, 0, 2**64 - 1) * unit
    return found


def _disabled(env: Mapping[str, str]) -> frozenset[str]:
    text = env.get("FF_SCANNERS_DISABLED", "")
    names = frozenset(name.strip() for name in text.split(",") if name.strip())
    unknown = sorted(names - INTERVALS_S.keys())
    if unknown:
        raise invalid(
            "FF_SCANNERS_DISABLED",
            f"unknown: {', '.join(unknown)}; the scanners are {', '.join(INTERVALS_S)}",
        )
    return names


def _filter(env: Mapping[str, str]) -> ScannerFilter:
    namespace = env.get("FF_SCANNER_NAMESPACE") or None
    if namespace is not None:
        try:
            validate_namespace(namespace)
        except EngineError as error:
            raise invalid("FF_SCANNER_NAMESPACE", error.detail) from error
    text = env.get("FF_SCANNER_INSTANCE_TAG", "")
    key, _, value = text.partition("=")
    if text and not (key and value):
        raise invalid("FF_SCANNER_INSTANCE_TAG", f"must be <key>=<value>, got {text!r}")
    return ScannerFilter(namespace=namespace, instance_tag=(key, value) if text else None)
