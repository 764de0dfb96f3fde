"""Shorthands for tests of quota policies."""

from __future__ import annotations

from typing import Any

from flowfabric.core.contracts.quotas import (
    Admission,
    Admitted,
    AlreadyAdmitted,
    ConcurrencyExceeded,
    QuotaCreated,
    RateExceeded,
)
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.engine.api.backend import Backend
from tests.support.engine import Engine

WINDOW = 60_000
SLOT = 5000
SLACK = 500
"""What a slot lasts beyond the grant."""


async def policy(engine: Engine, **limits: Any) -> str:
    """Create a policy with these limits; its window is a minute unless told."""
    name = new_uuid()
    outcome = await engine.backend.quotas.create_quota_policy(name, **limits)
    assert outcome == QuotaCreated(name)
    return name


async def admit(
    engine: Engine, name: str, execution_id: ExecutionId | None = None, **options: Any
) -> str:
    """The word for what became of it."""
    answer = await answered(engine.backend, name, execution_id or engine.new_id(), **options)
    return word(answer)


async def answered(
    backend: Backend, name: str, execution_id: ExecutionId, **options: Any
) -> Admission:
    return await backend.quotas.check_admission(name, execution_id, **options)


def word(answer: object) -> str:
    match answer:
        case Admitted():
            return "admitted"
        case AlreadyAdmitted():
            return "already"
        case RateExceeded(retry_after_ms):
            return f"rate {retry_after_ms}"
        case ConcurrencyExceeded(retry_after_ms):
            return "concurrency" if retry_after_ms is None else f"concurrency {retry_after_ms}"
        case _:
            raise AssertionError(answer)


async def used(engine: Engine, name: str) -> tuple[int, int]:
    """How many places of the window and how many slots are taken."""
    status = await engine.backend.quotas.get_quota_status(name)
    return status.window_count, status.slots_held
