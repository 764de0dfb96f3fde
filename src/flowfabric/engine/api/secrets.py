"""The secrets that sign waitpoint tokens."""

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from flowfabric.core.contracts import suspension as contracts
from flowfabric.core.errors import ValidationError
from flowfabric.engine.api import check
from flowfabric.engine.api.concern import Concern

DEFAULT_GRACE_MS = 86_400_000
GRACE_VARIABLE = "FF_WAITPOINT_HMAC_GRACE_MS"
SECRET_VARIABLE = "FF_WAITPOINT_HMAC_SECRET"  # noqa: S105 - a name, no secret
_is_secret = re.compile(r"(?!0+$)(?:[0-9a-fA-F]{2}){16,}").fullmatch
is_kid = re.compile(r"[A-Za-z0-9._-]{1,64}").fullmatch
RotationReport = Callable[[contracts.Rotation], None]
_report: ContextVar[RotationReport | None] = ContextVar("flowfabric_rotation", default=None)


@contextmanager
def rotations_reported(report: RotationReport) -> Generator[None]:
    """Call `report` for each partition whose rotation ends inside this block.

    >>> with rotations_reported(print):
    ...     await backend.secrets.rotate_waitpoint_hmac_secret_all(...)  # doctest: +SKIP
    """
    before = _report.set(report)
    try:
        yield
    finally:
        _report.reset(before)


def report_rotation(entry: contracts.Rotation) -> None:
    """Called by backends when the rotation of one partition has ended."""
    if (report := _report.get()) is not None:
        report(entry)


def check_secret(secret_hex: str) -> str:
    """The secret in lower case; raises `invalid_secret_hex` if it cannot be used."""
    if not isinstance(secret_hex, str) or not _is_secret(secret_hex):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValidationError(
            "invalid_secret_hex",
            "must be an even number of hex digits, at least 32 (advised: 64), and not all zeros",
        )
    return secret_hex.lower()


def check_rotation(kid: str, secret_hex: str, grace_ms: int) -> str:
    """The secret in lower case; raises if the rotation is invalid."""
    if not isinstance(kid, str) or not is_kid(kid):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValidationError("invalid_kid", "must be 1 to 64 of A-Z a-z 0-9 . _ -")
    secret = check_secret(secret_hex)
    if type(grace_ms) is not int or not 0 <= grace_ms <= check.MAX_EXACT:
        raise ValidationError("invalid_grace_ms", "must be a whole number from 0")
    return secret


class Secrets(Concern, Protocol):
    """The secrets that sign waitpoint tokens."""

    async def seed_at_boot(self, secret_hex: str | None) -> contracts.SeedOutcome:
        """Install the configured secret where none is stored. A stored one always wins."""
        ...

    async def seed_waitpoint_hmac_secret(self, kid: str, secret_hex: str) -> contracts.SeedResult:
        """Install a secret where none is stored, at every boot; refuses another current key."""
        ...

    async def rotate_waitpoint_hmac_secret(
        self, partition: int, new_kid: str, new_secret_hex: str, grace_ms: int = DEFAULT_GRACE_MS
    ) -> contracts.Rotation:
        """Make a new secret current on one partition; the old one verifies until its grace ends."""
        ...

    async def rotate_waitpoint_hmac_secret_all(
        self, new_kid: str, new_secret_hex: str, grace_ms: int = DEFAULT_GRACE_MS
    ) -> contracts.RotationSummary:
        """Rotate every partition. A failing one does not stop the others; a rerun converges."""
        ...

    async def list_waitpoint_hmac_kids(self, partition: int = 0) -> contracts.HmacKids:
        """The keys of a partition that verify now, without their secrets."""
        ...
