"""The secrets that sign waitpoint tokens."""

import logging
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from flowfabric.core.contracts import suspension as contracts
from flowfabric.core.errors import EngineError, invalid_input
from flowfabric.core.stored import stored_text
from flowfabric.engine.api import check
from flowfabric.engine.api import secrets as api
from flowfabric.engine.valkey.calls import FunctionCalls, at_once, text
from flowfabric.engine.valkey.pages import chunks

_OTHER_SECRET = frozenset({"mismatch", "torn"})
Found = tuple[str, str]
"""The result of seeding one partition: a status and the current kid."""
_is_seed_secret = re.compile(r"(?!0+$)[0-9a-fA-F]{64}").fullmatch
_SEED_GROUP = 16  # Short calls stay out of the slow log, which shows their arguments.
_FAN_OUT = 16
_REPORTED = {
    "mismatch": "%s partitions have another waitpoint secret than the configured one",
    "repaired": "the waitpoint secret was missing on %s partitions and is installed again",
    "torn": (
        "%s partitions have lost their waitpoint secret, and the configured one is not known to "
        "be it: rotate to a new one"
    ),
}
FIRST_KID = "k1"
_GRACE_MS = api.DEFAULT_GRACE_MS
log = logging.getLogger(__name__)
audit_log = logging.getLogger("flowfabric.audit")


class ValkeySecrets(api.Secrets):
    def __init__(self, calls: FunctionCalls) -> None:
        self._calls = calls

    async def _seed(
        self, kid: str, secret: str, partitions: Sequence[int], *, repair: bool = False
    ) -> list[Found]:
        tags = [f"{{fp:{index}}}" for index in partitions]
        size = 1 if self._calls.transport.is_cluster else _SEED_GROUP

        async def seed(group: Sequence[str]) -> list[Found]:
            args = (kid, secret, "1" if repair else "0", *group)
            return await self._calls.ask("ff_seed_secret", group[0], args, _found, op="seed_secret")

        answers = await at_once(_FAN_OUT, seed, chunks(tags, size))
        return [found for group in answers for found in group]

    async def _seed_everywhere(self, kid: str, secret: str) -> list[Found]:
        """Seed all partitions; repairs those whose lost secret the others can confirm."""
        found = await self._seed(kid, secret, range(self._calls.counts.flow))
        for lost in {current for status, current in found if status == "torn"}:
            healthy = {s for s, current in found if current == lost} & {"match", "mismatch"}
            if healthy == {"match"} or (not healthy and lost == kid):
                torn = [index for index, entry in enumerate(found) if entry == ("torn", lost)]
                repaired = await self._seed(lost, secret, torn, repair=True)
                for index, entry in zip(torn, repaired, strict=True):
                    found[index] = entry
        return found

    async def seed_at_boot(self, secret_hex: str | None) -> contracts.SeedOutcome:
        secret = "" if secret_hex is None else api.check_secret(secret_hex)
        found = await self._seed_everywhere(FIRST_KID, secret)
        outcome = contracts.SeedOutcome(**Counter(status for status, _ in found))
        if outcome.installed:
            extra = {"action": "secret_installed", "kid": FIRST_KID}
            log.info("the waitpoint secret is on %s partitions now", outcome.installed, extra=extra)
        for status, message in _REPORTED.items():
            if count := getattr(outcome, status):
                level = logging.ERROR if status == "torn" else logging.WARNING
                log.log(level, message, count, extra={"action": f"secret_{status}"})
        return outcome

    async def seed_waitpoint_hmac_secret(self, kid: str, secret_hex: str) -> contracts.SeedResult:
        if not _is_seed_secret(check.text(secret_hex, "secret_hex")):
            raise invalid_input("secret_hex", "must be 64 hex digits, not all zeros")
        if not api.is_kid(check.text(kid, "kid")):
            raise invalid_input("kid", "must be 1 to 64 of A-Z a-z 0-9 . _ -")
        found = await self._seed_everywhere(kid, secret_hex.lower())
        if any(current != kid for _, current in found):
            raise invalid_input("kid", "another key is current: rotate instead of seeding")
        different = tuple(i for i, (status, _) in enumerate(found) if status in _OTHER_SECRET)
        if any(status in ("installed", "repaired") for status, _ in found):
            return contracts.Seeded(kid, different)
        return contracts.AlreadySeeded(kid, same_secret=not different)

    async def rotate_waitpoint_hmac_secret(
        self, partition: int, new_kid: str, new_secret_hex: str, grace_ms: int = _GRACE_MS
    ) -> contracts.Rotation:
        secret = api.check_rotation(new_kid, new_secret_hex, grace_ms)
        return await self._rotate(partition, new_kid, secret, grace_ms)

    async def _rotate(
        self, partition: int, kid: str, secret: str, grace_ms: int
    ) -> contracts.Rotation:
        args = (kid, secret, grace_ms)

        def rotated(reply: list[Any]) -> contracts.Rotation:
            if reply[2] == b"noop":
                return contracts.Rotation(partition=partition, status="noop")
            previous, gone = text(reply[3]) or None, int(reply[4])
            return contracts.Rotation(
                partition=partition, status="rotated", previous_kid=previous, gc_count=gone
            )

        tag = self._tag(partition)
        rotation = await self._calls.ask("ff_rotate_secret", tag, args, rotated, op="rotate")
        if rotation.status == "rotated" and log.isEnabledFor(logging.DEBUG):
            extra = {"action": "waitpoint_hmac_rotated", "partition": partition, "new_kid": kid}
            log.debug("The waitpoint secret of partition %d was rotated", partition, extra=extra)
        return rotation

    async def rotate_waitpoint_hmac_secret_all(
        self, new_kid: str, new_secret_hex: str, grace_ms: int = _GRACE_MS
    ) -> contracts.RotationSummary:
        secret = api.check_rotation(new_kid, new_secret_hex, grace_ms)

        async def rotate(partition: int) -> contracts.Rotation:
            try:
                entry = await self._rotate(partition, new_kid, secret, grace_ms)
            except EngineError as error:
                status = "conflict" if error.code == "rotation_conflict" else "failed"
                entry = contracts.Rotation(partition=partition, status=status, error=str(error))
            api.report_rotation(entry)
            return entry

        entries = await at_once(_FAN_OUT, rotate, range(self._calls.counts.flow))
        for entry in entries:
            if entry.error is not None:
                about = {"partition": entry.partition, "err": entry.error}
                audit_log.error(
                    "The waitpoint secret of partition %(partition)d was not rotated: %(err)s",
                    about,
                    extra={"action": "waitpoint_hmac_rotation_failed", **about},
                )
        return contracts.RotationSummary(new_kid=new_kid, entries=tuple(entries))

    async def list_waitpoint_hmac_kids(self, partition: int = 0) -> contracts.HmacKids:
        tag = self._tag(partition)
        return await self._calls.ask("ff_list_kids", tag, (), _kids, op="list_kids")

    def _tag(self, partition: int) -> str:
        return f"{{fp:{check.partition(partition, self._calls.counts)}}}"


def _found(reply: list[Any]) -> list[Found]:
    return [(text(status), text(current)) for status, current in reply[2]]


def _kids(reply: list[Any]) -> contracts.HmacKids:
    """The keys; a malformed kid is corruption."""
    current, past = reply[2:]
    place = "key store", "current_kid"
    verifying = sorted((stored_text(kid, *place), int(expires)) for kid, expires in past)
    return contracts.HmacKids(
        None if current is None else stored_text(current, *place),
        tuple(contracts.HmacKid(kid, expires) for kid, expires in verifying),
    )
