"""The engine itself: health, capabilities, clock."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal, Protocol

import msgspec

from flowfabric.engine.api.concern import Concern


class Version(msgspec.Struct, frozen=True):
    """A version, with numbers that compare in order."""

    major: int
    minor: int
    patch: int


class Identity(msgspec.Struct, frozen=True):
    """Which backend this is."""

    family: Literal["valkey", "postgres", "sqlite", "unknown"]
    version: Version
    stage: str


class Capabilities(msgspec.Struct, frozen=True):
    """The backend and the operations that it supports."""

    identity: Identity
    supports: Mapping[str, bool]


class NoOp(msgspec.Struct, frozen=True):
    """The deployment was set up before."""


class Applied(msgspec.Struct, frozen=True):
    """The deployment was set up or upgraded now."""

    description: str


class Grade(StrEnum):
    """How serious a finding is."""

    OK = "ok"
    WARNING = "warning"
    BROKEN = "broken"


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of one check, and what to do about it."""

    name: str
    grade: Grade
    detail: str
    advice: str = ""


def ok(name: str, detail: str) -> Finding:
    return Finding(name, Grade.OK, detail)


def warning(name: str, detail: str, advice: str) -> Finding:
    return Finding(name, Grade.WARNING, detail, advice)


def broken(name: str, detail: str, advice: str = "") -> Finding:
    return Finding(name, Grade.BROKEN, detail, advice)


class StoreUsage(msgspec.Struct, frozen=True):
    """What the store uses, summed over its nodes."""

    cpu_s: float
    """Processor time of the threads that run commands."""
    commands: int
    """How many ran so far, including those inside functions."""
    data_bytes: int
    """Memory without that of connections and write buffers."""
    blocked: int
    """Connections that wait in a blocking read."""


class Meta(Concern, Protocol):
    """The engine itself: health, capabilities, clock."""

    async def ping(self) -> None: ...
    async def server_time_ms(self) -> int: ...
    async def prepare(self) -> NoOp | Applied: ...  # Sets up or upgrades; safe to repeat.
    async def log_findings(self) -> None: ...  # Warns of settings that put work at risk.
    async def usage(self) -> StoreUsage: ...  # One command per node.
    async def feed_size(self, partition: int) -> tuple[int, int]: ...  # Entries and bytes.
    def capabilities(self) -> Capabilities: ...  # Asks no server.
    def backend_label(self) -> str: ...  # The family: `valkey`, `postgres` or `sqlite`.

    async def shutdown_prepare(self, grace_s: float) -> None:
        """Refuse stream calls, end tails, let reads finish within the grace or raise `timeout`."""

    async def diagnose(self, namespace: str | None = None) -> list[Finding]:
        """Check the deployment; of its workers, only those of the namespace if one is given."""
        ...

    async def failing_checks(self) -> list[str]:
        """What keeps this process from serving: `ping`, `library`, `partitions`; empty if ready."""
        ...

    async def wait_ready(self, timeout_s: float) -> None:
        """Return as soon as the store is reachable; raises after the timeout."""

    def fail_fast(self, *, enabled: bool = True) -> None:
        """Make calls fail at once while the store is unreachable; for processes that stop."""
