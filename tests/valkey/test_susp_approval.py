"""Signals that the engine vouches for, and bridges that compare the token themselves."""

from __future__ import annotations

from flowfabric.core.conditions import Single
from flowfabric.core.contracts.suspension import Accepted, DuplicateSignal
from tests.support.engine import Engine
from tests.support.suspension import Waits


async def test_an_operator_approves_without_a_token(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(Single("k", "approved"))
    execution_id, point = parked.handle.execution_id, parked.details.waitpoint_id
    approve = waits.backend.signals.deliver_approval_signal
    rejected = await approve(execution_id, point, "rejected", idempotency_suffix="1")
    assert isinstance(rejected, Accepted)
    assert await approve(
        execution_id, point, "rejected", idempotency_suffix="1"
    ) == DuplicateSignal(rejected.signal_id)
    approved = await approve(
        execution_id, point, "approved", idempotency_suffix="1", decided_by="ann", payload=b"ok"
    )
    assert isinstance(approved, Accepted)
    assert approved.resumed, "one suffix, two names, two keys"
    claim = await engine.claim()
    (signal,) = await waits.backend.waitpoints.observe_signals(claim.handle)
    assert signal.signal_category == "approval"
    assert (signal.source_type, signal.source_identity) == ("operator", "ann")
    assert signal.payload == b"ok"
    stored = await waits.hash(f"ff:signal:{execution_id}:{approved.signal_id}")
    assert stored["target_scope"] == "execution"
    assert stored["idempotency_key"] == "approval:approved:1"
