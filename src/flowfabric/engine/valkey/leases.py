"""Renewing, revoking and listing leases."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flowfabric.core.contracts import leases
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.errors import EngineError, ValidationError
from flowfabric.core.ids import ExecutionId, new_uuid, validate_namespace
from flowfabric.engine.api import check
from flowfabric.engine.api.leases import ExpiredLease, ExpiredLeases, Leases
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls, decoding, proof, refused, text
from flowfabric.engine.valkey.pages import Damage, chunks
from flowfabric.engine.valkey.places import ValkeyPlaces
from flowfabric.engine.valkey.record import Record
from flowfabric.engine.valkey.score_indexes import ScoreIndexes

Due = tuple[int, ExecutionId]
"""When a lease expires, and its execution: the order of the listing."""
Slot = tuple[ExecutionId, int]
"""The execution and the run that a slot of a quota policy belongs to."""
_MAX_PAGE = 10_000
_RENEW_BATCH = 256


class ValkeyLeases(Leases):
    """`Leases` on Valkey."""

    def __init__(self, calls: FunctionCalls, places: ValkeyPlaces) -> None:
        self._calls = calls
        self._places = places
        self._scores = ScoreIndexes(calls)
        self.on_slots_renewed: Callable[[Mapping[str, Sequence[Slot]]], None] | None = None
        """Called with the quota slots of renewed leases, by quota policy."""

    async def renew_lease(
        self, execution_id: ExecutionId, fence: Handle | leases.Fence, lease_ttl_ms: int
    ) -> leases.Renewed:
        execution_id = self._calls.checked(execution_id)
        ttl = check.positive_ms(lease_ttl_ms, "lease_ttl_ms")
        if isinstance(fence, Handle):
            check.handle(fence, "fence")
        args = (execution_id, proof(fence), ttl)
        reply = await self._calls.fcall("ff_renew", execution_id.tag, args, op="renew")
        with decoding(reply, "ff_renew", "renew", execution_id):
            (answer,) = reply[2]
            outcome = _renewal(answer, execution_id, fence)
            self._keep_slots([(execution_id, answer)])
        if isinstance(outcome, EngineError):
            raise outcome
        return outcome

    async def renew_many(self, handles: Sequence[Handle]) -> list[leases.Renewed | EngineError]:
        handles = check.listed(handles, "handles")
        outcomes: list[leases.Renewed | EngineError | None] = [None] * len(handles)
        batches: dict[str, list[int]] = {}
        for position, handle in enumerate(handles):
            try:
                proof(check.handle(handle, "handles"))
                check.positive_ms(handle.lease_ttl_ms, "lease_ttl_ms")
            except EngineError as error:
                outcomes[position] = error
            else:
                batches.setdefault(handle.execution_id.tag, []).append(position)

        async def renew(tag: str, positions: list[int]) -> None:
            for part in chunks(positions, _RENEW_BATCH):
                args: list[Any] = []
                for position in part:
                    handle = handles[position]
                    args += (handle.execution_id, handle.wire, handle.lease_ttl_ms)
                reply = await self._calls.fcall("ff_renew", tag, args, op="renew_many")
                with decoding(reply, "ff_renew", "renew_many"):
                    for position, answer in zip(part, reply[2], strict=True):
                        handle = handles[position]
                        outcomes[position] = _renewal(answer, handle.execution_id, handle)
                    answered = (handles[position].execution_id for position in part)
                    self._keep_slots(zip(answered, reply[2], strict=True))

        for tag, fault in (await self._calls.by_partition(batches, renew)).items():
            for position in batches[tag]:
                outcomes[position] = outcomes[position] or fault
        return outcomes  # pyright: ignore[reportReturnType]

    def _keep_slots(self, answers: Iterable[tuple[ExecutionId, Any]]) -> None:
        """Confirm the quota slots of renewed runs, in case their claims failed to."""
        slots: dict[str, list[Slot]] = {}
        for execution_id, answer in answers:
            match answer:
                case [int(expires_at), bytes(policy), int(run)] if expires_at:
                    slots.setdefault(text(policy), []).append((execution_id, run))
                case _:
                    pass
        if slots and self.on_slots_renewed is not None:
            self.on_slots_renewed(slots)

    async def revoke_lease(
        self,
        execution_id: ExecutionId,
        *,
        expected_lease_id: str = "",
        reason: str = "operator",
        revoked_by: str = "operator",
    ) -> leases.RevokeOutcome:
        args = (
            check.text(expected_lease_id, "expected_lease_id"),
            check.reason(reason, "reason"),
            check.reason(revoked_by, "revoked_by"),
            # A repeat must not revoke the lease of a later holder.
            new_uuid(),
        )
        return await self._calls.ask_about(
            *(execution_id, "ff_revoke", args),
            lambda reply: (
                leases.AlreadySatisfied(text(reply[2]))
                if reply[1] == b"ALREADY_SATISFIED"
                else leases.Revoked(text(reply[2]), int(reply[3]))
            ),
            op="revoke_lease",
        )

    async def list_expired_leases(
        self,
        as_of: int | None = None,
        *,
        after: tuple[int, str] | None = None,
        limit: int = 1000,
        max_partitions_per_call: int = 32,
        namespace: str | None = None,
    ) -> ExpiredLeases:
        moment = (
            await self._calls.server_time_ms() if as_of is None else check.whole(as_of, "as_of", 0)
        )
        limit = min(check.whole(limit, "limit", 0), _MAX_PAGE)
        at_once = max(1, check.whole(max_partitions_per_call, "max_partitions_per_call", 0))
        start = None if after is None else _cursor(after)
        if namespace is not None:
            validate_namespace(namespace)
        if limit == 0:
            return ExpiredLeases(())
        damage = Damage("list_expired_leases")
        due = await self._due(moment, start, limit + 1, at_once, damage)
        found = await damage.keep_all(self._lease(*each, moment, namespace) for each in due[:limit])
        # A page is short if candidates were renewed or belong to other namespaces.
        last = due[limit - 1] if len(due) > limit else None
        return ExpiredLeases(tuple(filter(None, found)), last, tuple(damage.found))

    async def _due(
        self, moment: int, after: Due | None, count: int, at_once: int, damage: Damage
    ) -> list[Due]:
        """The first candidates for the page, in order; their records decide.

        Lanes list active executions by lease expiry, also those already offered for reclaim.
        """
        places = await self._places.lanes_by_partition()
        due: list[Due] = []
        for part in chunks(sorted(places), at_once):
            # Leases that expire after a full page are not on it.
            most = due[-1][0] if len(due) == count else moment
            names = [keys.lane(tag, lane, "active") for tag in part for lane in places[tag]]
            pages = await asyncio.gather(
                *(self._scores.page(name, after, count, damage, most) for name in names)
            )
            entries = {(int(max(score, 0)), each) for page in pages for score, each in page}
            entries.update(due)
            due = sorted(each for each in entries if after is None or each > after)[:count]
        return due

    async def _lease(
        self, expiry: int, execution_id: ExecutionId, moment: int, namespace: str | None
    ) -> ExpiredLease | None:
        """The lease, unless it was renewed, released or replaced since the index was read."""
        record = await Record.read(self._calls, execution_id)
        lease = None if record is None else record.current_lease
        if record is None or lease is None or lease.expires_at != expiry:
            return None
        if lease.expires_at > moment or namespace not in (None, record.namespace):
            return None
        return ExpiredLease(
            execution_id=execution_id,
            lease_id=lease.lease_id,
            lease_epoch=lease.lease_epoch,
            worker_instance_id=lease.worker_instance_id,
            expires_at_ms=lease.expires_at,
            attempt_index=lease.attempt_index,
        )


def _renewal(
    answer: Any, execution_id: ExecutionId, holder: Handle | leases.Fence
) -> leases.Renewed | EngineError:
    match answer:
        case int(expires_at) | [int(expires_at), bytes(), int()] if expires_at:
            return leases.Renewed(expires_at, holder.lease_epoch or 0)
        case _:
            pass
    return refused(answer, "ff_renew", "renew", execution_id)


def _cursor(after: Any) -> Due:
    try:
        expiry, execution_id = after
        return check.whole(expiry, "after", 0), ExecutionId.parse(execution_id)
    except (TypeError, ValueError, EngineError) as error:
        problem = "after: must be the cursor of an earlier page"
        raise ValidationError("invalid_cursor", problem) from error
