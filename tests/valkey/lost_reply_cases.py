"""One call of every function that writes, to be made with and without its reply."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, cast

from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.leases import Granted
from flowfabric.core.ids import ExecutionId
from flowfabric.core.policy import parse_policy
from flowfabric.core.state import ExpireReason
from flowfabric.engine.api.executions import Completion, FailedAttempt
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.feeds import ValkeyFeeds
from flowfabric.engine.valkey.places import ValkeyPlaces
from tests.support.engine import LANE, TTL, Engine
from tests.support.executions import POLICY
from tests.support.suspension import SECRET
from tests.valkey.lost_reply_admission import ADMISSION_CASES
from tests.valkey.lost_reply_budgets import BUDGET_CASES
from tests.valkey.lost_reply_case import Case, no_answer, nothing
from tests.valkey.lost_reply_flows import FLOW_CASES
from tests.valkey.lost_reply_lanes import LANE_CASES
from tests.valkey.lost_reply_quotas import QUOTA_CASES
from tests.valkey.lost_reply_steps import STEP_CASES

WORKER: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1"}
OTHER: dict[str, Any] = {"worker_id": "v", "worker_instance_id": "v-1"}
EPOCH = 1_900_000_000_000
DUE = EPOCH + 5000


def fixed(n: int) -> ExecutionId:
    """Ids that are the same in both runs."""
    return ExecutionId.parse(f"{{fp:86}}:00000000-0000-4000-8000-{n:012d}")


def new(n: int, **fields: Any) -> NewExecution:
    return NewExecution(
        execution_id=fixed(n), execution_kind="job", policy=parse_policy(POLICY), **fields
    )


async def unused_lane(engine: Engine) -> None:
    await engine.backend.places.register_places({"{fp:7}": ["mail"]})
    await engine.freeze(EPOCH + 60_001)


async def led(engine: Engine) -> None:
    assert await engine.backend.leadership.acquire("", "a:1:x", 60_000)


async def waiting(engine: Engine, n: int = 1) -> ExecutionId:
    await engine.backend.executions.create_execution(new(n, tags={"a.b": "c"}, input_payload=b"in"))
    return fixed(n)


async def running(engine: Engine) -> Any:
    await waiting(engine)
    return (await engine.claim()).handle


async def two_running(engine: Engine) -> Any:
    for n in (1, 2, 3):
        await waiting(engine, n)
    handles = [claim.handle for claim in await engine.claim_all(2)]
    return [Completion(handle, b"r", "json") for handle in handles]


async def paused(engine: Engine) -> ExecutionId:
    handle = await running(engine)
    await engine.backend.executions.delay(handle, 1)
    return handle.execution_id


async def lost(engine: Engine) -> Any:
    handle = await running(engine)
    await engine.freeze(EPOCH + TTL)
    await engine.backend.upkeep.mark_lease_expired_if_due(
        handle.execution_id.tag, [handle.execution_id]
    )
    return handle


async def blocked(engine: Engine) -> Any:
    handle = await running(engine)
    await engine.block(handle.execution_id)
    return handle


async def misplaced(engine: Engine) -> ExecutionId:
    execution_id = await waiting(engine)
    eligible = keys.eligible(execution_id.tag, LANE)
    await engine.backend.transport.call("ZREM", eligible, execution_id)
    return execution_id


async def owing(engine: Engine) -> ExecutionId:
    """A purge that is not finished."""
    backlog = keys.index(fixed(1).tag, "purge_backlog")
    for n in (0, 1):
        await engine.backend.transport.call("SET", keys.attempt(fixed(1).tag, fixed(1), n), "x")
    await engine.backend.transport.call("HSET", backlog, fixed(1), 2)
    return fixed(1)


async def with_waitpoint(engine: Engine) -> tuple[ExecutionId, str]:
    await engine.backend.secrets.seed_at_boot(SECRET)
    handle = await running(engine)
    pending = await engine.backend.waitpoints.create_waitpoint(handle, "go", 1000)
    return handle.execution_id, pending.waitpoint_id


async def with_waitpoint_due(engine: Engine) -> tuple[ExecutionId, str]:
    wait = await with_waitpoint(engine)
    await engine.freeze(EPOCH + 1000)
    return wait


async def known_worker(engine: Engine) -> None:
    await engine.backend.workers.register_worker(**WORKER, lanes=[LANE])


async def ended(engine: Engine) -> ExecutionId:
    handle = await running(engine)
    await engine.backend.executions.complete(handle, b"r")
    return handle.execution_id


async def delayed(engine: Engine) -> ExecutionId:
    await engine.backend.executions.create_execution(new(1, delay_until=DUE))
    await engine.freeze(DUE)
    return fixed(1)


async def overdue(engine: Engine) -> ExecutionId:
    handle = await running(engine)
    await engine.freeze(EPOCH + 20_000)
    return handle.execution_id


async def lapsed(engine: Engine) -> ExecutionId:
    handle = await running(engine)
    await engine.freeze(EPOCH + TTL)
    return handle.execution_id


async def old(engine: Engine) -> ExecutionId:
    execution_id = await ended(engine)
    await engine.freeze(EPOCH + 86_400_000)
    return execution_id


async def granted(engine: Engine) -> Any:
    return await engine.backend.claims.issue_claim_grant(await waiting(engine), **WORKER)


async def resume_granted(engine: Engine) -> Any:
    return await engine.backend.claims.issue_claim_grant(await paused(engine), **WORKER)


async def reclaim_granted(engine: Engine) -> Any:
    handle = await lost(engine)
    outcome = await engine.backend.claims.issue_reclaim_grant(handle.execution_id, **OTHER)
    assert isinstance(outcome, Granted)
    return outcome.grant


async def registered(engine: Engine) -> None:
    await engine.backend.workers.register_worker(**WORKER, lanes=[LANE])


def claim(backend: ValkeyBackend, _: Any) -> Awaitable[Any]:
    want = Engine(backend).want()
    return backend.claims.claim_many(want, fixed(1).tag, 5)


def only_ids(outcomes: Any) -> Any:
    """A repeated create finds its own execution, and says so."""
    return [outcome.execution_id for outcome in outcomes]


CASES: dict[str, Case] = {
    "create": Case(
        "ff_create",
        nothing,
        lambda backend, _: backend.executions.create_execution(
            new(1, input_payload=b"p", tags={"a.b": "c"})
        ),
        lambda outcome: outcome.execution_id,
    ),
    "create_with_key": Case(
        "ff_create",
        nothing,
        lambda backend, _: backend.executions.create_execution(new(1, idempotency_key="k")),
        lambda outcome: outcome.execution_id,
    ),
    "create_many": Case(
        "ff_create",
        nothing,
        lambda backend, _: backend.executions.create_many(
            [new(1), new(2, delay_until=DUE), new(3)]
        ),
        only_ids,
    ),
    "complete": Case(
        "ff_complete",
        running,
        lambda backend, handle: backend.executions.complete(handle, b"\xff", "raw"),
    ),
    "complete_many": Case(
        "ff_complete", two_running, lambda backend, items: backend.executions.complete_many(items)
    ),
    "complete_and_claim": Case(
        "ff_complete",
        two_running,
        lambda backend, items: backend.claims.complete_and_claim(
            fixed(1).tag, items, Engine(backend).want(), 5
        ),
    ),
    "fail_and_claim": Case(
        "ff_complete",
        two_running,
        lambda backend, items: backend.claims.complete_and_claim(
            *(fixed(1).tag, [FailedAttempt(items[0].handle, "x"), items[1]]),
            *(Engine(backend).want(), 5),
        ),
    ),
    "fail_retry": Case(
        "ff_fail",
        running,
        lambda backend, handle: backend.executions.fail(handle, "x", "transient"),
    ),
    "fail_final": Case(
        "ff_fail",
        running,
        lambda backend, handle: backend.executions.fail(handle, "x", "permanent"),
    ),
    "cancel_by_worker": Case(
        "ff_cancel", running, lambda backend, handle: backend.executions.cancel(handle, "x")
    ),
    "cancel_by_operator": Case(
        "ff_cancel", waiting, lambda backend, eid: backend.executions.cancel_execution(eid, "x")
    ),
    "delay": Case("ff_delay", running, lambda b, h: b.executions.delay(h, DUE)),
    "delay_due": Case("ff_delay", running, lambda b, h: b.executions.delay(h, 1)),
    "release_unknown": Case(
        "ff_release_unknown", running, lambda b, h: b.executions.release_unknown(h, "job")
    ),
    "wait_children": Case("ff_wait_children", blocked, lambda b, h: b.executions.wait_children(h)),
    "wait_children_ready": Case(
        "ff_wait_children", running, lambda b, h: b.executions.wait_children(h)
    ),
    "progress": Case(
        "ff_progress",
        running,
        lambda backend, handle: backend.executions.progress(handle, 5, "five"),
    ),
    "change_priority": Case(
        "ff_change_priority",
        waiting,
        lambda backend, eid: backend.executions.change_priority(eid, 5),
    ),
    "replay": Case(
        "ff_replay",
        ended,
        lambda backend, eid: backend.executions.replay_execution(eid, reason="x"),
    ),
    "replay_expected": Case(
        "ff_replay",
        ended,
        lambda backend, eid: backend.executions.replay_execution(eid, expected_replay_count=0),
    ),
    "purge_execution": Case(
        "ff_purge_execution", ended, lambda backend, eid: backend.executions.purge_execution(eid)
    ),
    "tags": Case(
        "ff_set_tags",
        waiting,
        lambda backend, eid: backend.executions.set_execution_tag(eid, "a.x", "y"),
    ),
    "claim_fresh": Case("ff_claim_many", waiting, claim),
    "claim_resumed": Case("ff_claim_many", paused, claim),
    "claim_reclaimed": Case("ff_claim_many", lost, claim),
    "claim_by_grant": Case(
        "ff_claim_execution",
        granted,
        lambda backend, grant: backend.claims.claim_execution(grant, **WORKER, lease_ttl_ms=TTL),
    ),
    "release_grant": Case(
        "ff_release_grant", granted, lambda backend, grant: backend.claims.release_grant(grant)
    ),
    "claim_resumed_by_grant": Case(
        "ff_claim_resumed",
        resume_granted,
        lambda backend, grant: backend.claims.claim_resumed_execution(
            grant, **WORKER, lease_ttl_ms=TTL
        ),
    ),
    "grant_and_claim": Case(
        "ff_grant_and_claim",
        waiting,
        lambda backend, eid: backend.claims.issue_grant_and_claim(eid, lease_duration_ms=TTL),
    ),
    "grant_and_claim_resumed": Case(
        "ff_grant_and_claim",
        paused,
        lambda backend, eid: backend.claims.issue_grant_and_claim(eid, lease_duration_ms=TTL),
    ),
    "claim_grant": Case(
        "ff_issue_claim_grant",
        waiting,
        lambda backend, eid: backend.claims.issue_claim_grant(eid, **WORKER),
    ),
    "reclaim_grant": Case(
        "ff_issue_reclaim_grant",
        lost,
        lambda backend, handle: backend.claims.issue_reclaim_grant(handle.execution_id, **OTHER),
    ),
    "reclaim": Case(
        "ff_reclaim",
        reclaim_granted,
        lambda backend, grant: backend.claims.reclaim_execution(grant, **OTHER, lease_ttl_ms=TTL),
    ),
    "renew": Case("ff_renew", running, lambda backend, handle: backend.leases.renew(handle)),
    "renew_many": Case(
        "ff_renew", running, lambda backend, handle: backend.leases.renew_many([handle])
    ),
    "revoke": Case(
        "ff_revoke",
        running,
        lambda backend, handle: backend.leases.revoke_lease(handle.execution_id, reason="x"),
    ),
    "register": Case(
        "ff_worker_register",
        nothing,
        lambda backend, _: backend.workers.register_worker(
            **WORKER, lanes=[LANE], only_if_absent=True
        ),
        # A repeat refreshes what the first call registered.
        no_answer,
    ),
    "heartbeat": Case(
        "ff_worker_heartbeat",
        registered,
        lambda backend, _: backend.workers.heartbeat_worker("w-1"),
    ),
    "mark_dead": Case(
        "ff_worker_dead",
        registered,
        lambda backend, _: backend.workers.mark_worker_dead("w-1"),
        no_answer,
    ),
    "promote": Case(
        "ff_promote_delayed",
        delayed,
        lambda backend, eid: backend.upkeep.promote_delayed(eid.tag, LANE, [eid]),
        no_answer,
    ),
    "mark_expired": Case(
        "ff_mark_expired",
        lapsed,
        lambda backend, eid: backend.upkeep.mark_lease_expired_if_due(eid.tag, [eid]),
        no_answer,
    ),
    "expire": Case(
        "ff_expire",
        overdue,
        lambda backend, eid: backend.upkeep.expire_execution(
            eid.tag, ExpireReason.ATTEMPT_TIMEOUT, [eid]
        ),
        no_answer,
    ),
    "trim": Case(
        "ff_trim",
        old,
        lambda backend, eid: backend.upkeep.trim_retention(eid.tag, LANE, [eid]),
        no_answer,
    ),
    "register_names": Case(
        "ff_register_names",
        nothing,
        lambda backend, _: backend.places.register_places({"{fp:7}": ["mail"]}),
        no_answer,
    ),
    "register_places": Case(
        "ff_register_places",
        nothing,
        lambda backend, _: backend.places.register_places({"{fp:7}": ["mail"]}),
        no_answer,
    ),
    "forget_places": Case(
        "ff_forget_places",
        unused_lane,
        lambda backend, _: backend.upkeep.forget_idle_lanes(),
        no_answer,
    ),
    "lead": Case(
        "ff_lead", nothing, lambda backend, _: backend.leadership.acquire("part", "a:1:x", 60_000)
    ),
    "resign": Case("ff_resign", led, lambda backend, _: backend.leadership.resign("", "a:1:x")),
    "ring_waiting": Case(
        "ff_ring_waiting",
        waiting,
        lambda backend, eid: backend.wakeups.ring_waiting({eid.tag: [LANE]}),
    ),
    "reconcile": Case(
        "ff_reconcile",
        misplaced,
        lambda backend, eid: backend.upkeep.reconcile_execution_index(eid.tag, [eid]),
        no_answer,
    ),
    "purge": Case("ff_purge", owing, lambda backend, eid: backend.upkeep.purge(eid.tag), no_answer),
    "seed_secret": Case(
        "ff_seed_secret",
        nothing,
        lambda backend, _: backend.secrets.seed_waitpoint_hmac_secret("k1", SECRET),
        no_answer,
    ),
    "close_waitpoint": Case(
        "ff_close_waitpoint",
        with_waitpoint,
        lambda backend, wait: backend.waitpoints.close_waitpoint(*wait),
        no_answer,
    ),
    "expire_waitpoint": Case(
        "ff_expire_waitpoint",
        with_waitpoint_due,
        lambda backend, wait: backend.suspensions.expire_waitpoints(wait[0].tag, [wait[1]]),
        no_answer,
    ),
    "waitpoint_token": Case(
        "ff_waitpoint_token",
        with_waitpoint,
        lambda backend, wait: backend.signals.read_waitpoint_token(*wait),
        lambda token: token is not None,
    ),
    "worker_register": Case(
        "ff_worker_register",
        nothing,
        lambda backend, _: backend.workers.register_worker(
            **WORKER, lanes=[LANE], only_if_absent=True
        ),
        no_answer,
    ),
    "worker_heartbeat": Case(
        "ff_worker_heartbeat",
        known_worker,
        lambda backend, _: backend.workers.heartbeat_worker("w-1"),
    ),
    "worker_sweep": Case(
        "ff_worker_sweep",
        nothing,
        lambda backend, _: backend.upkeep.sweep_workers("default"),
        no_answer,
    ),
    "group_join": Case(
        "ff_group_join",
        nothing,
        lambda backend, _: ValkeyFeeds(
            backend.calls, cast("ValkeyPlaces", backend.places)
        ).join_group("g", "m", 1000, "start"),
    ),
    "group_lease": Case(
        "ff_group_lease",
        nothing,
        lambda backend, _: ValkeyFeeds(
            backend.calls, cast("ValkeyPlaces", backend.places)
        ).lease_feed("fp:1", "g", "m", 1000, (5, 0)),
    ),
    "worker_dead": Case(
        "ff_worker_dead",
        known_worker,
        lambda backend, _: backend.workers.mark_worker_dead("w-1"),
        no_answer,
    ),
    **BUDGET_CASES,
    **ADMISSION_CASES,
    **FLOW_CASES,
    **LANE_CASES,
    **QUOTA_CASES,
    **STEP_CASES,
}
