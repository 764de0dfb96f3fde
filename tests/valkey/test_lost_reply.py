"""A lost reply: the automatic repeat has no second effect, and the caller gets the answer."""

from __future__ import annotations

import re
from typing import Any

import pytest

from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.valkey.address import parse_url
from tests.support.engine import Engine
from tests.support.proxy import FaultProxy
from tests.support.server import TestServer
from tests.valkey.lost_reply_case import Case
from tests.valkey.lost_reply_cases import CASES, EPOCH

# Minted ids, also as the prefix a claim derives its own from; the fixed ones stay.
_MINTED = re.compile(
    r"(?!00000000-0000)[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{8}(?:[0-9a-f]{4})?"
    # The token of a minted waitpoint.
    r"|k1:[0-9a-f]{40}"
    # The request that created a quota policy, or admitted a run.
    r"|(?<=b')[0-9a-f]{12}(?=')|(?<=b'\d )[0-9a-f]{12}(?= )"
)
_ENTRY = re.compile(r"\d{13}-\d+")
# What a worker's memo keeps of the requests it made.
_TRACES = re.compile(r"(:claimed:[^']+': b')[0-9a-f]+'")


def comparable(value: Any) -> str:
    """Text in which minted ids are numbered by their first appearance."""
    numbers: dict[str, str] = {}

    def numbered(match: re.Match[str]) -> str:
        return numbers.setdefault(match[0], f"<{len(numbers)}>")

    text = _TRACES.sub(lambda memo: f"{memo[1]}{len(memo[0]) - len(memo[1])}'", repr(value))
    return _MINTED.sub(numbered, _ENTRY.sub("<entry>", text))


async def run(engine: Engine, proxy: FaultProxy, case: Case, *, lose: bool) -> tuple[str, str]:
    """Answer and keyspace after the call, from an empty start."""
    backend = engine.backend
    await backend.transport.call("FLUSHALL")
    backend.places.known_places.clear()
    backend.places.known_namespaces.clear()
    await backend.meta.prepare()
    await engine.freeze(EPOCH)
    given = await case.setup(engine)
    client = await ValkeyBackend.connect(parse_url(proxy.url), prepare_with=PartitionCounts())
    try:
        if lose:
            proxy.drop_next_reply(case.function.encode())
        outcome = await case.call(client, given)
    finally:
        await client.aclose()
    return comparable(case.answer(outcome)), comparable(await engine.dump())


@pytest.mark.parametrize("name", sorted(CASES))
async def test_exactly_once(engine: Engine, valkey: TestServer, name: str) -> None:
    case = CASES[name]
    with FaultProxy(valkey.socket_path) as proxy:
        undisturbed = await run(engine, proxy, case, lose=False)
        assert proxy.dropped == 0
        disturbed = await run(engine, proxy, case, lose=True)
        assert proxy.dropped == 1
    assert disturbed[0] == undisturbed[0]
    assert disturbed[1] == undisturbed[1]


# Their repeats have tests of their own.
ELSEWHERE = {
    *("ff_append", "ff_create_waitpoint", "ff_expire_suspension", "ff_resume", "ff_rotate_secret"),
    *("ff_signal", "ff_suspend"),
    # They only note that somebody follows or listens.
    *("ff_stream_read", "ff_listen", "ff_listen_here"),
    # Nobody repeats these: a scanner looks again.
    *("ff_promote_blocked", "ff_resolve_edge"),
}


async def test_no_function_that_writes_is_left_out(engine: Engine) -> None:
    listed: Any = await engine.backend.transport.call("FUNCTION", "LIST")
    writing = {
        function[b"name"].decode()
        for function in listed[0][b"functions"]
        if b"no-writes" not in function[b"flags"]
    }
    assert {name for name in writing if not name.startswith("ff_test_")} == {
        *(case.function for case in CASES.values()),
        *ELSEWHERE,
    }
