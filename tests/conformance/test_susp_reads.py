"""Listings and the token read: paging, order, and no token where none belongs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.core.conditions import AllOf, Condition, Count, OperatorOnly, Single, TimeoutOnly
from flowfabric.core.contracts.suspension import SuspendedEntry
from flowfabric.core.ids import ExecutionId, WaitpointToken, new_uuid
from tests.support.engine import Engine, refused, untouched
from tests.support.leases import running
from tests.support.suspension import SECRET, Waits

# --- waitpoints ---------------------------------------------------------------------------------


async def test_open_waitpoints_of_an_execution(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    await engine.freeze(await engine.now())
    now = await engine.now()
    closed = await waits.backend.waitpoints.create_waitpoint(handle, "k", 60_000)
    await waits.backend.waitpoints.close_waitpoint(handle.execution_id, closed.waitpoint_id)
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "p", 60_000)
    parked = await waits.park(handle=handle, timeout_at=now + 5000)
    page = await waits.backend.waitpoints.list_pending_waitpoints(handle.execution_id)
    assert page.next_cursor is None
    assert [e.waitpoint_id for e in page.entries] == sorted(
        [pending.waitpoint_id, parked.details.waitpoint_id]
    )
    entries = {entry.state: entry for entry in page.entries}
    active = entries["active"]
    assert (active.waitpoint_key, active.required_signal_names) == ("k", ("go",))
    assert (active.created_at, active.activated_at, active.expires_at) == (now, now, now + 5000)
    assert active.execution_id == handle.execution_id
    assert active.token_kid == "k1"
    assert active.token_fingerprint == parked.details.waitpoint_token.fingerprint
    assert (entries["pending"].activated_at, entries["pending"].expires_at) == (None, now + 60_000)
    assert entries["pending"].required_signal_names == ()


@pytest.mark.parametrize(
    ("condition", "names"),
    [
        (Single("k"), {"k": ()}),
        (OperatorOnly(), {None: ("__operator_only__",)}),
        (TimeoutOnly(), {None: ("__timeout_only__",)}),
        (
            AllOf(
                (
                    Single("k", "a"),
                    Count(n=1, waitpoints=("k", "l"), signal_name="b"),
                    AllOf((Single("l", "c"), Single("k", "a"), Single("m"))),
                )
            ),
            {"k": ("a", "b"), "l": ("b", "c"), "m": ()},
        ),
    ],
)
async def test_names_a_waitpoint_waits_for(
    engine: Engine, condition: Condition, names: dict[str | None, tuple[str, ...]]
) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(condition, timeout_at=await engine.now() + 60_000)
    page = await waits.backend.waitpoints.list_pending_waitpoints(parked.handle.execution_id)
    found = {
        None if entry.waitpoint_key.startswith("wpk:") else entry.waitpoint_key: (
            entry.required_signal_names
        )
        for entry in page.entries
    }
    assert found == names


async def test_more_than_a_thousand_waitpoints(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    made = sorted(
        [
            (await waits.backend.waitpoints.create_waitpoint(handle, "k", 60_000)).waitpoint_id
            for _ in range(1250)
        ]
    )
    # A whole page of closed ones in front must not end the listing.
    for one in made[:1100]:
        await waits.backend.waitpoints.close_waitpoint(handle.execution_id, one)
    listing = waits.backend.waitpoints.list_pending_waitpoints
    page = await listing(handle.execution_id)
    assert [e.waitpoint_id for e in page.entries] == made[1100:1200]
    assert page.next_cursor is not None
    assert page.next_cursor == made[1199]
    rest = await listing(handle.execution_id, page.next_cursor, 5000)
    assert [e.waitpoint_id for e in rest.entries] == made[1200:]
    assert rest.next_cursor is None
    one = await listing(handle.execution_id, limit=0)
    assert [e.waitpoint_id for e in one.entries] == made[1100:1101], "at least one"
    exact = await listing(handle.execution_id, limit=150)
    assert (len(exact.entries), exact.next_cursor) == (150, None)
    empty = await listing(handle.execution_id, made[-1])
    assert (empty.entries, empty.next_cursor) == ((), None)


async def test_an_unknown_execution(engine: Engine) -> None:
    waits = Waits(engine)
    await refused(
        waits.backend.waitpoints.list_pending_waitpoints(engine.new_id()), "execution_not_found"
    )
    assert (
        await waits.backend.waitpoints.list_pending_waitpoints(await engine.create())
    ).entries == ()


async def test_no_listing_carries_a_token(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(timeout_at=await engine.now() + 60_000)
    execution_id, raw = parked.handle.execution_id, parked.details.waitpoint_token.reveal()
    digest = raw.partition(":")[2]
    backend = waits.backend
    shown: list[Any] = [
        await backend.waitpoints.list_pending_waitpoints(execution_id),
        await backend.suspensions.list_suspended(),
        await backend.reads.describe_execution(execution_id),
        await backend.reads.read_execution_info(execution_id),
        await backend.reads.explain_execution(execution_id),
        await backend.reads.read_execution_history(execution_id),
        await engine.events(execution_id),
        await backend.secrets.list_waitpoint_hmac_kids(),
    ]
    for view in shown:
        for text in (repr(view), str(view), msgspec.json.encode(view, enc_hook=str).decode()):
            assert digest not in text
            assert SECRET not in text


# --- the token ----------------------------------------------------------------------------------


async def test_the_token_of_an_open_waitpoint(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await running(engine)
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", 60_000)
    parked = await waits.park(handle=await running(engine))
    read = waits.backend.signals.read_waitpoint_token
    async with untouched(engine):
        token = await read(handle.execution_id, pending.waitpoint_id)
        assert isinstance(token, WaitpointToken)
        assert token == pending.waitpoint_token
        execution_id, point = parked.handle.execution_id, parked.details.waitpoint_id
        assert await read(execution_id, point) == parked.details.waitpoint_token
        assert await read(execution_id, pending.waitpoint_id) is None, "another execution's"
        assert await read(execution_id, new_uuid()) is None
        assert await read(engine.new_id(), point) is None
        await refused(read(execution_id, "x"), "invalid_input")
    await waits.send(parked)
    assert await read(execution_id, point) is None, "closed"


async def test_after_its_grace_the_token_is_minted_again(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    execution_id, point = parked.handle.execution_id, parked.details.waitpoint_id
    await waits.backend.secrets.rotate_waitpoint_hmac_secret_all("k2", "cd" * 32, 1000)
    read = waits.backend.signals.read_waitpoint_token
    assert await read(execution_id, point) == parked.details.waitpoint_token, "in its grace"
    await engine.advance(1001)
    await refused(waits.send(parked), "token_expired")
    fresh = await read(execution_id, point)
    assert fresh is not None
    assert fresh.kid == "k2"
    assert await read(execution_id, point) == fresh
    await waits.backend.signals.deliver_signal(execution_id, point, fresh, "go")


# --- suspended executions -----------------------------------------------------------------------


async def test_a_suspended_row(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running(lane="gpu")
    await engine.freeze(await engine.now())
    now = await engine.now()
    parked = await waits.park(
        handle=handle,
        timeout_at=now + 5000,
        reason_code="waiting_for_approval",
        requested_by="policy",
    )
    expected = SuspendedEntry(
        execution_id=handle.execution_id,
        lane_id="gpu",
        reason="waiting_for_approval",
        suspension_id=parked.details.suspension_id,
        requested_by="policy",
        suspended_at=now,
        timeout_at=now + 5000,
    )
    for partition in (None, handle.execution_id.partition):
        page = await waits.backend.suspensions.list_suspended(partition=partition)
        assert page.entries == (expected,)
        assert page.next_cursor is None
    assert (await waits.backend.suspensions.list_suspended(limit=0)).entries == ()
    await waits.send(parked)
    assert (await waits.backend.suspensions.list_suspended()).entries == ()


async def test_suspended_order_and_paging_over_lanes_and_partitions(engine: Engine) -> None:
    waits = await Waits.open(engine)
    now = await engine.now()
    everyone: list[tuple[int, int, str]] = []
    for lane, timeouts in (
        ("default", [None, 3, None, 1]),
        ("gpu", [2, None]),
        ("a:b", [None, 2, 2]),
    ):
        for timeout in timeouts:
            handle = await running(engine, lane=lane)
            at = None if timeout is None else now + timeout * 10_000
            await waits.park(handle=handle, timeout_at=at)
            score = 9_999_999_999_999 if at is None else at
            everyone.append((handle.execution_id.partition, score, handle.execution_id))
    wanted = [ExecutionId(text) for _, _, text in sorted(everyone)]
    for limit in (1, 2, 3, 4, 9, 100):
        found: list[ExecutionId] = []
        cursor = ""
        pages = 0
        while True:
            page = await waits.backend.suspensions.list_suspended(cursor=cursor, limit=limit)
            found += [entry.execution_id for entry in page.entries]
            pages += 1
            if page.next_cursor is None:
                break
            assert len(page.entries) == limit
            cursor = page.next_cursor
        assert found == wanted
        assert pages == -(-len(wanted) // limit), "no empty last page"


async def test_two_lanes_of_one_partition_are_merged(engine: Engine) -> None:
    waits = await Waits.open(engine)
    now = await engine.now()
    rows: list[tuple[int, str]] = []
    for position in range(6):
        lane = "x" if position % 2 else "y"
        execution_id = engine.new_id("same")
        handle = await running(engine, lane=lane, execution_id=execution_id)
        await waits.park(handle=handle, timeout_at=now + 60_000 - position)
        rows.append((now + 60_000 - position, execution_id))
    found: list[str] = []
    cursor = ""
    while True:
        page = await waits.backend.suspensions.list_suspended(
            partition=engine.new_id("same").partition, cursor=cursor, limit=2
        )
        found += [entry.execution_id for entry in page.entries]
        if page.next_cursor is None:
            break
        cursor = page.next_cursor
    assert found == [text for _, text in sorted(rows)]


async def test_a_cursor_survives_the_row_it_points_at(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = [await waits.park(handle=await running(engine)) for _ in range(6)]
    ids = sorted(one.handle.execution_id for one in parked)
    page = await waits.backend.suspensions.list_suspended(limit=3)
    assert [e.execution_id for e in page.entries] == ids[:3]
    for gone in (ids[2], ids[0]):
        await waits.backend.suspensions.resume_execution(gone)
    assert page.next_cursor is not None
    rest = await waits.backend.suspensions.list_suspended(cursor=page.next_cursor, limit=10)
    assert [e.execution_id for e in rest.entries] == ids[3:], "none skipped, none repeated"


async def test_bad_cursors_and_partitions(engine: Engine) -> None:
    waits = await Waits.open(engine)
    for _ in range(2):
        await waits.park(handle=await running(engine))
    listing = waits.backend.suspensions.list_suspended
    for cursor in ("x", "!!", "ü", "e30", "MXwyfDM"):
        await refused(listing(cursor=cursor), "invalid_cursor")
    for partition in (-1, 256):
        await refused(listing(partition=partition), "invalid_input")
    page = await listing(limit=1)
    assert page.next_cursor is not None
    other = (engine.new_id().partition + 1) % 256
    await refused(listing(cursor=page.next_cursor, partition=other), "invalid_cursor")
