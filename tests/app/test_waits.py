"""Handlers that wait for an answer: they give their worker back and start again."""

from __future__ import annotations

import json
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.core.conditions import TimeoutOnly
from flowfabric.core.contracts.suspension import Accepted
from flowfabric.core.errors import ValidationError
from flowfabric.core.ids import WaitpointToken
from flowfabric.engine.valkey import keys
from flowfabric.testing import TestFabric
from tests.support.engine import Engine
from tests.support.waiting import parked


@pytest.fixture
def app(waiting_app: ff.Fabric) -> ff.Fabric:
    return waiting_app


async def test_an_answer_starts_the_handler_again_and_is_returned(
    app: ff.Fabric, engine: Engine
) -> None:
    starts: list[tuple[int, int]] = []

    @app.task()
    async def deploy(ctx: ff.Context, what: str) -> list[Any]:
        starts.append((ctx.attempt, ctx.lease_epoch))
        signal = await ctx.wait_for("approval")
        return [what, signal.name, signal.payload, signal.source_identity, signal.waitpoint]

    async with app.worker(scanners=False):
        run = await app.submit(deploy, "x")
        await parked(engine, run, "approval")
        assert starts == [(1, 1)]
        await run.signal("approval", "go", {"a": [1, None]}, by="ada")
        assert await run.result(10) == ["x", "go", {"a": [1, None]}, "ada", "approval"]
    assert starts == [(1, 1), (1, 2)]


async def test_a_wait_holds_no_permit(app: ff.Fabric, engine: Engine) -> None:
    @app.task()
    async def ask(ctx: ff.Context) -> str:
        return (await ctx.wait_for("go")).name

    @app.task()
    async def other() -> int:
        return 1

    async with app.worker(concurrency=1, scanners=False):
        runs = [await app.submit(ask) for _ in range(3)]
        for run in runs:
            await parked(engine, run)
        assert await (await app.submit(other)).result(10) == 1
        for run in reversed(runs):
            await run.signal("go", "yes")
            assert await run.result(10) == "yes"


async def test_each_use_of_a_name_has_its_own_answer(app: ff.Fabric, engine: Engine) -> None:
    starts: list[int] = []

    @app.task()
    async def chat(ctx: ff.Context) -> list[str]:
        starts.append(1)
        said = [(await ctx.wait_for("say")).payload for _ in range(3)]
        said.append((await ctx.wait_for("say#3")).payload)
        said.append((await ctx.wait_for("bye")).payload)
        return said

    async with app.worker(scanners=False):
        run = await app.submit(chat)
        # The last name is what the third use of the first one would be called.
        for key, word in (("say", "a"), ("say#2", "b"), ("say#3", "c"), ("say#3#2", "d")):
            await parked(engine, run, key)
            await run.signal(key, "said", word)
        await parked(engine, run, "bye")
        await run.signal("bye", "said", "e")
        assert await run.result(10) == ["a", "b", "c", "d", "e"]
    assert len(starts) == 6


@pytest.mark.parametrize(
    ("signals", "shown"),
    [("yes", ("yes",)), ({"yes", "no"}, ("no", "yes")), (["yes"], ("yes",)), ([], ()), (None, ())],
)
async def test_only_the_wanted_names_count(
    app: ff.Fabric, engine: Engine, signals: Any, shown: tuple[str, ...]
) -> None:
    @app.task()
    async def ask(ctx: ff.Context) -> str:
        return (await ctx.wait_for("verdict", signals=signals)).name

    async with app.worker(scanners=False):
        run = await app.submit(ask)
        waitpoint = await parked(engine, run)
        assert waitpoint.required_signal_names == shown
        if shown:
            outcome = await run.signal("verdict", "maybe")
            assert isinstance(outcome, Accepted)
            assert not outcome.resumed
        await run.signal("verdict", "yes")
        assert await run.result(10) == "yes"


@pytest.mark.parametrize(
    ("payload", "encoding", "seen"),
    [
        (None, "json", "None"),
        (b'{"n": 1}', "json", "{'n': 1}"),
        (b'{"n": 1}', None, "{'n': 1}"),
        (b"{not json", None, "b'{not json'"),
        (b"\xff\x00", None, r"b'\xff\x00'"),
        (b'{"n": 1}', "binary", """b'{"n": 1}'"""),
        (b"", "", "b''"),
    ],
)
async def test_payloads_are_decoded_when_they_can_be(
    app: ff.Fabric, engine: Engine, payload: bytes | None, encoding: str | None, seen: str
) -> None:
    @app.task()
    async def ask(ctx: ff.Context) -> str:
        return repr((await ctx.wait_for("it")).payload)

    async with app.worker(scanners=False):
        run = await app.submit(ask)
        await parked(engine, run)
        client = await app.client()
        await client.signal(run.id, "it", "go", payload=payload, payload_encoding=encoding)
        assert await run.result(10) == seen


UNREADABLE = [b"{not json", b'"\xff"', b"[" * 60_000, b"[" * 30_000 + b"]" * 30_000, b"1e999"]


@pytest.mark.corrupts
@pytest.mark.parametrize("payload", UNREADABLE)
async def test_a_payload_that_cannot_be_decoded_reaches_the_handler_as_bytes(
    app: ff.Fabric, engine: Engine, payload: bytes
) -> None:
    """Delivery refuses it, so it is written behind the engine's back."""

    @app.task()
    async def ask(ctx: ff.Context) -> bool:
        return (await ctx.wait_for("it")).payload == payload

    run = await app.submit(ask)
    async with app.worker(scanners=False):
        await parked(engine, run)
    outcome = await run.signal("it", "go", {})
    assert isinstance(outcome, Accepted)
    body = keys.signal_payload(run.id, outcome.signal_id)
    await engine.backend.transport.call("SET", body, payload)
    async with app.worker(scanners=False):
        assert await run.result(10)


# --- time -----------------------------------------------------------------------------------


async def test_a_timeout_raises_or_gives_the_default(fabric: TestFabric) -> None:
    @fabric.task()
    async def ask(ctx: ff.Context) -> str:
        first = await ctx.wait_for("a", timeout="1h", on_timeout="default", default="nobody")
        try:
            await ctx.wait_for("b", timeout=60)
        except TimeoutError as error:
            return f"{first}, {error}"
        return "answered"

    await ask.submit()
    await fabric.drain()
    fabric.clock.advance("1h")
    assert await fabric.drain() == []
    fabric.clock.advance(60)
    assert [ended.result for ended in await fabric.drain()] == [
        "nobody, nobody answered 'b' in time"
    ]


async def test_an_answer_in_time_beats_the_timeout(app: ff.Fabric, engine: Engine) -> None:
    @app.task()
    async def ask(ctx: ff.Context) -> str:
        return (await ctx.wait_for("a", timeout="1h")).name

    async with app.worker(scanners=False):
        run = await app.submit(ask)
        await parked(engine, run)
        await run.signal("a", "late")
        assert await run.result(10) == "late"


async def test_an_uncaught_timeout_fails_the_run_as_a_timeout(fabric: TestFabric) -> None:
    @fabric.task()
    async def ask(ctx: ff.Context) -> None:
        await ctx.wait_for("a", timeout=1)

    run = await ask.submit()
    await fabric.drain()
    fabric.clock.advance(1)
    await fabric.drain()
    outcome = await run.wait(10)
    assert outcome.failure_category == "timeout"
    assert "nobody answered 'a' in time" in (outcome.failure_reason or "")


# --- by hand ----------------------------------------------------------------------------------


async def test_a_resume_by_hand_differs_from_an_answer(app: ff.Fabric, engine: Engine) -> None:
    @app.task()
    async def ask(ctx: ff.Context) -> list[Any]:
        signal = await ctx.wait_for("a", signals="yes")
        met = await ctx.wait_condition(ff.AllOf((ff.Single("b"), ff.Single("c"))))
        await ctx.wait_condition(ff.OperatorOnly())
        return [signal.name, signal.source_type, signal.signal_id, len(met)]

    async with app.worker(scanners=False):
        run = await app.submit(ask)
        client = await app.client()
        await parked(engine, run, "a")
        await run.signal("a", "no")
        await client.resume(run.id)
        await parked(engine, run, "b")
        await run.signal("c", "half of it")
        await client.resume(run.id)
        await parked(engine, run, "condition")
        await client.resume(run.id)
        assert await run.result(10) == ["resumed", "operator", "", 0]


async def test_a_wait_whose_waitpoint_was_closed_ends_with_its_suspension(
    app: ff.Fabric, engine: Engine
) -> None:
    @app.task()
    async def ask(ctx: ff.Context) -> str:
        return (await ctx.wait_for("a")).name

    async with app.worker(scanners=False):
        run = await app.submit(ask)
        waitpoint = await parked(engine, run)
        await engine.backend.waitpoints.close_waitpoint(run.id, waitpoint.waitpoint_id)
        await (await app.client()).resume(run.id)
        assert await run.result(10) == "resumed"


# --- conditions -------------------------------------------------------------------------------


async def test_conditions_of_one_handler_have_separate_answers(
    app: ff.Fabric, engine: Engine
) -> None:
    @app.task()
    async def ask(ctx: ff.Context) -> list[list[str]]:
        both = ff.AllOf((ff.Single("legal", "yes"), ff.Single("money", ("yes", "fine"))))
        first = await ctx.wait_condition(both)
        second = await ctx.wait_condition(both)
        people = ff.Count(n=2, waitpoints=("crew",), count_kind=ff.CountKind.DISTINCT_SOURCES)
        third = await ctx.wait_condition(people)
        return [
            [f"{s.waitpoint} {s.name} {s.payload}" for s in met] for met in (first, second, third)
        ]

    async with app.worker(scanners=False):
        run = await app.submit(ask)
        for round_, suffix in ((1, ""), (2, "#2")):
            await parked(engine, run, f"legal{suffix}")
            await run.signal(f"money{suffix}", "no", round_)
            await run.signal(f"money{suffix}", "fine", round_)
            await run.signal(f"money{suffix}", "yes", round_)
            # Only signals of different milliseconds have an order across waitpoints.
            await engine.advance(1)
            await run.signal(f"legal{suffix}", "yes", round_)
        await parked(engine, run, "crew")
        for who in ("ada", "ada", "eve"):
            await run.signal("crew", "yes", who, by=who)
        assert await run.result(10) == [
            ["money fine 1", "legal yes 1"],
            ["money fine 2", "legal yes 2"],
            ["crew yes ada", "crew yes eve"],
        ]


async def test_a_condition_that_only_time_ends(fabric: TestFabric) -> None:
    @fabric.task()
    async def rest(ctx: ff.Context) -> list[Any]:
        first = await ctx.wait_condition(TimeoutOnly(), timeout=5)
        with pytest.raises(ff.WaitTimeout, match="nobody answered 'a, b' in time"):
            await ctx.wait_condition(ff.AllOf((ff.Single("a"), ff.Single("b"))), timeout=5)
        return first

    await rest.submit()
    for _ in range(2):
        assert await fabric.drain() == []
        fabric.clock.advance(5)
    assert [ended.result for ended in await fabric.drain()] == [[]]


# --- handed out before waiting ----------------------------------------------------------------


async def test_an_early_answer_needs_no_parking(app: ff.Fabric, engine: Engine) -> None:
    epochs: list[int] = []

    @app.task()
    async def ask(ctx: ff.Context) -> list[Any]:
        epochs.append(ctx.lease_epoch)
        point = await ctx.waitpoint("approval")
        assert (await ctx.waitpoint("approval")).waitpoint_id == point.waitpoint_id
        if ctx.lease_epoch == 1:
            for name, number in (("maybe", 1), ("yes", 2), ("yes", 3)):
                await engine.backend.signals.deliver_signal(
                    ctx.execution_id,
                    point.waitpoint_id,
                    point.waitpoint_token,
                    name,
                    payload=json.dumps(number).encode(),
                )
        early = await ctx.wait_for("approval", signals={"yes"})
        later = await ctx.wait_for("other")
        return [early.payload, later.payload]

    async with app.worker(scanners=False):
        run = await app.submit(ask)
        await parked(engine, run, "other")
        assert epochs == [1]
        await run.signal("other", "go", 4)
        # The start after the second wait finds the same answer to the first.
        assert await run.result(10) == [2, 4]


async def test_what_was_handed_out_is_handed_out_again(app: ff.Fabric, engine: Engine) -> None:
    """A handler that starts again must not send a second, useless link."""
    seen: list[tuple[str, str]] = []

    @app.task()
    async def ask(ctx: ff.Context) -> str:
        point = await ctx.waitpoint("a")
        token: WaitpointToken = point.waitpoint_token
        seen.append((point.waitpoint_id, token.reveal()))
        return (await ctx.wait_for("a")).name

    async with app.worker(scanners=False):
        run = await app.submit(ask)
        await parked(engine, run, "a")
        ((waitpoint_id, token),) = seen
        await engine.backend.signals.deliver_signal(run.id, waitpoint_id, token, "go")
        assert await run.result(10) == "go"
    assert seen == [(waitpoint_id, token)] * 2


async def test_a_condition_over_a_handed_out_waitpoint(app: ff.Fabric, engine: Engine) -> None:
    @app.task()
    async def ask(ctx: ff.Context) -> int:
        await ctx.waitpoint("a")
        with pytest.raises(ValidationError, match="'a' was handed out, so it cannot be combined"):
            await ctx.wait_condition(ff.AllOf((ff.Single("a"), ff.Single("b"))))
        await ctx.waitpoint("c")
        twice = ff.Count(n=2, waitpoints=("c",), count_kind=ff.CountKind.DISTINCT_SIGNALS)
        return len(await ctx.wait_condition(twice))

    async with app.worker(scanners=False):
        run = await app.submit(ask)
        await parked(engine, run, "c")
        for _ in range(2):
            await run.signal("c", "go")
        assert await run.result(10) == 2
