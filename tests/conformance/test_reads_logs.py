"""What the engine writes into its log: operators, ends, wear, lanes (02 §20, 03 §15, 01 §13)."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from flowfabric.core.errors import EngineError
from flowfabric.core.ids import new_uuid
from flowfabric.core.state import ExpireReason
from flowfabric.engine.api.executions import Completion
from flowfabric.engine.layers.audit import acting_as, caller
from tests.support.engine import LANE, TTL, Engine
from tests.support.executions import POLICY, mark
from tests.support.suspension import Waits

Records = pytest.LogCaptureFixture


def said(caplog: Records, action: str) -> list[dict[str, Any]]:
    return [vars(record) for record in caplog.records if vars(record).get("action") == action]


async def test_operator_calls_name_their_caller(engine: Engine, caplog: Records) -> None:
    backend = engine.backend
    handle = await engine.running()
    caplog.set_level(logging.INFO, "flowfabric")
    with acting_as("ada@example.com"):
        await backend.leases.revoke_lease(handle.execution_id, reason="stuck")
        await backend.executions.cancel_execution(handle.execution_id, "no longer wanted")
        await backend.executions.replay_execution(handle.execution_id, reason="again")
        compact: Any = handle.execution_id.compact
        await backend.executions.change_priority(compact, 7)
        await backend.lanes.set_lane_state(LANE, "paused", "lunch")
    calls = said(caplog, "operator_call")
    assert [call["op"] for call in calls] == [
        "revoke_lease",
        "cancel_execution",
        "replay_execution",
        "change_priority",
        "set_lane_state",
    ]
    assert {call["caller"] for call in calls} == {"ada@example.com"}
    assert {call["code"] for call in calls} == {"ok"}
    assert {call["execution_id"] for call in calls[:4]} == {str(handle.execution_id)}
    revoked, cancelled, *_ = calls
    assert revoked["reason"] == "stuck"
    assert (cancelled["source"], cancelled["outcome"]) == ("operator_override", "cancelled")
    assert (calls[3]["new_priority"], calls[4]["state"]) == (7, "paused")
    # One record tells it: the cancellation is not reported a second time as an end.
    assert said(caplog, "execution_ended") == []


@pytest.mark.parametrize("way", ["complete", "fail", "delay", "claim"])
async def test_every_override_is_logged(engine: Engine, caplog: Records, way: str) -> None:
    backend = engine.backend
    caplog.set_level(logging.INFO, "flowfabric")
    if way == "claim":
        execution_id = await engine.create()
        await backend.claims.issue_grant_and_claim(execution_id, lease_duration_ms=1000)
    else:
        execution_id = (await engine.running()).execution_id
        source: Any = {"source": "operator_override"}
        if way == "complete":
            await backend.executions.complete_execution(
                execution_id, result_payload=b"secret", **source
            )
        elif way == "fail":
            await backend.executions.fail_execution(
                execution_id, failure_reason="gone", failure_category="x", **source
            )
        else:
            await backend.executions.delay_execution(execution_id, delay_until=1, **source)
    (call,) = said(caplog, "operator_call")
    assert (call["execution_id"], call["caller"]) == (str(execution_id), caller())
    assert "secret" not in caplog.text


async def test_a_refused_override_is_logged_too(engine: Engine, caplog: Records) -> None:
    execution_id = await engine.create()
    caplog.set_level(logging.INFO, "flowfabric")
    with pytest.raises(EngineError):
        await engine.backend.executions.complete_execution(execution_id, source="operator_override")
    (call,) = said(caplog, "operator_call")
    assert (call["op"], call["code"]) == ("complete_execution", "execution_not_active")


async def test_without_a_name_the_account_of_the_process_acts() -> None:
    own = caller()
    assert "@" in own
    with acting_as("ada"):
        with acting_as("grace"):
            assert caller() == "grace"
        assert caller() == "ada"
    assert caller() == own


async def test_every_end_is_logged_once(engine: Engine, caplog: Records) -> None:
    backend = engine.backend
    handles = [await engine.running(policy=POLICY) for _ in range(6)]
    caplog.set_level(logging.INFO, "flowfabric")
    await backend.executions.complete(handles[0], b"result")
    await backend.executions.complete_many(
        [Completion(handles[1], b"r"), Completion(handles[1], b"r")][:1]
    )
    await backend.claims.complete_and_claim(
        handles[2].execution_id.tag, [Completion(handles[2])], engine.want(), 0
    )
    await backend.executions.fail(handles[3], "no", "permanent")
    await backend.executions.cancel(handles[4], "done")
    await backend.executions.fail(handles[5], "no", "transient")
    ends = said(caplog, "execution_ended")
    assert [(end["execution_id"], end["outcome"]) for end in ends] == [
        (handles[0].execution_id, "success"),
        (handles[1].execution_id, "success"),
        (handles[2].execution_id, "success"),
        (handles[3].execution_id, "failed"),
        (handles[4].execution_id, "cancelled"),
    ]
    for end, handle in zip(ends, handles, strict=False):
        assert (end["attempt_id"], end["lease_epoch"]) == (handle.attempt_id, handle.lease_epoch)
        assert (end["attempt_index"], end["lane"]) == (0, LANE)
    assert said(caplog, "operator_call") == []


async def test_ends_by_timers_are_logged(engine: Engine, caplog: Records) -> None:
    handle = await engine.running(policy={"timeout_policy": {"attempt_timeout_ms": 1000}})
    caplog.set_level(logging.INFO, "flowfabric")
    tag, ids = handle.execution_id.tag, [str(handle.execution_id)]
    await engine.backend.upkeep.expire_execution(tag, ExpireReason.ATTEMPT_TIMEOUT, ids)
    assert said(caplog, "execution_ended") == []
    await engine.advance(1000)
    await engine.backend.upkeep.expire_execution(tag, ExpireReason.ATTEMPT_TIMEOUT, iter(ids))
    (end,) = said(caplog, "execution_ended")
    assert (end["execution_id"], end["outcome"], end["op"]) == (
        ids[0],
        "expired",
        "attempt_timeout",
    )


async def test_nothing_is_logged_below_the_level(engine: Engine, caplog: Records) -> None:
    handle = await engine.running()
    caplog.set_level(logging.WARNING, "flowfabric.engine")
    await engine.backend.executions.complete(handle)
    await engine.backend.executions.replay_execution(handle.execution_id)
    assert caplog.records == []


async def test_a_reclaim_at_the_cap_is_an_end(engine: Engine, caplog: Records) -> None:
    handle = await engine.running(policy={"max_reclaim_count": 0})
    await engine.advance(TTL + 1)
    await mark(engine, handle.execution_id)
    caplog.set_level(logging.INFO, "flowfabric")
    await engine.backend.claims.issue_reclaim_grant(
        handle.execution_id, worker_id="w", worker_instance_id="w-2"
    )
    (call,) = said(caplog, "operator_call")
    assert (call["op"], call["outcome"]) == ("issue_reclaim_grant", "failed")


async def test_reading_a_token_is_audited(engine: Engine, caplog: Records) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    where = parked.handle.execution_id, parked.details.waitpoint_id
    caplog.set_level(logging.DEBUG, "flowfabric")
    with acting_as("ada"):
        token = await engine.backend.signals.read_waitpoint_token(*where)
        assert await engine.backend.signals.read_waitpoint_token(where[0], new_uuid()) is None
    assert token is not None
    read, missed = said(caplog, "operator_call")
    assert (read["op"], read["caller"]) == ("read_waitpoint_token", "ada")
    assert (read["execution_id"], read["waitpoint_id"]) == where
    assert (read["token_kid"], read["token_fingerprint"]) == (token.kid, token.fingerprint)
    assert "token_fingerprint" not in missed
    await engine.backend.signals.verify_and_deliver(*where, token, "go")
    assert len(said(caplog, "operator_call")) == 2, "comparing a token discloses nothing"
    for shown in (caplog.text, repr([vars(record) for record in caplog.records])):
        assert token.reveal().partition(":")[2] not in shown


async def test_closing_a_waitpoint_as_an_operator_is_audited(
    engine: Engine, caplog: Records
) -> None:
    await Waits.open(engine)
    handle = await engine.running()
    backend = engine.backend
    mine, other = [await backend.waitpoints.create_waitpoint(handle, "k", 60_000) for _ in range(2)]
    caplog.set_level(logging.INFO, "flowfabric")
    eid = handle.execution_id
    await backend.waitpoints.close_waitpoint(eid, mine.waitpoint_id, handle=handle)
    await backend.waitpoints.close_waitpoint(eid, other.waitpoint_id, "abandoned")
    (call,) = said(caplog, "operator_call")
    assert (call["op"], call["code"], call["reason"]) == ("close_waitpoint", "ok", "abandoned")
    assert (call["execution_id"], call["waitpoint_id"]) == (eid, other.waitpoint_id)


async def test_rotating_the_secret_is_audited(engine: Engine, caplog: Records) -> None:
    await Waits.open(engine)
    backend, secret = engine.backend, "cd" * 32
    await backend.secrets.rotate_waitpoint_hmac_secret(3, "k2", "ef" * 32)
    caplog.set_level(logging.INFO, "flowfabric")
    with acting_as("ada"):
        summary = await backend.secrets.rotate_waitpoint_hmac_secret_all("k2", secret)
    assert summary.failed == (3,)
    (done,) = said(caplog, "waitpoint_hmac_rotation_complete")
    total = backend.counts.flow
    assert (done["caller"], done["new_kid"], done["levelname"]) == ("ada", "k2", "INFO")
    counted = (done["total_partitions"], done["rotated"], done["failed_count"])
    assert counted == (total, total - 1, 1)
    (failed,) = said(caplog, "waitpoint_hmac_rotation_failed")
    assert (failed["partition"], failed["levelname"]) == (3, "ERROR")
    assert said(caplog, "operator_call") == [], "not one record for each partition"
    await backend.secrets.rotate_waitpoint_hmac_secret(0, "k3", secret)
    (one,) = said(caplog, "operator_call")
    assert (one["partition"], one["new_kid"]) == (0, "k3")
    for shown in (caplog.text, repr([vars(record) for record in caplog.records])):
        assert secret not in shown
