"""A server is killed while it claims for a worker elsewhere: a repeat at another gets the same."""

from __future__ import annotations

import asyncio
import signal
import sys
from base64 import b64decode
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.engine.valkey import keys
from flowfabric.server.remote_turns import RemoteTurns
from tests.server.test_remote import CLAIM, COMPLETE, ME, claimed, state
from tests.support.admission import limited, quota
from tests.support.engine import Engine
from tests.support.http import Http
from tests.support.sdk import until
from tests.support.server import TestServer

LOST = (OSError, EOFError)
WANT: dict[str, Any] = ME | {"max": 8, "lanes": ["default", "other"]}


@asynccontextmanager
async def dying(valkey: TestServer, *point: str) -> AsyncGenerator[Http]:
    """A server process that is killed at this point, which must come."""
    command = (sys.executable, "-m", "tests.support.dying_server", valkey.url, *point)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield Http(("127.0.0.1", int(await process.stdout.readline())))
        assert await asyncio.wait_for(process.wait(), 20) == -signal.SIGKILL
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def lost(answer: Awaitable[Any]) -> None:
    with pytest.raises(LOST):
        await answer


async def leases(engine: Engine) -> dict[str, str]:
    """The leases of the worker: the execution of each."""
    page = await engine.backend.workers.list_worker_leases("w-1")
    return {each.lease_id: each.execution_id for each in page.entries}


def by_handle(claim: dict[str, Any]) -> str:
    return claim["handle"]


async def run_once(engine: Engine, http: Http, claims: list[dict[str, Any]]) -> None:
    """The worker holds what it was told of and no more, and each runs and ends once."""
    handles = [Handle.decode(b64decode(claim["handle"])) for claim in claims]
    assert await leases(engine) == {each.lease_id: each.execution_id for each in handles}
    items = [{"handle": claim["handle"]} for claim in claims]
    rows = (await http.post(COMPLETE, {"items": items})).json["results"]
    assert {row["status"] for row in rows} == {200}
    for each in handles:
        assert await engine.backend.reads.read_total_attempt_count(each.execution_id) == 1


@pytest.mark.parametrize(
    ("point", "made"),
    [
        (("notes.claim_note", "before", "1"), 0),
        (("notes.claim_note", "after", "1"), 0),
        (("claims.claim_many", "before", "1"), 0),
        (("claims.claim_many", "after", "1"), 2),
        (("claims.claim_many", "after", "2"), 4),
    ],
)
async def test_a_claim(
    http: Http, engine: Engine, valkey: TestServer, point: tuple[str, ...], made: int
) -> None:
    for lane in ("default", "other", "default", "other"):
        await engine.create(lane=lane)
    ask = WANT | {"request_id": new_uuid()}
    async with dying(valkey, *point) as killed:
        await lost(killed.post(CLAIM, ask))
    held = await leases(engine)
    assert len(held) == made
    claims = await claimed(http, **ask)
    assert len(claims) == (made or 4)
    if made:
        assert await leases(engine) == held
    for repeat in (ask, ask | {"max": 0}):
        # Calls of the same millisecond have no order.
        again = sorted(await claimed(http, **repeat), key=by_handle)
        assert again == sorted(claims, key=by_handle)
    await run_once(engine, http, claims)


async def test_what_needed_admission(http: Http, engine: Engine, valkey: TestServer) -> None:
    execution_id = await limited(engine, quota=await quota(engine, cap=1))
    ask = WANT | {"request_id": new_uuid()}
    async with dying(valkey, "claims.claim_admitted", "after", "1") as killed:
        await lost(killed.post(CLAIM, ask))
    claims = await claimed(http, **ask)
    assert [claim["execution_id"] for claim in claims] == [execution_id]
    await run_once(engine, http, claims)


async def test_a_long_poll(http: Http, engine: Engine, valkey: TestServer) -> None:
    ask = WANT | {"request_id": new_uuid()}
    async with dying(valkey, "claims.claim_many", "after", "1") as killed:
        poll = asyncio.ensure_future(killed.post(f"{CLAIM}?wait_ms=30000", ask))

        async def waits() -> bool:
            return (await engine.backend.meta.usage()).blocked == 1

        await until(waits, "a long poll")
        execution_id = await engine.create()
        await lost(poll)
    await engine.create(lane="other")
    claims = (await http.post(f"{CLAIM}?wait_ms=30000", ask)).json["claims"]
    assert [claim["execution_id"] for claim in claims] == [execution_id]
    await run_once(engine, http, claims)


@pytest.mark.parametrize(
    ("point", "completed"),
    [
        (("executions.complete_many", "before", "1"), False),
        (("executions.complete_many", "after", "1"), True),
        (("claims.claim_many", "after", "1"), True),
    ],
)
async def test_completing_and_claiming_the_next(
    http: Http, engine: Engine, valkey: TestServer, point: tuple[str, ...], completed: bool
) -> None:
    first, *_ = [await engine.create(priority=9 - number) for number in range(3)]
    (claim,) = await claimed(http)
    assert claim["execution_id"] == first
    ask = ME | {"max": 1, "request_id": new_uuid()}
    body = {"items": [{"handle": claim["handle"], "result_b64": "eA=="}], "claim": ask}
    async with dying(valkey, *point) as killed:
        await lost(killed.post(COMPLETE, body))
    assert await state(engine, first) == ("completed" if completed else "active")
    held = await leases(engine)
    answers = [(await http.post(COMPLETE, body)).json for _ in range(2)]
    for answer in answers:
        assert answer["results"][0]["status"] == 200
    (following,) = answers[0]["claims"]
    assert answers[1]["claims"] == [following]
    if completed and held:
        assert set(held.values()) == {following["execution_id"]}
    assert await engine.backend.reads.get_execution_result(first) == b"x"
    await run_once(engine, http, [following])


@pytest.mark.parametrize("when", ["before", "after"])
async def test_claims_of_a_disconnected_client_are_released(
    http: Http, engine: Engine, valkey: TestServer, when: str
) -> None:
    """The repeat does what the killed server began."""
    ids = [await engine.create() for _ in range(2)]
    ask = WANT | {"request_id": new_uuid()}
    async with dying(valkey, "notes.claim_note", when, "2", "hold") as killed:
        poll = asyncio.ensure_future(killed.post(CLAIM, ask))

        async def holds() -> bool:
            return len(await leases(engine)) == 2

        await until(holds, "two leases")
        held = await leases(engine)
        poll.cancel()
    claims = await claimed(http, **ask)
    assert {claim["execution_id"] for claim in claims} == set(ids)
    if when == "before":
        assert await leases(engine) == held
    else:
        assert {claim["kind"] for claim in claims} == {"resumed"}
    await run_once(engine, http, claims)


async def test_a_repeat_and_a_server_that_gives_back_do_not_both_succeed(engine: Engine) -> None:
    ids: list[ExecutionId] = [await engine.create(), await engine.create()]
    turns, request = RemoteTurns(engine.backend), engine.want()
    requests = {request.lane_id: request}

    async def claim(name: str) -> tuple[Any, list[Any]]:
        turn, none = await turns.take(name, 30_000, requests)
        assert none == []
        (tag,) = {each.tag for each in ids}
        found = await engine.backend.claims.claim_many(
            request, tag, 1, request_id=turn.new_request_id()
        )
        return turn, found.claims

    first, made = await claim("one")
    second, again = await turns.take("one", 30_000, requests)
    assert [each.handle for each in again] == [each.handle for each in made]
    await turns.release(first, made)
    assert await state(engine, made[0].execution_id) == "active"
    await turns.release(second, again)
    assert await state(engine, made[0].execution_id) == "waiting"
    # Nothing is left of it, so a further repeat claims anew.
    third, made = await claim("one")
    assert third.seed == first.seed
    fourth, again = await turns.take("one", 30_000, requests)
    assert ([each.handle for each in again], fourth.number) == ([made[0].handle], 4)
    await engine.backend.notes.extend_note("one", 1_000)
    await engine.backend.notes.extend_note(first.note(1), 1_000)
    await turns.take("one", 30_000, requests)
    for note in ("one", first.note(1)):
        left: Any = await engine.backend.transport.call("PTTL", keys.note(note))
        assert left > 1_000
    other, made = await claim("two")
    await turns.release(other, made)
    assert await turns.look("two", requests) == []
    assert await turns.look("three", requests) == []
