"""The signing secrets of waitpoint tokens: seeding, rotation, listing."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from flowfabric.core.contracts.suspension import (
    HmacKid,
    HmacKids,
    Rotation,
    RotationSummary,
    SeedOutcome,
)
from flowfabric.core.errors import EngineError, ValidationError, invalid_input
from flowfabric.engine.calls import Calls, text

__all__ = ["DEFAULT_GRACE_MS", "FIRST_KID", "Secrets", "check_secret"]

log = logging.getLogger(__name__)

DEFAULT_GRACE_MS = 86_400_000
FIRST_KID = "k1"
_FAN_OUT = 16
_MAX_GRACE_MS = 2**53 - 1
_KID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SECRET = re.compile(r"(?:[0-9a-fA-F]{2}){16,}")
_SEED_SECRET = re.compile(r"[0-9a-fA-F]{64}")


def check_secret(secret_hex: str) -> str:
    """A usable secret in lower case; under 16 bytes or not hex is `invalid_secret_hex`."""
    if not _SECRET.fullmatch(secret_hex):
        raise ValidationError(
            "invalid_secret_hex", "must be an even number of hex digits, at least 32 (advised: 64)"
        )
    return secret_hex.lower()


class Secrets(Calls):
    """Every partition signs and checks with its own, identical copy of the secrets."""

    def _all_tags(self) -> list[str]:
        return [f"{{fp:{index}}}" for index in range(self.counts.flow)]

    async def _seed(self, kid: str, secret: str) -> Counter[str]:
        tags = self._all_tags()
        size = 1 if self.transport.is_cluster else len(tags)
        groups: list[Sequence[str]] = [tags[i : i + size] for i in range(0, len(tags), size)]
        gate = asyncio.Semaphore(_FAN_OUT)

        async def seed(group: Sequence[str]) -> list[str]:
            async with gate:
                reply = await self.fcall(
                    "ff_seed_secret", group[0], (kid, secret, *group), op="seed_secret"
                )
                return [text(answer) for answer in reply[2]]

        answers = await asyncio.gather(*(seed(group) for group in groups))
        return Counter(answer for group in answers for answer in group)

    async def seed_at_boot(self, secret_hex: str | None) -> SeedOutcome:
        """Install the configured secret where none is stored. A stored one always wins."""
        secret = "" if secret_hex is None else check_secret(secret_hex)
        found = await self._seed(FIRST_KID, secret)
        outcome = SeedOutcome(**found)
        if outcome.mismatch:
            log.warning(
                "%s partitions keep another waitpoint secret than the configured one",
                outcome.mismatch,
                extra={"action": "secret_mismatch"},
            )
        if outcome.repaired or outcome.torn:
            log.warning(
                "waitpoint secrets: %s partitions repaired, %s still without a usable one",
                outcome.repaired,
                outcome.torn,
                extra={"action": "secret_repaired"},
            )
        return outcome

    async def seed_waitpoint_hmac_secret(
        self, kid: str, secret_hex: str
    ) -> Literal["seeded", "already_seeded"]:
        """For embedders, at every boot: install where empty; another current key is refused."""
        if not _SEED_SECRET.fullmatch(secret_hex):
            raise invalid_input("secret_hex", "must be 64 hex digits")
        if not _KID.fullmatch(kid):
            raise invalid_input("kid", "must be 1 to 64 of A-Z a-z 0-9 . _ -")
        found = await self._seed(kid, secret_hex.lower())
        kids = await self.list_waitpoint_hmac_kids(0)
        if kids.current_kid != kid or found["torn"]:
            raise invalid_input("kid", "another key is current: rotate instead of seeding")
        return "seeded" if found["installed"] or found["repaired"] else "already_seeded"

    async def rotate_waitpoint_hmac_secret(
        self,
        partition: int,
        new_kid: str,
        new_secret_hex: str,
        grace_ms: int = DEFAULT_GRACE_MS,
    ) -> Rotation:
        """Make a new secret current on one partition; the old verifies until its grace ends."""
        secret = _check_rotation(new_kid, new_secret_hex, grace_ms)
        reply = await self.fcall(
            "ff_rotate_secret", f"{{fp:{partition}}}", (new_kid, secret, grace_ms), op="rotate"
        )
        if reply[2] == b"noop":
            return Rotation(partition=partition, status="noop")
        return Rotation(
            partition=partition,
            status="rotated",
            previous_kid=text(reply[3]) or None,
            gc_count=int(reply[4]),
        )

    async def rotate_waitpoint_hmac_secret_all(
        self, new_kid: str, new_secret_hex: str, grace_ms: int = DEFAULT_GRACE_MS
    ) -> RotationSummary:
        """Rotate every partition; one that fails never stops the others, and a re-run converges."""
        _check_rotation(new_kid, new_secret_hex, grace_ms)
        gate = asyncio.Semaphore(_FAN_OUT)

        async def rotate(partition: int) -> Rotation:
            async with gate:
                try:
                    return await self.rotate_waitpoint_hmac_secret(
                        partition, new_kid, new_secret_hex, grace_ms
                    )
                except EngineError as error:
                    status = "conflict" if error.code == "rotation_conflict" else "failed"
                    return Rotation(partition=partition, status=status, error=str(error))

        entries = await asyncio.gather(*(rotate(index) for index in range(self.counts.flow)))
        return RotationSummary(new_kid=new_kid, entries=tuple(entries))

    async def list_waitpoint_hmac_kids(self, partition: int = 0) -> HmacKids:
        """The keys of a partition that still validate, without their secrets."""
        key = f"ff:sec:{{fp:{partition}}}:waitpoint_hmac"
        raw: Any = await self.transport.call("HGETALL", key, key=key)
        fields = {text(name): text(value) for name, value in raw.items()}
        current = fields.get("current_kid")
        reply = await self.fcall("ff_scan_due", "{fp:0}", (1, 0, 0), op="list_kids")
        now = int(reply[2])
        verifying = [
            HmacKid(name.removeprefix("expires_at:"), int(value))
            for name, value in fields.items()
            if name.startswith("expires_at:") and value.isdecimal() and int(value) >= now
        ]
        return HmacKids(current, tuple(sorted(verifying, key=lambda kid: kid.kid)))


def _check_rotation(kid: str, secret_hex: str, grace_ms: int) -> str:
    if not _KID.fullmatch(kid):
        raise ValidationError("invalid_kid", "must be 1 to 64 of A-Z a-z 0-9 . _ -")
    secret = check_secret(secret_hex)
    if isinstance(grace_ms, bool) or not 0 <= grace_ms <= _MAX_GRACE_MS:
        raise ValidationError("invalid_grace_ms", "must be a whole number from 0")
    return secret
