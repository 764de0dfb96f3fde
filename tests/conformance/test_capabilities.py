"""`capabilities()` says what the backend can do, and the backend does it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from flowfabric import __version__
from flowfabric.core.errors import UnavailableError
from flowfabric.scheduler.grants import NoWork, WorkerGrants
from tests.conformance.argument_calls import CALLS
from tests.support.engine import Engine
from tests.support.suspension import SECRET

FLAGS = """
cancel_execution, change_priority, replay_execution, revoke_lease, read_execution_state,
read_execution_info, get_execution_result, budget_admin, quota_admin,
rotate_waitpoint_hmac_secret_all, seed_waitpoint_hmac_secret, list_pending_waitpoints,
cancel_flow_header, cancel_flow_wait_timeout, cancel_flow_wait_indefinite, ack_cancel_member,
claim_for_worker, issue_reclaim_grant, prepare, subscribe_lease_history, subscribe_completion,
subscribe_signal_delivery, subscribe_instance_tags, stream_durable_summary,
stream_best_effort_live, register_worker, heartbeat_worker, mark_worker_dead, list_expired_leases,
list_workers, release_admission, read_quota_policy_limits, block_execution_for_admission,
read_budget_usage_and_limits, subscribe_operator_events, subscribe_worker_events
"""

OPERATIONS = {
    "budget_admin": "create_budget",
    "quota_admin": "create_quota_policy",
    "cancel_flow_wait_timeout": "cancel_flow",
    "cancel_flow_wait_indefinite": "cancel_flow",
    "stream_durable_summary": "read_summary",
    "stream_best_effort_live": "append_frame",
}
"""What to call for the flags that do not name an operation."""

NOUNS = (
    *("executions", "reads", "leases", "claims", "secrets", "waitpoints", "events", "streams"),
    *("workers", "meta", "flows", "steps", "budgets", "quotas"),
)


def operation(engine: Engine, name: str) -> Callable[..., Awaitable[Any]] | None:
    nouns = (getattr(engine.backend, noun) for noun in NOUNS)
    return next((getattr(noun, name) for noun in nouns if hasattr(noun, name)), None)


def test_the_flags_keep_their_order(engine: Engine) -> None:
    supports = engine.backend.meta.capabilities().supports
    assert list(supports) == re.findall(r"\w+", FLAGS)


@pytest.mark.parametrize("flag", re.findall(r"\w+", FLAGS))
async def test_a_flag_says_what_the_backend_does(engine: Engine, flag: str) -> None:
    name = OPERATIONS.get(flag, flag)
    call = operation(engine, name)
    if not engine.backend.meta.capabilities().supports[flag]:
        assert call is not None
        with pytest.raises(UnavailableError) as caught:
            await call("some", argument="any")
        assert (caught.value.code, caught.value.op) == ("unavailable", name)
        assert caught.value.details == (name,)
        return
    assert call is not None
    await engine.backend.secrets.seed_at_boot(SECRET)
    given = await CALLS[name](engine) if name in CALLS else {}
    found = await call(**given | given.pop("options", {}))
    if flag.startswith("subscribe"):
        await found.aclose()


async def test_no_operation_of_a_missing_noun_is_a_crash(engine: Engine) -> None:
    steps = cast("Any", engine.backend.steps)
    for call in (steps.watch_completion, steps.deliver_child_completions):
        with pytest.raises(UnavailableError, match=f"unavailable: {call.op}"):
            await call()
    with pytest.raises(AttributeError):
        await steps.watch_completio()


async def test_it_says_which_backend_it_is(engine: Engine) -> None:
    meta = engine.backend.meta
    identity = meta.capabilities().identity
    version = identity.version
    assert identity.family == meta.backend_label() == "valkey"
    assert f"{version.major}.{version.minor}.{version.patch}" == __version__


async def test_claim_for_worker_depends_on_a_scheduler(engine: Engine) -> None:
    meta, claims = engine.backend.meta, cast("Any", engine.backend.claims)
    assert not meta.capabilities().supports["claim_for_worker"]
    WorkerGrants(engine.backend).attach()
    assert meta.capabilities().supports["claim_for_worker"]
    assert await claims.claim_for_worker("default", "pool", "pool-1") == NoWork()
