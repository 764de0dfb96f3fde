"""Waitpoints, which executions wait for, and the signals that answer them."""

import asyncio
import hmac
import logging
from typing import Any, Unpack

import msgspec

from flowfabric.core import conditions, ids
from flowfabric.core.contracts import suspension
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.suspension import PastWait, ResumeSignal
from flowfabric.core.errors import NotFoundError, ValidationError
from flowfabric.core.ids import ExecutionId, WaitpointToken
from flowfabric.core.stored import Stored, corrupt, stored_text
from flowfabric.core.text import lossless, shown
from flowfabric.engine.api import check
from flowfabric.engine.api.suspensions import MAX_KEY_BYTES
from flowfabric.engine.api.waitpoints import (
    BridgedSignal,
    CheckedSignal,
    LastWait,
    Signals,
    Waitpoints,
    revealed,
)
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls, proof, text
from flowfabric.engine.valkey.pages import Damage
from flowfabric.engine.valkey.record import question

_CLOSED = {
    (b"closed", b"pending"): "pending",
    (b"closed", b"active"): "active",
    (b"already_closed",): "closed",
}
"""The state of a waitpoint before it was closed, by answer."""
_pack = msgspec.msgpack.Encoder().encode
log = logging.getLogger(__name__)
_OPEN = frozenset({"pending", "active"})
_MAX_PAGE = 1000
_Current = tuple[conditions.Condition, dict[str, Any]]


class ValkeyWaitpoints(Waitpoints):
    """`Waitpoints` on Valkey."""

    def __init__(self, calls: FunctionCalls) -> None:
        self._calls = calls

    async def create_waitpoint(
        self,
        handle: Handle,
        waitpoint_key: str,
        expires_in_ms: int,
        *,
        prompt: str | None = None,
        details: Any = None,
    ) -> suspension.PendingWaitpoint:
        check.handle(handle)
        try:
            ids.validate_text(waitpoint_key, "waitpoint_key", limit=MAX_KEY_BYTES, required=True)
        except ValidationError as error:
            raise ValidationError("invalid_waitpoint_key", error.detail) from None
        expires = check.positive_ms(expires_in_ms, "expires_in_ms")
        asked = check.question(prompt, details)
        said = asked.get("prompt", ""), asked.get("details", "")
        return await self._calls.ask_about(
            *(handle.execution_id, "ff_create_waitpoint"),
            (proof(handle), ids.new_uuid(), waitpoint_key, expires, *said),
            lambda reply: suspension.PendingWaitpoint(
                text(reply[2]), text(reply[3]), WaitpointToken(text(reply[4]))
            ),
        )

    async def close_waitpoint(
        self,
        execution_id: ExecutionId,
        waitpoint_id: str,
        reason: str = "proactive_close",
        *,
        handle: Handle | None = None,
    ) -> bool:
        args = (
            ids.validate_uuid(waitpoint_id, "waitpoint_id"),
            ids.validate_text(reason, "reason", required=True),
            "" if handle is None else proof(check.handle(handle)),
        )
        before = await self._calls.ask_about(
            execution_id, "ff_close_waitpoint", args, lambda reply: _CLOSED[tuple(reply[2:])]
        )
        if before == "active":
            where = {"execution_id": ExecutionId(execution_id), "waitpoint_id": waitpoint_id}
            log.warning(
                "an active waitpoint was closed: no signal can end the pause there",
                extra={"action": "waitpoint_closed", **where},
            )
        return before != "closed"

    async def _stored(self, context: str, field: str, key: str) -> Stored | None:
        """A stored hash, or None when there is none."""
        raw = await self._calls.read(f"{context}: {field}", "HGETALL", key)
        return Stored.from_hash(context, raw) if raw else None

    async def list_pending_waitpoints(
        self, execution_id: ExecutionId, after: str = "", limit: int = 100
    ) -> suspension.OpenWaitpoints:
        execution_id = self._calls.checked(execution_id)
        check.text(after, "after")
        limit = max(1, min(check.whole(limit, "limit"), _MAX_PAGE))
        tag, core = execution_id.tag, keys.core(execution_id.tag, execution_id)
        if not await self._calls.transport.call("EXISTS", core, key=core):
            raise NotFoundError("execution_not_found", op="list_pending_waitpoints")
        damage = Damage("list_pending_waitpoints")
        # Waitpoints of earlier waits are closed, and may be thousands. A pending one may become
        # active meanwhile, but then the suspension, which is read later, names it.
        members, suspended = await asyncio.gather(
            self._calls.read(
                *(f"{execution_id}: pending waitpoints", "SMEMBERS"),
                keys.pending_waitpoints(tag, execution_id),
            ),
            self._suspended(execution_id, damage),
        )
        listed = {*map(lossless, members)}
        current = None
        if suspended is not None:
            active = damage.keep(lambda: suspended.text("waitpoints").split(","))
            listed.update(active or ())
            current = damage.keep(lambda: _current(suspended))
        found, more = await damage.first(
            limit,
            sorted(each for each in listed if each > after),
            lambda one: self._open(execution_id, one, current),
        )
        last = found[-1].waitpoint_id if more else None
        return suspension.OpenWaitpoints(tuple(found), last, tuple(damage.found))

    async def _suspended(self, execution_id: ExecutionId, damage: Damage) -> Stored | None:
        """The open suspension."""
        key = keys.suspension(execution_id.tag, execution_id)
        (stored,) = await damage.keep_all([self._stored(execution_id, "suspension", key)])
        return None if stored is None or stored.is_set("closed_at") else stored

    async def _open(
        self, execution_id: ExecutionId, identity: str, current: _Current | None
    ) -> suspension.OpenWaitpoint | None:
        """The row of an open waitpoint."""
        context = f"waitpoint {shown(identity)}"
        if not ids.is_uuid(identity):
            raise corrupt(
                execution_id, "waitpoints", "contains a member that is not a waitpoint id"
            )
        stored = await self._stored(context, "record", keys.waitpoint(execution_id.tag, identity))
        if stored is None:
            raise corrupt(context, "record", "is missing")
        if stored.text("state") not in _OPEN:
            return None
        token, key = WaitpointToken(stored.text("waitpoint_token")), stored.text("waitpoint_key")
        condition, asked = None, question(stored)
        if stored.text("state") == "active" and current is not None:
            condition, asked = current
        return suspension.OpenWaitpoint(
            waitpoint_id=identity,
            waitpoint_key=key,
            state=stored.text("state"),
            required_signal_names=() if condition is None else _names(condition, key),
            created_at=stored.number("created_at"),
            execution_id=execution_id,
            token_kid=token.kid,
            token_fingerprint=token.fingerprint,
            activated_at=stored.maybe_number("activated_at"),
            expires_at=stored.maybe_number("expires_at"),
            **asked,
        )

    async def read_last_wait(self, execution_id: ExecutionId) -> LastWait | None:
        eid = self._calls.checked(execution_id)
        stored = await self._stored(eid, "suspension", keys.suspension(eid.tag, eid))
        if stored is None:
            return None
        return LastWait(
            reason=stored.text("reason_code", ""),
            since=stored.number("created_at"),
            until=stored.maybe_number("timeout_at"),
            closed_at=stored.maybe_number("closed_at"),
            close_reason=stored.text("close_reason", ""),
            answers=await self._signals(eid, _ids(stored, "all_satisfier_signals")),
            **question(stored),
        )

    async def _signals(
        self, execution_id: ExecutionId, named: list[str], waitpoint_key: str | None = None
    ) -> list[ResumeSignal]:
        """The signals that still exist."""
        read = (self.read_signal(execution_id, each, waitpoint_key) for each in named)
        return [signal for signal in await asyncio.gather(*read) if signal is not None]

    async def observe_signals(self, handle: Handle) -> list[ResumeSignal]:
        proof(check.handle(handle))
        eid, epoch = handle.execution_id, handle.lease_epoch
        met, ended = await asyncio.gather(
            self._stored(eid, "met", keys.met(eid.tag, eid)),
            self._stored(eid, "suspension", keys.suspension(eid.tag, eid)),
        )
        if met is not None and met.number("epoch") == epoch:
            return await self._signals(eid, _ids(met, "signals"))
        if (
            ended is not None
            and ended.maybe_number("claimed_epoch") == epoch
            and ended.text("close_reason", "") == "resumed"
            and ended.number("attempt_index") == handle.attempt_index
        ):
            _ids(ended, "waitpoints")
            # Stored in the order of acceptance.
            return await self._signals(eid, _ids(ended, "all_satisfier_signals"))
        return []

    async def read_signal(
        self, execution_id: ExecutionId, signal_id: str, waitpoint_key: str | None = None
    ) -> ResumeSignal | None:
        execution_id = self._calls.checked(execution_id)
        check.text(signal_id, "signal_id")
        if waitpoint_key is not None:
            check.text(waitpoint_key, "waitpoint_key")
        context = f"signal {shown(signal_id)}"
        body = keys.signal_payload(execution_id, signal_id)
        stored, payload = await asyncio.gather(
            self._stored(context, "record", keys.signal(execution_id, signal_id)),
            self._calls.read(f"{context}: payload", "GET", body),
        )
        if stored is None:
            return None
        if waitpoint_key is None:
            target = stored.text("target_waitpoint_id")
            waitpoint = keys.waitpoint(execution_id.tag, target)
            place = f"waitpoint {target}", "waitpoint_key"
            found = await self._calls.read(": ".join(place), "HGET", waitpoint, "waitpoint_key")
            waitpoint_key = "" if found is None else stored_text(found, *place)
        return _resume_signal(signal_id, stored, payload, waitpoint_key)

    async def read_waits(self, execution_id: ExecutionId, *wanted: str) -> list[PastWait]:
        execution_id = self._calls.checked(execution_id)
        names, cursor = check.texts(wanted, "wanted"), "0"
        damage, asked = Damage("read_waits"), {name.encode() for name in names}
        found: dict[str, PastWait] = {}

        def past(identity: bytes, flat: list[bytes] | None, *signals: Any) -> PastWait | None:
            def read() -> PastWait:
                if flat is None or signals[0] is None:
                    which = f"waitpoint {shown(lossless(identity))}"
                    raise corrupt(execution_id, which, "has a key of the wrong type")
                return _past_wait(identity, flat, *signals)

            fields = flat or []
            key = dict(zip(fields[::2], fields[1::2], strict=False)).get(b"waitpoint_key")
            return read() if key in asked else damage.keep(read)

        while True:
            rows, cursor = await self._calls.ask(
                *("ff_read_waits", execution_id.tag, (execution_id, cursor, *names)),
                lambda reply: ([past(*row[:4]) for row in reply[2]], text(reply[3])),
                op="read_waits",
            )
            found |= {wait.waitpoint_id: wait for wait in rows if wait is not None}
            if cursor == "0":
                return list(found.values())

    async def read_wait_signals(
        self, execution_id: ExecutionId, wait: PastWait
    ) -> list[ResumeSignal]:
        execution_id = self._calls.checked(execution_id)
        check.instance(wait, PastWait, "wait")
        if wait.signals is not None:
            return check.listed(wait.signals, "signals")[:]
        named = check.texts(wait.signal_ids, "signal_ids")
        return await self._signals(execution_id, named, wait.waitpoint_key)


class ValkeySignals(Signals):
    """`Signals` on Valkey."""

    def __init__(self, calls: FunctionCalls) -> None:
        self._calls = calls

    async def _deliver(
        self, execution_id: ExecutionId, waitpoint_id: str, signal: CheckedSignal
    ) -> suspension.SignalOutcome:
        ids.validate_uuid(waitpoint_id, "waitpoint_id")
        if signal.token == "":
            raise ValidationError("missing_token", op="deliver_signal")
        identity = check.uuid(signal.signal_id, "signal_id")
        args = (
            waitpoint_id,
            identity,
            (signal.token or "").encode(errors="surrogatepass"),
            _pack(signal.options),
            "0" if signal.payload is None else "1",
            signal.payload or b"",
            "1" if signal.token is None else "0",
        )

        def outcome(reply: list[Any]) -> suspension.SignalOutcome:
            known, effect = text(reply[3]), reply[4]
            # We minted this id for this call, so our first reply was lost.
            if reply[2] == b"accepted" or (signal.signal_id is None and known == identity):
                return suspension.Accepted(known, text(effect))
            return suspension.DuplicateSignal(known)

        return await self._calls.ask_about(
            execution_id, "ff_signal", args, outcome, op="deliver_signal"
        )

    async def read_waitpoint_token(
        self, execution_id: ExecutionId, waitpoint_id: str
    ) -> WaitpointToken | None:
        args = (ids.validate_uuid(waitpoint_id, "waitpoint_id"),)
        return await self._calls.ask_about(
            *(execution_id, "ff_waitpoint_token", args),
            lambda reply: None if reply[2] is None else WaitpointToken(text(reply[2])),
            op="read_waitpoint_token",
        )

    async def verify_and_deliver(
        self,
        execution_id: ExecutionId,
        waitpoint_id: str,
        presented: WaitpointToken | str,
        signal_name: str,
        **options: Unpack[BridgedSignal],
    ) -> suspension.SignalOutcome:
        given = revealed(presented, "presented")
        # Not through `self`, because layers log every token read there as an operator's call.
        stored = await ValkeySignals.read_waitpoint_token(self, execution_id, waitpoint_id)
        if stored is None:
            raise NotFoundError("waitpoint_token_not_found", op="verify_and_deliver")
        if not hmac.compare_digest(stored.reveal().encode(), given.encode(errors="surrogatepass")):
            raise ValidationError("invalid_token", op="verify_and_deliver")
        return await self.deliver_signal(execution_id, waitpoint_id, given, signal_name, **options)


def _resume_signal(
    signal_id: str, stored: Stored, payload: bytes | None, waitpoint_key: str
) -> ResumeSignal:
    return ResumeSignal(
        signal_id=signal_id,
        signal_name=stored.text("signal_name"),
        signal_category=stored.text("signal_category", ""),
        source_type=stored.text("source_type", ""),
        source_identity=stored.text("source_identity", ""),
        correlation_id=stored.text("correlation_id", ""),
        accepted_at=stored.number("accepted_at"),
        payload=payload,
        payload_encoding=stored.text("payload_encoding", ""),
        waitpoint_key=waitpoint_key,
    )


def _past_wait(
    identity: bytes, flat: list[bytes], received: list[bytes], contents: list[Any] | None
) -> PastWait:
    stored = Stored.from_hash(f"waitpoint {shown(lossless(identity))}", flat)
    key, state = stored.text("waitpoint_key"), stored.text("state")
    signal_ids = tuple(stored_text(each, stored.context, "signals") for each in received)
    signals: tuple[ResumeSignal, ...] | None = None
    if contents is not None:
        signals = tuple(
            _resume_signal(each, Stored.from_hash(f"signal {each}", fields), payload, key)
            for each, (fields, payload) in zip(signal_ids, contents, strict=True)
            if fields
        )
    # A waitpoint without a wait has neither.
    used = stored.is_set("suspension_id") or stored.is_set("satisfied_at")
    return PastWait(
        waitpoint_id=stored_text(identity, stored.context, "waitpoint_id"),
        waitpoint_key=key,
        waitpoint_token=WaitpointToken(stored.text("waitpoint_token", "")),
        state=state,
        attempt_index=stored.number("attempt_index", 0),
        close_reason=stored.text("close_reason", ""),
        closed_at=stored.number("closed_at", 0),
        ended=state == "closed" and used,
        signal_ids=signal_ids,
        signals=signals,
    )


def _ids(stored: Stored, name: str) -> list[str]:
    """The ids of a comma-separated field."""
    found = [each for each in stored.text(name, "").split(",") if each]
    if not all(map(ids.is_uuid, found)):
        raise stored.corrupt(name, "contains something that is not an id")
    return found


def _current(stored: Stored) -> _Current:
    """The condition and the question of a suspension."""
    condition = stored.parsed("resume_condition_json", conditions.parse_condition)
    return condition, question(stored)


def _names(condition: conditions.Condition, key: str) -> tuple[str, ...]:
    """The signal names a waitpoint waits for; empty means any."""
    match condition:
        case conditions.OperatorOnly():
            return ("__operator_only__",)
        case conditions.TimeoutOnly():
            return ("__timeout_only__",)
        case conditions.Single():
            return conditions.named(condition.signal_name) if condition.waitpoint_key == key else ()
        case conditions.Count():
            return conditions.named(condition.signal_name) if key in condition.waitpoints else ()
        case conditions.AllOf():
            found = (name for member in condition.members for name in _names(member, key))
            return tuple(dict.fromkeys(found))
