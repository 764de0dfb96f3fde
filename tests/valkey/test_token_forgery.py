"""No forged token is ever taken, and none learns anything."""

from __future__ import annotations

from flowfabric.core.conditions import Single
from flowfabric.core.contracts.suspension import Accepted
from tests.support.engine import Engine, refused
from tests.support.forgeries import FORGERS, Target, attack, forgeries
from tests.support.leases import running
from tests.support.sdk import seeded
from tests.support.suspension import Waits


async def targets(waits: Waits, count: int) -> list[Target]:
    """Open waitpoints of different executions on one partition, with a retired kid beside."""
    found: list[Target] = []
    for _ in range(count):
        parked = await waits.park(Single("k"), handle=await running(waits.engine))
        (stored,) = await waits.waitpoints(parked)
        found.append(
            Target.of(parked.handle.execution_id, parked.details, int(stored["created_at"]))
        )
    store = f"ff:sec:{found[0].execution_id.tag}:waitpoint_hmac"
    await waits.write(store, **{"secret:retired": "ab" * 32, "expires_at:retired": 1})
    return found


async def test_thousands_of_forgeries(engine: Engine) -> None:
    waits = await Waits.open(engine)
    known = await targets(waits, 5)
    seen = await attack(engine.backend, known, 4000, seeded("forgeries").getrandbits(32))
    assert seen.total() == 4000
    kinds = {kind for kind, _ in seen}
    assert kinds == {*FORGERS, "other_execution", "unknown_waitpoint"}
    codes = {kind: {code for k, code in seen if k == kind} for kind in kinds}
    assert codes.pop("other_execution") == {"invalid_waitpoint_for_execution"}
    assert codes.pop("retired_kid") == {"token_expired"}
    assert set().union(*codes.values()) == {"invalid_token"}
    for target in known:
        vector = await engine.vector(target.execution_id)
        assert vector.lifecycle_phase == "suspended"
        pages = await engine.backend.waitpoints.list_pending_waitpoints(target.execution_id)
        assert len(pages.entries) == 1
        outcome = await engine.backend.signals.deliver_signal(
            target.execution_id, target.waitpoint_id, target.token, "go"
        )
        assert isinstance(outcome, Accepted), "the real one still works"
    feed = [e for t in known for e in await engine.events(t.execution_id) if e.type == "signal"]
    assert len(feed) == len(known), "no forgery left an event"


async def test_the_same_seed_forges_the_same(engine: Engine) -> None:
    waits = await Waits.open(engine)
    known = await targets(waits, 2)
    first, second = forgeries(known, 7), forgeries(known, 7)
    for _ in range(200):
        one, two = next(first), next(second)
        assert (one.kind, one.token) == (two.kind, two.token)
        real = [(t.execution_id, t.waitpoint_id, t.token) for t in known]
        assert (one.execution_id, one.waitpoint_id, one.token) not in real


async def test_a_token_of_another_partition(engine: Engine) -> None:
    waits = await Waits.open(engine)
    here = await waits.park(handle=await running(engine))
    there = await waits.park(handle=await running(engine, lane="other"))
    assert here.handle.execution_id.tag != there.handle.execution_id.tag
    # The same secret signs there, yet the waitpoint is not known here.
    await refused(
        waits.signal(there.handle.execution_id, here.details.waitpoints[0]), "invalid_token"
    )
