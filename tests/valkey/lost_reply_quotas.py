"""Calls about quota policies, to be made with and without their replies."""

from __future__ import annotations

from typing import Any

from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import quota_partition
from flowfabric.engine.valkey.backend import ValkeyBackend
from tests.support.engine import Engine
from tests.valkey.lost_reply_case import Case, nothing

POLICY = "00000000-0000-4000-8000-00000000000a"
FIRST, SECOND = (
    ExecutionId.parse(f"{{fp:86}}:00000000-0000-4000-8000-{n:012d}") for n in (101, 102)
)


async def created(engine: Engine) -> None:
    await engine.backend.quotas.create_quota_policy(
        POLICY, max_requests_per_window=2, max_concurrent=1
    )


async def admitted(engine: Engine) -> str:
    await created(engine)
    (answer,) = await engine.backend.quotas.admit_many(POLICY, [FIRST])
    return getattr(answer, "request_id", "")


async def confirmed(engine: Engine) -> None:
    await admitted(engine)
    await engine.backend.quotas.confirm_admission(POLICY, FIRST)


def partition(backend: ValkeyBackend) -> int:
    return quota_partition(POLICY, backend.counts)


def kinds(answers: Any) -> list[str]:
    return [answer.kind for answer in answers]


QUOTA_CASES = {
    "quota_create": Case(
        "ff_quota_create",
        nothing,
        lambda b, _: b.quotas.create_quota_policy(POLICY, max_requests_per_window=5),
    ),
    "quota_update": Case(
        "ff_quota_update", created, lambda b, _: b.quotas.update_quota_policy(POLICY, jitter_ms=7)
    ),
    "quota_admit": Case(
        "ff_quota_admit",
        created,
        lambda b, _: b.quotas.admit_many(POLICY, [FIRST, SECOND]),
        kinds,
    ),
    "quota_admit_again": Case(
        "ff_quota_admit", admitted, lambda b, _: b.quotas.admit_many(POLICY, [FIRST]), kinds
    ),
    "quota_confirm": Case(
        "ff_quota_confirm", admitted, lambda b, _: b.quotas.confirm_admission(POLICY, FIRST)
    ),
    "quota_release": Case(
        "ff_quota_release", confirmed, lambda b, _: b.quotas.release_admission(POLICY, FIRST)
    ),
    "quota_rollback": Case(
        "ff_quota_release",
        admitted,
        lambda b, request: b.quotas.release_many(POLICY, [FIRST], rollback=request),
    ),
    "quota_block": Case(
        "ff_quota_block", created, lambda b, _: b.quotas.note_blocked(POLICY, [FIRST, SECOND])
    ),
    "quota_reconcile": Case(
        "ff_quota_reconcile",
        confirmed,
        lambda b, _: b.quotas.reconcile_quota_counters(partition(b)),
        lambda outcome: outcome.policies,
    ),
}
