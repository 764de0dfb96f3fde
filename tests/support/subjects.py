"""What requests are about: executions, flows and the rest, each newly made in a named state."""

from __future__ import annotations

import itertools
from base64 import b64encode
from typing import Any

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.core.partition import flow_partition
from flowfabric.engine.valkey import keys
from tests.support.budgets import new_budget
from tests.support.engine import Engine
from tests.support.flows import TestFlow, submitted
from tests.support.http import Http
from tests.support.streams import append
from tests.support.suspension import GO, Waits

Facts = dict[str, Any]
_LEASE = ("lease_id", "lease_epoch", "attempt_id")
_LEASE_MS = 3_600_000
_CLAIM = {"worker_id": "w", "worker_instance_id": "w-1", "grant_ttl_ms": 1000}


class Subjects:
    """Makes subjects; each is a set of facts that paths and bodies refer to."""

    def __init__(self, engine: Engine, http: Http) -> None:
        self.engine = engine
        self.backend = engine.backend
        self.http = http
        self._numbers = itertools.count()

    async def make(self, name: str) -> Facts:
        """The facts of a new subject; what it does not name is unknown to the server."""
        facts: Facts = {each: new_uuid() for each in ("id", "uuid", "waitpoint_id")}
        # In the partition of the flow, where members are.
        tag = TestFlow.tag_of(self.engine, facts["id"])
        for each in ("execution_id", "gone", "a", "b"):
            facts[each] = ExecutionId.parse(f"{tag}:{new_uuid()}")
        other = (int(tag[4:-1]) + 1) % self.backend.counts.flow
        facts["elsewhere"] = ExecutionId.parse(f"{{fp:{other}}}:{new_uuid()}")
        facts |= {"idx": "0", "lane": self._lane(), "instance": "w-9", "worker_id": "w"}
        facts |= {"name": "nope", "token": "k1:" + "0" * 40}
        return facts | await getattr(self, f"_{name}")()

    def _lane(self) -> str:
        """A lane of its own, so that a claim finds no other execution."""
        return f"lane-{next(self._numbers)}"

    async def _nothing(self) -> Facts:
        return {}

    # --- executions ---------------------------------------------------------------------------

    async def _unknown(self) -> Facts:
        return {"id": self.engine.new_id()}

    async def _waiting(self, **fields: Any) -> Facts:
        lane = self._lane()
        return {"id": await self.engine.create(lane=lane, **fields), "lane": lane}

    async def _held(self, **fields: Any) -> tuple[Handle, str]:
        lane = self._lane()
        return await self.engine.running(lane=lane, **fields), lane

    async def _running(self, **fields: Any) -> Facts:
        handle, lane = await self._held(**fields)
        text = b64encode(handle.opaque).decode()
        lease = {name: getattr(handle, name) for name in _LEASE}
        return {"id": handle.execution_id, "lane": lane, "handle": text, **lease}

    async def _expired(self) -> Facts:
        facts = await self._running()
        await self.engine.advance(_LEASE_MS)
        return facts

    async def _summed(self) -> Facts:
        handle, _ = await self._held()
        await append(self.engine, handle, '{"done": 3}', mode="summary")
        return {"id": handle.execution_id}

    async def _completed(self) -> Facts:
        handle, _ = await self._held()
        await self.backend.executions.complete(handle, b"result")
        return {"id": handle.execution_id}

    async def _spent(self) -> Facts:
        """An ended execution that may not be replayed."""
        return await self._cancelled(policy={"max_replay_count": 0})

    async def _cancelled(self, **fields: Any) -> Facts:
        facts = await self._waiting(**fields)
        await self.backend.executions.cancel_execution(facts["id"])
        return facts

    async def _blocked(self) -> Facts:
        facts = await self._waiting()
        await self.backend.claims.block_execution_for_admission(facts["id"], "paused_by_operator")
        return facts

    async def _revoked(self, **fields: Any) -> Facts:
        facts = await self._running(**fields)
        await self.backend.leases.revoke_lease(facts["id"])
        return facts

    async def _granted(self) -> Facts:
        facts = await self._revoked()
        path = f"/v1/executions/{facts['id']}/reclaim"
        answer = await self.http.post(path, _CLAIM | {"lane_id": facts["lane"]})
        assert answer.json["status"] == "granted"
        return facts

    # --- waitpoints ---------------------------------------------------------------------------

    async def _parked(self) -> Facts:
        waits = await Waits.open(self.engine)
        handle, lane = await self._held()
        parked = await waits.park(GO, handle=handle)
        token = parked.details.waitpoint_token.reveal()
        facts = {"id": handle.execution_id, "lane": lane, "token": token}
        return facts | {"waitpoint_id": parked.details.waitpoint_id}

    async def _unparked(self) -> Facts:
        facts = await self._parked()
        await self.backend.executions.cancel_execution(facts["id"])
        return facts

    async def _outdated(self) -> Facts:
        """A waitpoint whose token was signed with a key that is no longer accepted."""
        facts = await self._parked()
        secrets = self.backend.secrets
        await secrets.rotate_waitpoint_hmac_secret_all(new_uuid(), "cd" * 32, 0)
        await self.engine.advance(1)
        return facts

    async def _signalled(self) -> Facts:
        """A waitpoint that has had a signal, and waits for another."""
        facts = await self._parked()
        await self.backend.signals.deliver_signal(
            facts["id"], facts["waitpoint_id"], facts["token"], "other"
        )
        return facts

    async def _closed(self) -> Facts:
        """A waitpoint of an earlier suspension."""
        facts = await self._parked()
        await self.backend.suspensions.resume_execution(facts["id"])
        claim = await self.engine.claim(lane=facts["lane"])
        await Waits(self.engine).park(GO, handle=claim.handle)
        return facts

    async def _pending(self) -> Facts:
        await Waits.open(self.engine)
        handle, _ = await self._held()
        made = await self.backend.waitpoints.create_waitpoint(handle, "k", 60_000)
        token = made.waitpoint_token.reveal()
        return {"id": handle.execution_id, "waitpoint_id": made.waitpoint_id, "token": token}

    async def _damaged(self) -> Facts:
        """A waitpoint in a state that does not exist."""
        facts = await self._pending()
        key = keys.waitpoint(facts["id"].tag, facts["waitpoint_id"])
        await self.backend.transport.call("HSET", key, "state", "strange")
        return facts

    # --- flows --------------------------------------------------------------------------------

    async def _flow(self, text: str = "a>b") -> Facts:
        return self._of(await submitted(self.engine, text))

    def _of(self, flow: TestFlow) -> Facts:
        gone = flow.new_member_id()
        return {"id": flow.flow_id, "execution_id": flow.nodes["a"], "gone": gone, **flow.nodes}

    async def _loose(self) -> Facts:
        """Two members without an edge."""
        return await self._flow("a b")

    async def _staged(self) -> Facts:
        """An edge that is stored and not applied."""
        facts: Facts = {**await self._loose(), "uuid": new_uuid()}
        await self.backend.flows.stage_dependency_edge(
            facts["id"], facts["a"], facts["b"], edge_id=facts["uuid"]
        )
        return facts

    async def _abandoned(self) -> Facts:
        """An edge that is stored in a cancelled flow."""
        facts = await self._staged()
        await self.backend.flows.cancel_flow(facts["id"], cancellation_policy="flow_only")
        return facts

    async def _skipped(self) -> Facts:
        """A member that was skipped because its upstream failed."""
        flow = await submitted(self.engine, "a>b")
        await flow.end("a", "failed")
        return self._of(flow) | {"id": flow.nodes["b"]}

    async def _overtaken(self) -> Facts:
        """An edge to a child that is cancelled."""
        facts = await self._staged()
        await self.backend.executions.cancel_execution(facts["b"])
        return facts

    async def _joinable(self) -> Facts:
        """A flow, and an execution that may join it."""
        flow = await submitted(self.engine, "a")
        new = await self.engine.create(execution_id=flow.new_member_id())
        return self._of(flow) | {"execution_id": new}

    async def _promised(self) -> Facts:
        """A flow, and a member of another flow in its partition."""
        counts, flow = self.backend.counts, await submitted(self.engine, "a")
        partition = flow_partition(flow.flow_id, counts)
        ids = (new_uuid() for _ in itertools.count())
        other = next(each for each in ids if flow_partition(each, counts) == partition)
        member = await submitted(self.engine, "a", flow_id=other)
        return self._of(flow) | {"execution_id": member.nodes["a"]}

    async def _stranger(self) -> Facts:
        """A flow, and an execution that does not exist."""
        facts = await self._flow()
        return facts | {"execution_id": facts["gone"]}

    async def _finished(self) -> Facts:
        flow = await submitted(self.engine, "a")
        await flow.end("a")
        return self._of(flow)

    async def _ended(self) -> Facts:
        """A cancelled flow, and an execution that would join it."""
        facts = await self._joinable()
        await self.backend.flows.cancel_flow(facts["id"], wait_timeout_ms=5000)
        return facts

    # --- the rest -----------------------------------------------------------------------------

    async def _lane_of_its_own(self) -> Facts:
        return {"lane": (await self._waiting())["lane"]}

    async def _disabled(self) -> Facts:
        lane = self._lane()
        await self.backend.lanes.set_lane_state(lane, "disabled")
        return {"lane": lane}

    async def _budget(self) -> Facts:
        return {"id": await new_budget(self.backend, {"tokens": 10})}

    async def _attached(self) -> Facts:
        """A budget that an execution waits for."""
        budget_id = (await self._budget())["id"]
        waiting = (await self._waiting())["id"]
        await self.backend.budgets.note_blocked(budget_id, [waiting])
        await self.backend.claims.block_execution_for_admission(
            waiting, "waiting_for_budget", reason_detail=f"budget {budget_id}: tokens 10/10"
        )
        return {"id": budget_id}

    async def _quota(self) -> Facts:
        quota_policy_id = new_uuid()
        await self.backend.quotas.create_quota_policy(
            quota_policy_id, window_seconds=60, max_requests_per_window=5, max_concurrent=1
        )
        return {"id": quota_policy_id}

    async def _secret(self) -> Facts:
        await Waits.open(self.engine)
        kid = new_uuid()
        await self.backend.secrets.rotate_waitpoint_hmac_secret_all(kid, "ef" * 32, 60_000)
        return {"kid": kid}

    async def _rotation(self) -> Facts:
        await Waits.open(self.engine)
        body = {"new_kid": new_uuid(), "new_secret_hex": "cd" * 32}
        answer = await self.http.post("/v1/admin/rotate-waitpoint-secret", body)
        return {"id": answer.json["rotation_id"]}

    async def _scanner(self) -> Facts:
        return {"name": "lease_expiry"}

    # --- positions that are gone --------------------------------------------------------------

    async def _trimmed(self) -> Facts:
        """An execution whose first position was trimmed."""
        facts = await self._waiting()
        cursor = await self._position(f"/v1/executions/{facts['id']}/events")
        await self._trim(facts)
        return facts | {"cursor": cursor}

    async def _trimmed_flow(self) -> Facts:
        flow = await submitted(self.engine, "a")
        cursor = await self._position(f"/v1/flows/{flow.flow_id}/events")
        await flow.end("a")
        await self.engine.trim_feed(flow.nodes["a"])
        return {"id": flow.flow_id, "cursor": cursor}

    async def _trimmed_feed(self) -> Facts:
        facts = await self._waiting()

        async def something() -> None:
            await self.engine.claim(lane=facts["lane"])
            await self.backend.leases.revoke_lease(facts["id"])

        cursor = await self._position("/v1/events", something)
        await self.backend.executions.cancel_execution(facts["id"])
        await self.engine.trim_feed(facts["id"])
        return {"cursor": cursor}

    async def _trim(self, facts: Facts) -> None:
        await self.engine.claim(lane=facts["lane"])
        await self.backend.executions.cancel_execution(facts["id"])
        await self.engine.trim_feed(facts["id"])

    async def _position(self, path: str, happens: Any = None) -> str:
        """The position of the first event."""
        async with self.http.open("GET", path) as (reader, status, _):
            assert status == 200
            if happens is not None:
                await happens()
            while not (line := await reader.readline()).startswith(b"id: "):
                pass
        return line[4:].decode().strip()
