"""Replies that this version cannot read are one typed, terminal error (02 §1)."""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from flowfabric.core.conditions import Single
from flowfabric.core.contracts.executions import Completed, Impossible, NewExecution
from flowfabric.core.contracts.streams import Frame
from flowfabric.core.contracts.suspension import Suspended
from flowfabric.core.errors import ErrorClass, ReplyError, UnknownCodeError
from flowfabric.core.ids import ExecutionId, WaitpointToken
from flowfabric.engine.api.executions import Completion
from flowfabric.engine.api.upkeep import Index
from flowfabric.engine.valkey import keys, library
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.valkey.link import READ_FUNCTIONS
from tests.support.engine import TTL, Engine
from tests.support.leases import OTHER, WORKER, grant, lapsed, reclaim_grant, running
from tests.support.suspension import SECRET
from tests.valkey.mutation import mutated, private_engine, private_server

__all__ = ["private_engine", "private_server"]

pytestmark = pytest.mark.corrupts

CONDITION = Single("k")
KNOWN: Any = {"worker_id": "w", "worker_instance_id": "w-1", "lanes": ["default"]}
ENVELOPE = ("lib/55_reply.lua", "return { 1, status(), ... }")


@pytest.fixture
async def garbled(private_engine: Engine) -> AsyncIterator[Engine]:
    """An engine whose library may be replaced; the real one is put back."""
    yield private_engine
    await load(private_engine, library._assemble(cluster=False, events_maxlen=10_000))


async def load(engine: Engine, code: str) -> None:
    await engine.backend.transport.call("FUNCTION", "LOAD", "REPLACE", code)


HELD = (
    *("complete", "fail", "delay", "release_unknown", "wait_children", "renew", "revoke"),
    *("create waitpoint", "append", "summary", "read steps", "record step"),
)


async def situation(engine: Engine) -> dict[str, Any]:
    """What each call below needs of its own, made while the library still answers."""
    await engine.backend.secrets.seed_at_boot(SECRET)
    await engine.backend.workers.register_worker(**KNOWN)
    given: dict[str, Any] = {
        "cancel": await engine.create(lane="other"),
        "priority": await engine.create(lane="other"),
        "tags": await engine.create(lane="other"),
        "grant": await engine.create(lane="other"),
        "fused claim": await engine.create(lane="other"),
        "reclaim grant": (await lapsed(engine)).execution_id,
        "reclaim": await reclaim_grant(engine, (await lapsed(engine)).execution_id),
        "claim": await grant(engine, await engine.create(lane="other")),
    }
    given |= {name: await running(engine) for name in HELD}
    parked = await running(engine)
    await engine.backend.suspensions.suspend(parked, condition=CONDITION)
    given |= dict.fromkeys(("resume", "read waits", "read stream"), parked)
    for name in ("token", "approve", "signal"):
        given[name] = await engine.backend.suspensions.suspend(
            await running(engine), condition=CONDITION
        )
    return given


Call = Callable[[ValkeyBackend, Any], Awaitable[Any]]

# The function behind each call. What is given is an id, or something that has one.
CALLS: dict[str, tuple[str, Call]] = {
    "complete": ("ff_complete", lambda b, held: b.executions.complete(held)),
    "fail": ("ff_fail", lambda b, held: b.executions.fail(held, "", "")),
    "cancel": ("ff_cancel", lambda b, eid: b.executions.cancel_execution(eid)),
    "delay": ("ff_delay", lambda b, held: b.executions.delay(held, 1)),
    "release_unknown": (
        "ff_release_unknown",
        lambda b, held: b.executions.release_unknown(held, "job"),
    ),
    "wait_children": ("ff_wait_children", lambda b, held: b.executions.wait_children(held)),
    "priority": ("ff_change_priority", lambda b, eid: b.executions.change_priority(eid, 1)),
    "tags": ("ff_set_tags", lambda b, eid: b.executions.set_execution_tag(eid, "a.b", "c")),
    "renew": ("ff_renew", lambda b, held: b.leases.renew(held)),
    "create waitpoint": (
        "ff_create_waitpoint",
        lambda b, held: b.waitpoints.create_waitpoint(held, "k", 1000),
    ),
    "resume": ("ff_resume", lambda b, held: b.suspensions.resume_execution(held.execution_id)),
    "revoke": ("ff_revoke", lambda b, held: b.leases.revoke_lease(held.execution_id)),
    "grant": ("ff_issue_claim_grant", lambda b, eid: b.claims.issue_claim_grant(eid, **WORKER)),
    "reclaim grant": (
        "ff_issue_reclaim_grant",
        lambda b, eid: b.claims.issue_reclaim_grant(eid, **OTHER),
    ),
    "claim": (
        "ff_claim_execution",
        lambda b, held: b.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL),
    ),
    "fused claim": (
        "ff_grant_and_claim",
        lambda b, eid: b.claims.issue_grant_and_claim(eid, lease_duration_ms=TTL),
    ),
    "reclaim": (
        "ff_reclaim",
        lambda b, held: b.claims.reclaim_execution(held, **OTHER, lease_ttl_ms=TTL),
    ),
    "signal": (
        "ff_signal",
        lambda b, held: b.signals.deliver_signal(*wait(held), token(held), "k"),
    ),
    "approve": ("ff_signal", lambda b, held: b.signals.deliver_approval_signal(*wait(held), "k")),
    "token": ("ff_waitpoint_token", lambda b, held: b.signals.read_waitpoint_token(*wait(held))),
    "read waits": ("ff_read_waits", lambda b, held: b.waitpoints.read_waits(held.execution_id)),
    "read steps": ("ff_read_steps", lambda b, held: b.steps.read_steps(held.execution_id)),
    "record step": (
        "ff_record_step",
        lambda b, held: b.steps.record_step(held.execution_id, held, "s"),
    ),
    "append": ("ff_append", lambda b, held: b.streams.append_frame(held, Frame(payload=b"x"))),
    "summary": (
        "ff_append",
        lambda b, held: b.streams.append_frame(held, Frame(payload=b"{}"), mode="summary"),
    ),
    "read stream": ("ff_stream_read", lambda b, held: b.streams.read_stream(held.execution_id, 0)),
}


async def _purge(backend: ValkeyBackend) -> int:
    backlog = keys.index("{fp:0}", "purge_backlog")
    await backend.transport.call("HSET", backlog, "x", "0")
    try:
        return await backend.upkeep.purge("{fp:0}")
    finally:
        await backend.transport.call("DEL", backlog)


# About no single execution.
OTHERS: dict[str, tuple[str, Callable[[ValkeyBackend], Awaitable[Any]]]] = {
    "list suspended": ("ff_list_suspended", lambda b: b.suspensions.list_suspended()),
    "register": ("ff_worker_register", lambda b: b.workers.register_worker(**KNOWN)),
    "heartbeat": ("ff_worker_heartbeat", lambda b: b.workers.heartbeat_worker("w-1")),
    "dead": ("ff_worker_dead", lambda b: b.workers.mark_worker_dead("w-1")),
    "seed": ("ff_seed_secret", lambda b: b.secrets.seed_at_boot(SECRET)),
    "rotate": (
        "ff_rotate_secret",
        lambda b: b.secrets.rotate_waitpoint_hmac_secret(0, "k2", SECRET),
    ),
    "kids": ("ff_list_kids", lambda b: b.secrets.list_waitpoint_hmac_kids()),
    "due": ("ff_scan_due", lambda b: b.upkeep.scan_due([Index("{fp:0}", "lease_expiry")], 1)),
    "time": ("ff_scan_due", lambda b: b.meta.server_time_ms()),
    "purge": ("ff_purge", _purge),
    "ring": ("ff_ring_waiting", lambda b: b.wakeups.ring_waiting({"{fp:0}": ["default"]})),
}
# What answers one word per item takes any word.
SCANNED: dict[str, tuple[str, Callable[[ValkeyBackend], Awaitable[Any]]]] = {
    "mark": ("ff_mark_expired", lambda b: b.upkeep.mark_lease_expired_if_due("{fp:0}", [])),
    "suspension": (
        "ff_expire_suspension",
        lambda b: b.suspensions.expire_suspension("{fp:0}", ["x"]),
    ),
}


def wait(outcome: Suspended) -> tuple[ExecutionId, str]:
    return outcome.handle.execution_id, outcome.details.waitpoint_id


def token(outcome: Suspended) -> WaitpointToken:
    return outcome.details.waitpoint_token


def subject(given: Any) -> str:
    given = given.handle if isinstance(given, Suspended) else given
    return getattr(given, "execution_id", given)


MALFORMED = [
    "'text'",
    "7",
    "{}",
    "{ 1 }",
    "{ 2, 'OK', ... }",
    "{ 1, 'FINE', ... }",
    "{ 1, { 'OK' }, ... }",
    "{ 'OK', ... }",
    "{ 1, 'OK' }",
    "{ 1, 'OK', { 'odd one' }, { 'odd one' } }",
    "{ 0 }",
    "{ 0, 7 }",
]


@pytest.mark.parametrize("answer", MALFORMED)
async def test_a_malformed_reply(garbled: Engine, answer: str) -> None:
    given = await situation(garbled)
    await load(garbled, mutated(*ENVELOPE, f"return {answer}"))
    for name, (function, call) in CALLS.items():
        with pytest.raises(ReplyError) as caught:
            await call(garbled.backend, given[name])
        error = caught.value
        assert (error.error_class, error.retryable) == (ErrorClass.TERMINAL, False), name
        assert error.ambiguous == (function not in READ_FUNCTIONS), name
        assert (error.function, error.execution_id) == (function, subject(given[name])), name
        assert function in str(error)
        assert ExecutionId(subject(given[name])).compact in str(error)
        assert_nothing_quoted(error)
    for name, (function, ask) in {**OTHERS, **({} if "odd" in answer else SCANNED)}.items():
        with pytest.raises(ReplyError) as caught:
            await ask(garbled.backend)
        changes = function not in READ_FUNCTIONS
        assert (caught.value.function, caught.value.ambiguous) == (function, changes), name
        assert_nothing_quoted(caught.value)


def assert_nothing_quoted(error: ReplyError) -> None:
    """A reply may carry a token or a payload."""
    shown = "".join(traceback.format_exception(error))
    assert "odd one" not in shown
    assert "FINE" not in shown


@pytest.mark.parametrize("answer", MALFORMED)
async def test_a_malformed_reply_to_a_worker(garbled: Engine, answer: str) -> None:
    held, backend = await running(garbled), garbled.backend
    await load(garbled, mutated(*ENVELOPE, f"return {answer}"))
    want, tag = garbled.want(), held.execution_id.tag
    with pytest.raises(ReplyError, match="ff_claim_many"):
        await backend.claims.claim_many(want, tag, 1)
    with pytest.raises(ReplyError, match=r"ff_complete|ff_claim_many"):
        await backend.claims.complete_and_claim(tag, [Completion(held, None)], want, 1)


async def test_an_unknown_code(garbled: Engine) -> None:
    given = await situation(garbled)
    await load(garbled, mutated(*ENVELOPE, "return { 0, 'brand_new', 'a', 'b' }"))
    for name, (function, call) in CALLS.items():
        with pytest.raises(UnknownCodeError) as caught:
            await call(garbled.backend, given[name])
        error = caught.value
        assert isinstance(error, ReplyError)
        assert (error.unknown_code, error.ambiguous) == ("brand_new", False), name
        assert (error.error_class, error.function) == (ErrorClass.TERMINAL, function), name
        assert error.execution_id == subject(given[name]), name


COMPLETE = (
    "functions/ff_complete.lua",
    "return reply.ok(replies, cascade.told(c))",
)
RENEW = ("functions/ff_renew.lua", "  return reply.ok(replies)")
CREATE = ("functions/ff_create.lua", "  return reply.ok(replies, cascade.told(c))")
ODD_ITEMS = ["'odd'", "{ 7 }", "{ 0 }", "{ 1, 'DUPLICATE' }", "{ 2, 'x' }"]


@pytest.mark.parametrize("item", [*ODD_ITEMS, "{ 0, 'brand_new' }"])
async def test_one_item_of_a_batch(garbled: Engine, item: str) -> None:
    backend, handle = garbled.backend, await garbled.running()
    for where, call in (
        (COMPLETE, lambda: backend.executions.complete_many([Completion(handle)])),
        (RENEW, lambda: backend.leases.renew_many([handle])),
        (CREATE, lambda: backend.executions.create_many([_new(garbled)])),
    ):
        await load(garbled, mutated(*where, f"do return reply.ok({{ {item} }}) end"))
        (outcome,) = await call()
        assert isinstance(outcome, ReplyError), (where, outcome)
        assert outcome.function == where[0].removeprefix("functions/").removesuffix(".lua")
        assert outcome.execution_id.startswith("{fp:")


async def test_too_few_items(garbled: Engine) -> None:
    backend, handle = garbled.backend, await garbled.running()
    for where, call in (
        (COMPLETE, lambda: backend.executions.complete_many([Completion(handle)])),
        (COMPLETE, lambda: backend.executions.complete(handle)),
        (RENEW, lambda: backend.leases.renew_many([handle])),
        (RENEW, lambda: backend.leases.renew(handle)),
        (CREATE, lambda: backend.executions.create_many([_new(garbled)])),
    ):
        await load(garbled, mutated(*where, "do return reply.ok({}) end"))
        with pytest.raises(ReplyError):
            await call()


@pytest.mark.parametrize(
    ("field", "odd"),
    [
        ("id, MODE_LETTERS[mode]", "id, 'q'"),
        ("rec.execution_kind, rec.lease, rec.attempt,", "rec.execution_kind, 5, rec.attempt,"),
        ("tonumber(rec.lease_expires_at), optional", "'soon', optional"),
    ],
)
async def test_an_odd_claim(garbled: Engine, field: str, odd: str) -> None:
    execution_id = await garbled.create()
    await load(garbled, mutated("lib/92_claiming.lua", field, odd))
    with pytest.raises(ReplyError) as caught:
        await garbled.claim_all()
    assert (caught.value.function, caught.value.execution_id) == ("ff_claim_many", execution_id)


async def test_a_longer_reply_is_read(garbled: Engine) -> None:
    """A newer library may tell more: older callers read what they know."""
    given = await situation(garbled)
    longer = "local told = { 1, 'OK', ... } told[select('#', ...) + 3] = 'later' return told"
    await load(garbled, mutated(*ENVELOPE, longer))
    for name, (_, call) in CALLS.items():
        await call(garbled.backend, given[name])
    await garbled.create()
    assert len(await garbled.claim_all()) > 0


@pytest.mark.parametrize(
    ("part", "instead"),
    [
        ("rec.last_transition_at or rec.created_at,", "rec.created_at, 'later',"),
        (
            "suspension.cause(c, id, rec) or false,",
            "suspension.cause(c, id, rec) or false, 'later',",
        ),
        ("    mode == 'resumed' and suspension.cause(c, id, rec) or false,\n", ""),
    ],
    ids=["longer row", "more optional parts", "fewer optional parts"],
)
async def test_claim_rows_are_open(garbled: Engine, part: str, instead: str) -> None:
    execution_id = await garbled.create(tags={"app.a": "b"}, namespace="other")
    await load(garbled, mutated("lib/92_claiming.lua", part, instead))
    (claim,) = await garbled.claim_all()
    assert (claim.execution_id, claim.tags) == (execution_id, {"app.a": "b"})
    assert (claim.namespace, claim.resume_cause) == ("other", None)


async def test_a_completion_may_tell_more(garbled: Engine) -> None:
    where = (
        "functions/ff_complete.lua",
        "operator.remember(c, id, rec, request, 'completed')\n  return 'completed'",
    )
    first, second = await running(garbled), await running(garbled)
    more = where[1].replace("return 'completed'", "return { 1, 'completed', 7 }")
    await load(garbled, mutated(*where, more))
    await garbled.backend.executions.complete(first)
    assert await garbled.backend.executions.complete_many([Completion(second)]) == [
        Completed(second.execution_id)
    ]


async def test_an_odd_claim_among_others(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    ids = [await engine.create(payload_encoding="json") for _ in range(3)]
    core = keys.core(ids[1].tag, ids[1])
    await engine.backend.transport.call("HSET", core, "payload_encoding", b"\xff")
    claims = await engine.claim_all()
    assert {claim.execution_id for claim in claims} == {ids[0], ids[2]}
    (record,) = [r for r in caplog.records if r.__dict__.get("action") == "claim_unreadable"]
    assert record.__dict__["execution_id"] == ids[1]


async def test_an_odd_suspension(garbled: Engine) -> None:
    await garbled.backend.secrets.seed_at_boot(SECRET)
    where = ("functions/ff_suspend.lua", "details('suspended', rec")
    for odd in ("details('odd', rec", "reply.ok('suspended') or details('suspended', rec"):
        handle = await running(garbled)
        await load(garbled, mutated(*where, odd))
        with pytest.raises(ReplyError) as caught:
            await garbled.backend.suspensions.suspend(handle, condition=CONDITION)
        assert (caught.value.function, caught.value.execution_id) == (
            "ff_suspend",
            handle.execution_id,
        )


async def test_dependencies_that_can_never_be_met(garbled: Engine) -> None:
    """The third answer of waiting on children (02 §7); a library with groups of edges gives it."""
    handle, upstream = await running(garbled), garbled.new_id()
    answer = "reply.ok(answer, more)\n  end, flags)"
    ready = ("lib/93_pausing.lua", answer)
    impossible = f"'impossible', {{ '{upstream}' }}"
    await load(garbled, mutated(*ready, answer.replace("answer, more", impossible)))
    assert await garbled.backend.executions.wait_children(handle) == Impossible((upstream,))
    for odd in ("'impossible'", "'impossible', 5", f"'unlikely', {{ '{upstream}' }}"):
        await load(garbled, mutated(*ready, answer.replace("answer, more", odd)))
        with pytest.raises(ReplyError, match="ff_wait_children"):
            await garbled.backend.executions.wait_children(handle)


def _new(engine: Engine) -> NewExecution:
    return NewExecution(execution_id=engine.new_id(), execution_kind="job")
