"""Two servers on one deployment, one of them killed; and a server that stops under load."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

from tests.server.conftest import running
from tests.server.test_events import Source, follow
from tests.support.command import Cli
from tests.support.engine import Engine
from tests.support.http import Http, Response
from tests.support.sdk import until
from tests.support.streams import append

LEAST = {"namespace": "default", "execution_kind": "resize"}
PATH = "/v1/executions"
LOST = (OSError, EOFError)
"""What a client sees of a server that is gone: nobody there, or half an answer."""
CLIENTS, EACH = 6, 20


class Anywhere:
    """A client that repeats a lost request at the next server, under the same keys."""

    def __init__(self, *servers: Http) -> None:
        self._servers = list(servers)

    async def post(self, path: str, body: Any) -> Response:
        for server in self._servers * 5:
            try:
                return await server.post(path, body)
            except LOST:
                continue
        raise AssertionError("no server answers")


async def follow_completions(servers: list[Http], found: dict[str, str], wanted: int) -> None:
    """Collect the ends of executions; go on at the next server after the last event."""
    last = ""
    for server in servers * 5:
        try:
            async with follow(
                server, "/v1/events?families=completion", last_event_id=last
            ) as source:
                while (event := await source.next()) is not None:
                    last = event.id
                    found[event.data["event_id"]] = event.data["execution_id"]
                    if len(found) == wanted:
                        return
        except LOST:
            continue
    raise AssertionError(f"only {len(found)} of {wanted} events arrived")


async def test_a_killed_replica_loses_nothing(cli: Cli, engine: Engine) -> None:
    fast = {"FF_DELAYED_PROMOTER_INTERVAL_MS": "100"}
    ended: dict[str, str] = {}
    async with running(cli, **fast) as (first, one), running(cli, **fast) as (_, two):
        clients = Anywhere(one, two)
        following = asyncio.create_task(follow_completions([one, two], ended, CLIENTS * EACH + 1))
        await until(lambda: engine_is_followed(engine), "a follower")
        warm = (await one.post(PATH, LEAST)).json["Created"]["execution_id"]
        await one.post(f"{PATH}/{warm}/cancel", {"execution_id": warm, "reason": "x"})
        # Without an event, a follower has no position to resume from.
        await until(lambda: bool(ended), "the first event")

        async def submit_and_cancel(client: int) -> list[str]:
            made: list[str] = []
            for n in range(EACH):
                key = f"{client}-{n}"
                body = LEAST | {"idempotency_key": key}
                answer = await clients.post(PATH, body)
                (outcome,) = answer.json.values()
                made.append(outcome["execution_id"])
                cancel = {"execution_id": made[-1], "reason": "done"}
                answer = await clients.post(f"{PATH}/{made[-1]}/cancel", cancel)
                assert answer.status == 200, answer.body
            return made

        load = [asyncio.create_task(submit_and_cancel(client)) for client in range(CLIENTS)]
        await until(lambda: len(ended) > CLIENTS, "load")
        later = await engine.now() + 300
        delayed = (await one.post(PATH, LEAST | {"delay_until": later})).json["Created"]
        first.process.kill()
        made = [each for batch in await asyncio.gather(*load) for each in batch]
        await following
        assert len(set(made)) == CLIENTS * EACH
        assert set(ended.values()) == {warm, *made}
        rows = (await two.get(f"{PATH}?limit=1000")).json["executions"]
        assert {row["execution_id"] for row in rows} == {
            *(warm, delayed["execution_id"]),
            *made,
        }

        async def is_promoted() -> bool:
            state = await two.get(f"{PATH}/{delayed['execution_id']}/state")
            return state.json == "waiting"

        await until(is_promoted, "a scanner of the replica that is left")
        assert (await two.get("/readyz")).json == {"status": "ready"}


async def engine_is_followed(engine: Engine) -> bool:
    clients: Any = await engine.backend.transport.call("CLIENT", "LIST")
    return b"cmd=xread" in clients


async def test_a_server_that_stops_under_load_answers_everything(cli: Cli, engine: Engine) -> None:
    handle, waiting = await engine.running(), await engine.create()
    await append(engine, handle, "frame")
    created: list[str] = []
    async with running(cli) as (server, http):
        frames = f"{PATH}/{handle.execution_id}/attempts/0/stream"
        after = (await http.get(frames)).json["next_cursor"]
        blocked = [
            asyncio.create_task(http.get(f"{frames}/tail?after={after}&block_ms=30000")),
            asyncio.create_task(http.get(f"{PATH}/{waiting}/state?wait_ms=30000")),
        ]
        streams = [http.open("GET", f"{PATH}/{waiting}/events") for _ in range(20)]
        sources = [Source((await stream.__aenter__())[0]) for stream in streams]
        for source in sources:
            assert (await source.block() or b"").startswith(b"event: state")
        load = [asyncio.create_task(submit_until_gone(http, created)) for _ in range(8)]
        await until(lambda: len(created) > 50, "load")
        server.send(signal.SIGTERM)
        began = time.monotonic()
        tail, state = await asyncio.gather(*blocked)
        assert (tail.status, tail.json["frames"]) == (200, [])
        assert (state.status, state.json) == (200, "waiting")
        # No stream has an `end`: clients resume elsewhere.
        rest = [event for source in sources for event in await source.rest()]
        assert [event.name for event in rest if event.name == "end"] == []
        await asyncio.gather(*load)
        done = await server.end()
        assert done.code == 0, done.out
        assert time.monotonic() - began < 15
        for stream in streams:
            await stream.__aexit__(None, None, None)
    listed = await engine.backend.listings.list_executions(limit=1000)
    stored = {row.execution_id for row in listed.executions}
    assert stored == {handle.execution_id, waiting, *created}
    assert "shutdown timed out" not in done.out


async def submit_until_gone(http: Http, created: list[str]) -> None:
    while True:
        try:
            answer = await http.post(PATH, LEAST)
        except LOST:
            return
        if answer.status != 201:
            assert answer.status == 503, answer.body
            return
        created.append(answer.json["Created"]["execution_id"])
