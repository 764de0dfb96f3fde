"""What claims and renewals of remote workers say and keep: quota slots and recorded steps."""

from __future__ import annotations

from base64 import b64decode

import msgspec

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.remote import RemoteClaim
from flowfabric.core.contracts.steps import StepError, StepPage
from flowfabric.engine.http import codec
from tests.server.test_remote import RENEW, claimed
from tests.support.admission import limited, quota, slot_taken, slots
from tests.support.engine import Engine
from tests.support.http import Http


async def test_a_renewal_confirms_the_slot_of_a_quota(http: Http, engine: Engine) -> None:
    """As after a confirmation that failed: the execution runs, and nothing counts it."""
    policy = await quota(engine, cap=1)
    execution_id = await limited(engine, quota=policy)
    (claim,) = await claimed(http)
    assert await slots(engine, policy) == 1
    await engine.backend.quotas.release_admission(policy, execution_id)
    answer = await http.post(RENEW, {"items": [{"handle": claim["handle"]}]})
    assert answer.json["results"][0]["status"] == 200
    await slot_taken(engine, policy)
    await limited(engine, quota=policy)
    assert await claimed(http, worker_instance_id="w-2") == []


async def test_a_claim_has_the_recorded_steps(http: Http, engine: Engine) -> None:
    await engine.freeze(at := 1_900_000_000_000)
    await engine.create()
    (fresh,) = await claimed(http)
    assert (fresh["steps"], fresh["steps_after"]) == ([], None)
    handle = Handle.decode(b64decode(fresh["handle"]))
    record = engine.backend.steps.record_step
    await record(handle.execution_id, handle, "fetch", result=b"\xff", codec="raw")
    await record(handle.execution_id, handle, "send", status="failed", error=StepError("x", "y"))
    known = (await engine.backend.steps.read_steps(handle.execution_id)).steps
    await engine.backend.executions.delay(handle, 1)
    (claim,) = await claimed(http)
    assert claim["steps_after"] is None
    assert claim["steps"][0] == {
        "step_key": "fetch",
        "seq": 1,
        "kind": "step",
        "status": "done",
        "codec": "raw",
        "result_b64": "/w==",
        "error": None,
        "attempt_index": 0,
        "lease_epoch": 1,
        "started_at": at,
        "finished_at": at,
        "fire_at": None,
        "child_execution_id": None,
    }
    assert claim["steps"][1]["error"] == {"reason": "x", "category": "y"}
    # As a Python worker reads it.
    received = codec.decoder(RemoteClaim).decode(msgspec.json.encode(claim))
    assert received.claim.steps == StepPage(known)
    (unread,) = codec.decoder(list[RemoteClaim]).decode(
        msgspec.json.encode([claim | {"steps": [], "steps_after": 0}])
    )
    assert unread.claim.steps == StepPage((), 0)
