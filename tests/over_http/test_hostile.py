"""Hostile arguments for every operation: the answer is never the server's fault."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowfabric.engine.http.operations import Operation, operations
from tests.server.test_hostile import EXECUTION, UUID, anything, numbers, texts
from tests.support.engine import Engine
from tests.support.http import Http
from tests.support.http_engine import serving

LEASE = f"{UUID}/1"
HANDLE = {
    "execution_id": EXECUTION,
    "lease": LEASE,
    "attempt": f"{UUID}/0",
    "lease_ttl_ms": 1000,
    "lane_id": "default",
    "worker_instance_id": "w-1",
}
known = st.sampled_from([EXECUTION, UUID, "default", 0, 1, "active", HANDLE, [HANDLE], [EXECUTION]])
values = known | texts | numbers | anything
WAITING = ("block_ms", "wait_timeout_ms", "wait_s")


def arguments(operation: Operation) -> st.SearchStrategy[Any]:
    """Arguments by name, some of them missing; what would only wait is left out."""
    names = [name for name in operation.types if name not in WAITING]
    return st.fixed_dictionaries({}, optional=dict.fromkeys(names, values)) | anything


@pytest.mark.corrupts
@pytest.mark.parametrize("noun", operations())
async def test_no_argument_makes_an_operation_fail(backend: Any, noun: str) -> None:
    sent: list[tuple[str, Any]] = []

    @settings(max_examples=8, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(data=st.data())
    def collect(data: st.DataObject) -> None:
        sent.extend(
            (operation.path, data.draw(arguments(operation)))
            for operation in operations()[noun].values()
        )

    await asyncio.get_running_loop().run_in_executor(None, collect)
    async with serving(Engine(backend)) as server:
        http = Http(server.address)
        for path, body in sent:
            raw = json.dumps(body).encode()
            answer = await http.send("POST", path, raw, {"content-type": "application/json"})
            assert answer.status < 500, (path, body, answer.body)
