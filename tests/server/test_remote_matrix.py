"""What holds for every call of a worker elsewhere about its attempts: one row per rule and call."""

from __future__ import annotations

from base64 import b64decode
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.ids import ExecutionId, budget_id, new_uuid
from flowfabric.server.auth import new_token, write_tokens
from tests.server.conftest import Serving
from tests.server.test_remote import state, text_of
from tests.server.test_remote_attempts import lost, take
from tests.support.budgets import new_budget
from tests.support.engine import Engine
from tests.support.http import Http
from tests.support.suspension import SECRET

CALLS: dict[str, dict[str, Any]] = {
    "renew": {},
    "complete": {"result_b64": "eA=="},
    "fail": {"reason": "no"},
    "delay": {"delay_until": 4_000_000_000_000},
    "suspend": {"waitpoint_key": "k"},
    "frames": {"frames": [{"text": "x"}], "seq": 1},
    "progress": {"pct": 5},
    "usage": {"budget": "team", "dimensions": {"tokens": 5}, "dedup_key": "k"},
}
FENCED = [name for name in CALLS if name != "usage"]
"""What was spent counts whoever holds the lease (07 §3)."""
REFUSED = {
    "suspend: a later attempt": (400, "invalid_lease_for_suspend"),
    "frames": (409, "stale_owner_cannot_append"),
    "frames: no execution": (409, "stream_closed"),
}
"""What forged handles get if not 409 `stale_lease` or 404 `execution_not_found` (05 §4, 06 §4)."""
every_call = pytest.mark.parametrize("name", CALLS)
every_fenced_call = pytest.mark.parametrize("name", FENCED)


@pytest.fixture(autouse=True)
async def prepared(engine: Engine) -> None:
    await engine.backend.secrets.seed_at_boot(SECRET)
    await engine.freeze(1_900_000_000_000)


async def rows(http: Http, name: str, *handles: str) -> list[dict[str, Any]]:
    items = [{"handle": handle, **CALLS[name]} for handle in handles]
    answer = await http.post(f"/v1/remote/{name}", {"items": items})
    assert answer.status == 200, answer.body
    return answer.json["results"]


async def team_budget(engine: Engine) -> None:
    await new_budget(engine.backend, {"tokens": 100}, budget_id=budget_id("team"))


@every_call
async def test_a_lost_answer(http: Http, engine: Engine, name: str) -> None:
    """The call takes effect once, and its repeats get one answer."""
    await team_budget(engine)
    _, handle = await take(http, engine)
    await lost(http, name, handle=handle, **CALLS[name])
    once = await engine.digest()
    (first,), (second,) = [await rows(http, name, handle) for _ in range(2)]
    assert first["status"] == 200
    assert second == first
    assert await engine.digest() == once


@every_call
async def test_items_of_one_batch(http: Http, engine: Engine, name: str) -> None:
    """Each has its own row, in order; a broken one does not affect the others."""
    await team_budget(engine)
    handles = [(await take(http, engine))[1] for _ in range(2)]
    one, broken, two = await rows(http, name, handles[0], "?", handles[1])
    assert [one["status"], broken["status"], two["status"]] == [200, 400, 200]
    assert broken["detail"].startswith("handle: is malformed")


@every_call
@pytest.mark.parametrize("count", [0, 1001])
async def test_the_size_of_a_batch(http: Http, name: str, count: int) -> None:
    answer = await http.post(f"/v1/remote/{name}", {"items": [{}] * count})
    assert answer.kind == (400, "invalid_input")
    assert f"1 to 1000 items, got {count}" in answer.json["detail"]


@every_fenced_call
async def test_forged_handles(http: Http, engine: Engine, name: str) -> None:
    """Who does not hold the lease changes nothing."""
    execution_id, known = await take(http, engine)
    other_id, other = await take(http, engine)
    handle, others = (Handle.decode(b64decode(each)) for each in (known, other))
    epoch = f"{handle.lease_id}/{handle.lease_epoch + 1}"
    forged = {
        "a later epoch": msgspec.structs.replace(handle, lease=epoch),
        "another lease": msgspec.structs.replace(handle, lease=f"{new_uuid()}/1"),
        "the lease of another execution": msgspec.structs.replace(handle, lease=others.lease),
        "a later attempt": msgspec.structs.replace(handle, attempt=f"{handle.attempt_id}/1"),
    }
    refused = REFUSED.get(name, (409, "stale_lease"))
    before = await engine.digest()
    for what, each in forged.items():
        (row,) = await rows(http, name, text_of(each))
        assert (row["status"], row["code"]) == REFUSED.get(f"{name}: {what}", refused)
        # A refused append is counted in the record.
        assert name == "frames" or await engine.digest() == before, what
    unknown = msgspec.structs.replace(
        handle, execution_id=ExecutionId(f"{execution_id.tag}:{new_uuid()}")
    )
    (row,) = await rows(http, name, text_of(unknown))
    missing = REFUSED.get(f"{name}: no execution", (404, "execution_not_found"))
    assert (row["status"], row["code"]) == missing
    for each in (execution_id, other_id):
        assert await state(engine, each) == "active"


@every_call
async def test_namespaces_of_tokens(
    serve: Serving, engine: Engine, tmp_path: Path, name: str
) -> None:
    file = tmp_path / "tokens.toml"
    token, stored = new_token("worker", ["remote"], ["acme"])
    write_tokens(file, [stored])
    await team_budget(engine)
    theirs = await engine.running()
    mine = await engine.running(namespace="acme")
    async with serve(tokens_file=file) as http:
        worker = http.with_token(token)
        before = await engine.digest()
        (row,) = await rows(worker, name, text_of(theirs))
        assert (row["status"], row["code"]) == (404, "execution_not_found")
        (row,) = await rows(worker, name, text_of(mine))
        if name == "usage":
            # The budget is of the default namespace.
            assert (row["status"], row["code"]) == (403, "forbidden")
            assert await engine.digest() == before
        else:
            assert row["status"] == 200
    assert await state(engine, theirs.execution_id) == "active"
