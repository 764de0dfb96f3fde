"""A client that crosses a fork: the child opens its own sockets, the parent keeps its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.server import TestServer

SCRIPT = """
import asyncio, os, sys, uvloop
from flowfabric.valkey.address import parse_url
from flowfabric.valkey.transport import Transport

new_loop = uvloop.new_event_loop if sys.argv[2] == "uvloop" else asyncio.new_event_loop

async def chatter(client, who):
    async def one(n):
        text = f"{who} {n}".encode()
        assert await client.call("ECHO", text) == text
    await asyncio.gather(*(one(n) for n in range(2000)))
    return await client.call("CLIENT", "ID")

def child(client):
    with asyncio.Runner(loop_factory=new_loop) as runner:
        own = runner.run(chatter(client, "child"))
        runner.run(client.aclose())
        return own

async def parent():
    client = Transport(parse_url(sys.argv[1]))
    before = await client.call("CLIENT", "ID")
    in_flight = asyncio.ensure_future(client.call("BLPOP", "wake", 0, timeout=30))
    await asyncio.sleep(0)
    pid = os.fork()
    if pid == 0:
        try:
            own = child(client)
            os._exit(0 if own != before else 3)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(4)
    status = await asyncio.to_thread(os.waitpid, pid, 0)
    assert os.waitstatus_to_exitcode(status[1]) == 0, status
    other = Transport(parse_url(sys.argv[1]))
    await other.call("RPUSH", "wake", "up")
    assert await in_flight == [b"wake", b"up"]
    assert await chatter(client, "parent") == before
    await other.aclose()
    await client.aclose()

with asyncio.Runner(loop_factory=new_loop) as runner:
    runner.run(parent())
print("fine")
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_forked_child_uses_its_own_connection(shared_server: TestServer, loop: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, shared_server.url, loop],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("fine\n", "")
