"""The standalone client: reconnecting, ambiguity, replay, cancellation, login, close."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flowfabric.core.errors import TransportError
from flowfabric.valkey.address import Address, parse_url
from flowfabric.valkey.transport import Transport
from tests.support.proxy import FaultProxy
from tests.support.server import TestServer, free_port
from tests.unit.valkey.conftest import Keeper
from tests.unit.valkey.resp import HELLO, scripted_peer
from tests.unit.valkey.test_connection import failure, until

LIBRARY = """#!lua name=probe
server.register_function('probe', function(keys, args)
  return {keys[1], #keys, unpack(args)}
end)"""


async def test_fcall_sends_the_tag_as_its_one_key(client: Transport) -> None:
    await client.call("FUNCTION", "LOAD", "REPLACE", LIBRARY)
    reply = await client.fcall("probe", "{fp:42}", ("a", b"\xff", 7))
    assert reply == [b"{fp:42}", 1, b"a", b"\xff", b"7"]
    assert await client.fcall("probe", "{fp:1}") == [b"{fp:1}", 1]


async def test_one_server_answers_for_all_nodes(client: Transport) -> None:
    assert await client.call_all_primaries("PING") == {client.address.peer: b"PONG"}
    assert await client.call_all_nodes("PING") == {client.address.peer: b"PONG"}
    assert not client.is_cluster


async def test_a_lost_reply_is_ambiguous_and_is_not_sent_again(
    far: Transport, client: Transport, proxy: FaultProxy
) -> None:
    proxy.drop_next_reply()
    error = await failure(far.call("INCR", "n"))
    assert (error.kind, error.ambiguous) == ("transport", True)
    assert await client.call("GET", "n") == b"1"
    assert await far.call("GET", "n") == b"1"


async def test_a_lost_request_is_just_as_ambiguous(
    far: Transport, client: Transport, proxy: FaultProxy
) -> None:
    proxy.drop_next_request(b"INCR")
    assert (await failure(far.call("INCR", "n"))).ambiguous
    assert await client.call("EXISTS", "n") == 0


async def test_a_replay_safe_call_is_sent_again(
    far: Transport, client: Transport, proxy: FaultProxy
) -> None:
    proxy.drop_next_reply(b"INCR")
    assert await far.call("INCR", "n", replay_safe=True) == 2
    proxy.drop_next_request(b"INCR")
    assert await far.call("INCR", "n", replay_safe=True) == 3


async def test_a_replay_that_finds_no_server_stays_ambiguous(
    far: Transport, proxy: FaultProxy
) -> None:
    proxy.pause()
    call = asyncio.ensure_future(far.call("INCR", "n", replay_safe=True, timeout=0.3))
    await until(lambda: far._link.conn is not None and far._link.conn.in_flight)
    proxy.down()
    assert (await failure(call)).ambiguous


async def test_without_a_server_a_call_waits_to_its_deadline_and_was_not_sent(
    keep: Keeper, tmp_path: Path
) -> None:
    client = keep(Transport(Address(socket_path=str(tmp_path / "none.sock"))))
    loop = asyncio.get_running_loop()
    start = loop.time()
    error = await failure(client.call("PING", timeout=0.15))
    assert (error.kind, error.ambiguous) == ("transport", False)
    assert 0.14 <= loop.time() - start < 2
    assert "No such file" in error.message
    with pytest.raises(TransportError):
        await client.wait_ready(0.05)


async def test_calls_made_while_the_server_is_down_run_when_it_is_back(
    far: Transport, proxy: FaultProxy
) -> None:
    proxy.down()
    await until(lambda: far._link.conn is None)
    calls = [asyncio.ensure_future(far.call("ECHO", n)) for n in range(50)]
    await until(lambda: far._link._error is not None)
    proxy.up()
    assert await asyncio.gather(*calls) == [str(n).encode() for n in range(50)]


async def test_it_reconnects_by_itself_without_a_call(far: Transport, proxy: FaultProxy) -> None:
    proxy.cut()
    await until(lambda: far._link.conn is None)
    await until(lambda: far._link.conn is not None)
    assert proxy.accepted == 2


async def test_a_failed_revival_does_not_stop_the_dialling(
    keep: Keeper, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[int] = []

    def revive() -> None:
        tries.append(1)
        raise OSError("no room")

    far = keep(Transport(parse_url(proxy.url), revive=revive))
    for outage in (1, 2):
        proxy.down()
        await until(lambda: far._link.conn is None)
        tries.clear()
        call = asyncio.ensure_future(far.call("ECHO", "back", timeout=30))
        async with asyncio.timeout(20):
            await until(lambda: len(tries) > 2)
        proxy.up()
        assert await call == b"back"
        # Once per outage, not once per try.
        told = [record.getMessage() for record in caplog.records]
        assert told == ["cannot restart the server: no room"] * outage


async def test_kill_9_and_restart(keep: Keeper) -> None:
    server = TestServer("--appendonly", "yes", "--appendfsync", "always", port=free_port())
    try:
        for address in (server.url, f"valkey://127.0.0.1:{server.port}"):
            client = keep(Transport(parse_url(address)))
            await client.call("SET", "k", address)
            waiting = await client.blocking()
            pending = waiting.submit(("BLPOP", "never", 0), 30)
            await until(lambda conn=waiting: conn.in_flight)
            server.kill()
            assert (await failure(pending)).ambiguous
            await until(lambda each=client: each._link.conn is None)
            call = asyncio.ensure_future(client.call("GET", "k"))
            await asyncio.to_thread(server.start)
            (found,) = await asyncio.gather(call, return_exceptions=True)
            if isinstance(found, TransportError) and found.kind == "busy_loading":
                # It came back in the moment in which the server still read its file.
                await client.wait_ready()
                found = await client.call("GET", "k")
            assert found == address.encode()
    finally:
        server.stop()


REFUSALS = {
    "busy_loading": "LOADING Valkey is loading the dataset in memory",
    "cluster": "MASTERDOWN Link with MASTER is down",
    "read_only": "READONLY You can't write against a read only replica.",
    "busy_script": "BUSY Valkey is busy running a script.",
    "no_replicas": "NOREPLICAS Not enough good replicas to write.",
}


@pytest.mark.parametrize("kind", REFUSALS)
async def test_a_refusal_that_passes_is_ridden_out_by_every_call(keep: Keeper, kind: str) -> None:
    left = 3

    def answer(command: list[bytes]) -> bytes:
        nonlocal left
        if command[0] == b"HELLO":
            return HELLO
        left -= 1
        return f"-{REFUSALS[kind]}\r\n".encode() if left >= 0 else b":1\r\n"

    async with scripted_peer(answer) as port:
        client = keep(Transport(parse_url(f"valkey://127.0.0.1:{port}")))
        assert await client.call("INCR", "n") == 1
        left = 10_000
        loop = asyncio.get_running_loop()
        client._request_timeout, begun = 0.1, loop.time()
        error = await failure(client.call("INCR", "n"))
        assert (error.kind, error.ambiguous) == (kind, False)
        assert 0.05 < loop.time() - begun < 5
        client.fail_fast()
        client._request_timeout = 60
        await failure(client.call("INCR", "n"))


@pytest.mark.parametrize("word", ["OOM command not allowed", "MISCONF cannot save", "ERR no"])
async def test_what_somebody_must_mend_is_raised_at_once(keep: Keeper, word: str) -> None:
    asked = 0

    def answer(command: list[bytes]) -> bytes:
        nonlocal asked
        asked += command[0] == b"INCR"
        return HELLO if command[0] == b"HELLO" else f"-{word}\r\n".encode()

    async with scripted_peer(answer) as port:
        client = keep(Transport(parse_url(f"valkey://127.0.0.1:{port}")))
        await failure(client.call("INCR", "n", replay_safe=True))
    assert asked == 1


async def test_a_lost_read_is_sent_again_and_never_ambiguous(
    far: Transport, proxy: FaultProxy
) -> None:
    for command in (("GET", "n"), ("HGETALL", "h"), ("CONFIG", "GET", "maxmemory")):
        proxy.drop_next_reply(command[0].encode())
        await far.call(*command)
    proxy.pause()
    for command in (("GET", "n"), ("FCALL", "ff_scan_due", 1, "{fp:0}")):
        error = await failure(far.call(*command, timeout=0.05))
        assert (error.kind, error.ambiguous) == ("timeout", False)
        assert "taken effect" not in str(error)


async def test_a_replay_safe_call_without_a_reply_in_time_is_sent_again(
    far: Transport, client: Transport, proxy: FaultProxy
) -> None:
    far._request_timeout = 0.3
    proxy.mute()
    call = asyncio.ensure_future(far.call("INCR", "n", replay_safe=True))
    await until(lambda: proxy.dropped)
    proxy.cut()
    assert await call == 2


async def test_a_server_that_drops_every_connection_is_not_hammered(keep: Keeper) -> None:
    dialled = 0

    def answer(command: list[bytes]) -> bytes:
        nonlocal dialled
        dialled += command[0] == b"HELLO"
        return HELLO if command[0] == b"HELLO" else b"?broken\r\n"

    async with scripted_peer(answer) as port:
        client = keep(Transport(parse_url(f"valkey://127.0.0.1:{port}")))
        for _ in range(5):
            with pytest.raises(TransportError):
                await client.call("PING", timeout=0.05)
        assert 2 <= dialled <= 6


@pytest.mark.parametrize("turns", range(24))
async def test_a_call_may_be_cancelled_at_any_point(
    keep: Keeper, proxy: FaultProxy, client: Transport, turns: int
) -> None:
    far = keep(Transport(parse_url(proxy.url)))
    for warm in (False, True):
        call = asyncio.ensure_future(far.call("ECHO", f"cancelled {warm}"))
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert await far.call("ECHO", "after") == b"after"
        assert await far.call("ECHO", "later") == b"later"
    assert proxy.accepted == 1


async def test_cancelling_while_waiting_for_the_connection_leaves_others_waiting(
    far: Transport, proxy: FaultProxy
) -> None:
    proxy.down()
    await until(lambda: far._link.conn is None)
    calls = [asyncio.ensure_future(far.call("ECHO", n)) for n in range(10)]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    proxy.up()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert results[1::2] == [str(n).encode() for n in range(1, 10, 2)]
    assert all(isinstance(result, asyncio.CancelledError) for result in results[::2])


async def test_closing_fails_pending_and_later_calls(far: Transport, proxy: FaultProxy) -> None:
    proxy.pause()
    pending = asyncio.ensure_future(far.call("INCR", "n"))
    await until(lambda: far._link.conn is not None and far._link.conn.in_flight)
    await far.aclose()
    assert (await failure(pending)).ambiguous
    late = await failure(far.call("PING"))
    assert (late.kind, late.ambiguous) == ("transport", False)
    assert (await failure(far.blocking())).kind == "transport"
    await far.aclose()


async def test_closing_while_dialling_fails_the_waiting_call(tmp_path: Path) -> None:
    client = Transport(Address(socket_path=str(tmp_path / "none.sock")))
    waiting = asyncio.ensure_future(client.call("PING", timeout=30))
    await until(lambda: client._link._error is not None)
    await client.aclose()
    assert "closed" in (await failure(waiting)).message
    assert len(asyncio.all_tasks()) == 1


class TestLogin:
    @pytest.fixture
    async def guarded(self) -> AsyncIterator[TestServer]:
        server = TestServer()
        admin = Transport(parse_url(server.url))
        await admin.call("ACL", "SETUSER", "app", "on", ">s3cret", "~*", "&*", "+@all")
        await admin.call("ACL", "SETUSER", "reader", "on", ">pw", "+ping", "+hello", "+client")
        await admin.call("ACL", "SETUSER", "default", "off")
        await admin.aclose()
        yield server
        server.stop()

    def client(self, server: TestServer, username: str | None, password: str | None) -> Transport:
        path = str(server.socket_path)
        return Transport(Address(socket_path=path, username=username, password=password))

    async def test_acl_users(self, guarded: TestServer, keep: Keeper) -> None:
        app = keep(self.client(guarded, "app", "s3cret"))
        assert await app.call("ACL", "WHOAMI") == b"app"
        reader = keep(self.client(guarded, "reader", "pw"))
        error = await failure(reader.call("GET", "k"))
        assert (error.kind, error.retryable) == ("auth", False)
        for user, password in (
            ("app", "hunter2"),
            ("nobody", "hunter2"),
            (None, "hunter2"),
            (None, None),
        ):
            refused = keep(self.client(guarded, user, password))
            # Final: it does not wait for the deadline.
            error = await asyncio.wait_for(failure(refused.call("PING", timeout=30)), 5)
            assert error.kind == "auth"
            assert password is None or password not in str(error)

    async def test_a_password_that_starts_to_work(self, guarded: TestServer, keep: Keeper) -> None:
        late = keep(self.client(guarded, "late", "pw"))
        assert (await failure(late.call("PING"))).kind == "auth"
        app = keep(self.client(guarded, "app", "s3cret"))
        await app.call("ACL", "SETUSER", "late", "on", ">pw", "+@all")
        assert await late.call("PING") == b"PONG"


async def test_a_question_to_a_node_that_left_ends(keep: Keeper, tmp_path: Path) -> None:
    """The map drops nodes that left the cluster; nobody repeats what was asked of them."""
    client = keep(Transport(Address(socket_path=str(tmp_path / "none.sock"))))
    (ask,) = (await client.primaries()).values()
    asking = asyncio.ensure_future(ask("PING"))
    await until(lambda: client._link._error is not None)
    client._link.close()
    error = await asyncio.wait_for(failure(asking), 3)
    assert (error.kind, error.ambiguous) == ("transport", False)
