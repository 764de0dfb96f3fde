"""`flowfabric cancel` and `flowfabric replay`."""

from __future__ import annotations

from flowfabric.core.state import PublicState
from tests.support.command import Cli
from tests.support.engine import Engine


async def test_cancel_several_with_a_reason(cli: Cli, engine: Engine) -> None:
    waiting = await engine.create()
    running = (await engine.running()).execution_id
    done = await cli("cancel", waiting, running.uuid[:10], "--reason", "not needed")
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{waiting.compact}  cancelled\n{running.compact}  cancelled\n"
    for execution_id in (waiting, running):
        info = await engine.backend.reads.read_execution_info(execution_id)
        assert info.cancellation_reason == "not needed"
        assert info.cancelled_by == "operator_override"


async def test_one_that_cannot_be_cancelled_does_not_keep_the_others(
    cli: Cli, engine: Engine
) -> None:
    ended = await engine.running()
    await engine.backend.executions.complete(ended)
    waiting = await engine.create()
    done = await cli("cancel", "deadbeef", ended.execution_id, waiting, "--json")
    assert done.code == 1
    assert done.objects == [{"execution_id": waiting, "state": "cancelled"}]
    assert '"code":"execution_not_found"' in done.err.splitlines()[0]
    assert '"code":"execution_not_active"' in done.err.splitlines()[1]
    assert (await cli("cancel", "deadbeef", "no-id")).code == 2
    plain = await cli("cancel", ended.execution_id)
    assert plain.err.startswith(
        f"error: execution_not_active: {ended.execution_id.compact} is completed\n"
        "hint: it has finished"
    )


async def test_cancelling_again_changes_nothing(cli: Cli, engine: Engine) -> None:
    waiting = await engine.create()
    assert (await cli("cancel", waiting, "--reason", "first")).code == 0
    before = await engine.dump()
    assert (await cli("cancel", waiting, waiting, "--reason", "second")).code == 0
    assert await engine.dump() == before


async def test_replay_with_a_reason(cli: Cli, engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.executions.complete(handle)
    done = await cli("replay", handle.execution_id.uuid, "--reason", "new data", "--json")
    assert done.code == 0
    assert done.objects == [{"execution_id": handle.execution_id, "state": "waiting"}]
    await engine.claim()
    attempts = await engine.backend.reads.read_attempts(handle.execution_id)
    assert [attempt.attempt_type for attempt in attempts] == ["initial", "replay"]
    assert attempts[1].replay_reason == "new data"


async def test_only_ended_ones_are_replayed(cli: Cli, engine: Engine) -> None:
    waiting = await engine.create()
    ended = await engine.running()
    await engine.backend.executions.complete(ended)
    done = await cli("replay", waiting, ended.execution_id.uuid)
    assert (done.code, done.out) == (1, f"{ended.execution_id.compact}  waiting\n")
    assert done.err.startswith(
        f"error: execution_not_terminal: {waiting.compact} is waiting\nhint: "
    )


async def test_the_expected_count_makes_a_repeat_harmless(cli: Cli, engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.executions.complete(handle)
    execution_id = handle.execution_id
    refused = await cli("replay", execution_id, "--expected-replay-count", "1")
    assert refused.code == 1
    problem = f"{execution_id.compact} was replayed 0 times, not 1; nothing changed"
    assert refused.err.splitlines() == [
        f"error: replay_not_allowed: {problem}",
        "hint: to replay it once more, pass --expected-replay-count 0",
    ]
    assert await engine.backend.reads.read_execution_state(execution_id) is PublicState.COMPLETED
    assert (await cli("replay", execution_id, "--expected-replay-count", "0")).code == 0
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert (info.public_state, info.replay_count) == (PublicState.WAITING, 1)
