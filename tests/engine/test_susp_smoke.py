from flowfabric.core.conditions import AllOf, Count, CountKind, Single
from flowfabric.core.contracts.streams import BestEffort, Frame
from flowfabric.core.contracts.suspension import Accepted, Suspended
from tests.support.engine import Engine

SECRET = "ab" * 32


async def test_suspend_signal_resume(engine: Engine) -> None:
    b = engine.backend
    await b.seed_at_boot(SECRET)
    handle = await engine.running()
    outcome = await b.suspend(handle, condition=Single("approval", "go"))
    assert isinstance(outcome, Suspended)
    details = outcome.details
    listed = await b.list_pending_waitpoints(handle.execution_id)
    assert listed.entries[0].required_signal_names == ("go",)
    assert (await b.list_suspended()).entries[0].execution_id == handle.execution_id
    answer = await b.deliver_signal(
        handle.execution_id, details.waitpoint_id, details.waitpoint_token, "no"
    )
    assert answer.effect == "no_op"
    answer = await b.deliver_signal(
        handle.execution_id,
        details.waitpoint_id,
        details.waitpoint_token,
        "go",
        payload=b"\x00\xff",
    )
    assert isinstance(answer, Accepted) and answer.resumed
    claim = await engine.claim()
    assert claim.handle.kind == "resumed"
    assert claim.resume_cause.trigger == "signal"
    (signal,) = await b.observe_signals(claim.handle)
    assert signal.payload == b"\x00\xff"
    await b.complete(claim.handle)


async def test_composite(engine: Engine) -> None:
    b = engine.backend
    await b.seed_at_boot(SECRET)
    handle = await engine.running()
    cond = AllOf(
        (Single("a"), Count(n=2, waitpoints=("b",), count_kind=CountKind.DISTINCT_SOURCES))
    )
    outcome = await b.suspend(handle, condition=cond)
    wa, wb = outcome.details.waitpoints

    async def go(w, who):
        return (
            await b.deliver_signal(
                handle.execution_id, w.waitpoint_id, w.waitpoint_token, "x", source_identity=who
            )
        ).effect

    assert await go(wb, "u1") == "appended_to_waitpoint"
    assert await go(wb, "u1") == "appended_to_waitpoint_duplicate"
    assert await go(wa, "u1") == "appended_to_waitpoint"
    assert await go(wb, "u2") == "resume_condition_satisfied"
    await b.cancel_execution(handle.execution_id)


async def test_stream(engine: Engine) -> None:
    b = engine.backend
    handle = await engine.running()
    out = await b.append_frames(
        handle, [Frame(payload=bytes(range(256))), Frame(payload=b"x", frame_type="log")]
    )
    assert out.frame_count == 2
    page = await b.read_stream(handle.execution_id, 0)
    assert page.frames[0].payload == bytes(range(256)) and not page.is_closed
    s = await b.append_frame(
        handle, Frame(payload=b'{"a":{"b":12345678901234567890}}'), mode="summary"
    )
    assert s.summary_version == 1
    await b.append_frame(
        handle, Frame(payload=b"live"), mode="best_effort", best_effort=BestEffort()
    )
    await b.complete(handle)
    page = await b.tail_stream(handle.execution_id, 0, after=page.next_cursor, block_ms=1000)
    assert len(page.frames) == 2 and page.closed_reason == "attempt_success"
    assert (
        await b.read_summary(handle.execution_id, 0)
    ).document_json == b'{"a":{"b":12345678901234567890}}'
