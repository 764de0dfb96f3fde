"""One connection: replies, order, deadlines, back-pressure, pushes, endings."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest

from flowfabric.core.errors import TransportError
from flowfabric.valkey import connection
from flowfabric.valkey.address import parse_url
from flowfabric.valkey.connection import Connection, dial
from flowfabric.valkey.transport import Transport
from tests.support.proxy import FaultProxy
from tests.support.server import TestServer
from tests.unit.valkey.conftest import Keeper
from tests.unit.valkey.resp import scripted_peer


async def failure(awaitable: Any) -> TransportError:
    with pytest.raises(TransportError) as caught:
        await awaitable
    return caught.value


async def until(condition: Any) -> None:
    """Let the loop turn until the condition holds; the test's time limit ends a hopeless wait."""
    while not condition():  # noqa: ASYNC110 - the states have no event
        await asyncio.sleep(0.001)


async def test_every_reply_type_arrives_as_it_is(client: Transport) -> None:
    assert await client.call("SET", "k", b"\x00\xff\r\n") == b"OK"
    assert await client.call("GET", "k") == b"\x00\xff\r\n"
    assert await client.call("GET", "missing") is None
    assert await client.call("INCRBY", "n", 41) == 41
    assert await client.call("RPUSH", "l", "a", b"b", 3, 1.5) == 4
    assert await client.call("LRANGE", "l", 0, -1) == [b"a", b"b", b"3", b"1.5"]
    await client.call("HSET", "h", "f", "v")
    assert await client.call("HGETALL", "h") == {b"f": b"v"}
    kinds = {
        "string": b"Hello World",
        "integer": 12345,
        "double": 3.141,
        "null": None,
        "array": [0, 1, 2],
        "set": [0, 1, 2],
        "map": {0: False, 1: True, 2: False},
        "bignum": b"1234567999999999999999999999999999999",
        "true": True,
        "false": False,
        "verbatim": b"This is a verbatim\nstring",
    }
    for kind, expected in kinds.items():
        reply = await client.call("DEBUG", "PROTOCOL", kind)
        assert (type(reply), reply) == (type(expected), expected)


async def test_an_error_reply_is_raised_and_the_next_call_is_fine(client: Transport) -> None:
    error = await failure(client.call("INCR"))
    assert error.kind == "other"
    assert "wrong number of arguments" in error.message
    assert not error.ambiguous
    assert (await failure(client.fcall("no_such", "{fp:1}"))).kind == "script_not_loaded"
    assert await client.call("PING") == b"PONG"


async def test_an_argument_that_cannot_be_packed_is_refused_before_sending(
    client: Transport,
) -> None:
    with pytest.raises(TypeError):
        await client.call("SET", "k", None)  # pyright: ignore[reportArgumentType]
    assert await client.call("EXISTS", "k") == 0


async def test_a_large_payload_makes_the_round_trip(client: Transport) -> None:
    payload = bytes(range(256)) * 20_000
    await client.call("SET", "big", payload)
    assert await client.call("GET", "big") == payload


async def test_calls_of_one_tick_leave_in_few_writes(keep: Keeper, client: Transport) -> None:
    conn = keep(await client.blocking())

    async def reads() -> int:
        stats = (await client.call("INFO", "stats")).decode()
        return int(stats.split("total_reads_processed:")[1].split()[0])

    before = await reads()
    replies = await asyncio.gather(*(conn.submit(("ECHO", n)) for n in range(200)))
    after = await reads()
    assert replies == [str(n).encode() for n in range(200)]
    # Every sixteen calls leave together; one read is for the second INFO.
    assert after - before <= 200 / 16 + 2


async def test_many_calls_leave_before_the_tick_ends(keep: Keeper, client: Transport) -> None:
    """The server works on the first of them while the loop is still busy with the rest."""
    conn, other = keep(await client.blocking()), keep(await client.blocking())
    peer = socket.socket(socket.AF_UNIX)
    with peer:
        peer.connect(client.address.socket_path or "")
        replies = [conn.submit(("INCR", "early")) for _ in range(20)]
        seen = b""
        # This blocks the loop: only what has left can be seen.
        while b"$2\r\n16\r\n" not in seen:
            peer.sendall(b"GET early\r\n")
            seen = peer.recv(100)
    assert await asyncio.gather(*replies) == list(range(1, 21))
    assert await other.call("GET", "early") == b"20"


async def test_a_deadline_after_sending_is_ambiguous_and_its_late_reply_is_dropped(
    far: Transport, proxy: FaultProxy
) -> None:
    proxy.pause()
    error = await failure(far.call("INCR", "n", timeout=0.05))
    assert (error.kind, error.ambiguous) == ("timeout", True)
    proxy.resume()
    assert await far.call("ECHO", "mine") == b"mine"
    assert await far.call("GET", "n") == b"1"
    assert proxy.accepted == 1


async def test_deadlines_are_each_calls_own(far: Transport, proxy: FaultProxy) -> None:
    proxy.pause()
    patient = asyncio.ensure_future(far.call("ECHO", "patient", timeout=30))
    hasty = [asyncio.ensure_future(far.call("ECHO", n, timeout=0.03 * n)) for n in (3, 1, 2)]
    for call in hasty:
        assert (await failure(call)).kind == "timeout"
    assert not patient.done()
    proxy.resume()
    assert await patient == b"patient"


async def test_a_call_that_waited_unsent_past_its_deadline_never_runs(
    keep: Keeper, proxy: FaultProxy, client: Transport
) -> None:
    conn = keep(await dial(parse_url(proxy.url), max_in_flight=1))
    proxy.pause()
    first = conn.submit(("INCR", "first"), 30)
    second = conn.submit(("INCR", "second"), 0.05)
    error = await failure(second)
    assert (error.kind, error.ambiguous) == ("timeout", False)
    proxy.resume()
    assert await first == 1
    assert await conn.call("ECHO", "after") == b"after"
    assert await client.call("EXISTS", "second") == 0


async def test_time_in_which_user_code_held_the_loop_does_not_count(
    keep: Keeper, client: Transport
) -> None:
    conn = keep(await client.blocking())
    for turns in range(5):
        call = conn.submit(("ECHO", "in time"), 0.02)
        for _ in range(turns):
            await asyncio.sleep(0)
        time.sleep(0.05)  # noqa: ASYNC251 - user code that holds the loop
        assert await call == b"in time"


async def test_a_peer_that_stays_silent_is_given_up(
    far: Transport, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "STALL_GRACE", 0.1)
    proxy.pause()
    timed_out = asyncio.ensure_future(far.call("PING", timeout=0.05))
    waiting = asyncio.ensure_future(far.call("INCR", "n", timeout=30))
    assert (await failure(timed_out)).kind == "timeout"
    error = await failure(waiting)
    assert (error.kind, error.ambiguous) == ("transport", True)
    proxy.resume()
    assert await far.call("PING") == b"PONG"
    assert proxy.accepted == 2


async def test_the_number_in_flight_is_bounded_and_the_rest_waits_its_turn(
    keep: Keeper, proxy: FaultProxy, client: Transport
) -> None:
    conn = keep(await dial(parse_url(proxy.url), max_in_flight=8))
    proxy.pause()
    calls = [conn.submit(("RPUSH", "order", n)) for n in range(100)]
    await until(lambda: conn.in_flight == 8)
    abandoned = calls[50]
    abandoned.cancel()
    proxy.resume()
    done = await asyncio.gather(*(call for call in calls if call is not abandoned))
    assert done == list(range(1, 100))
    order = await client.call("LRANGE", "order", 0, -1)
    assert order == [str(n).encode() for n in range(100) if n != 50]


async def test_calls_abandoned_in_the_queue_do_not_block_it(
    keep: Keeper, shared_server: TestServer
) -> None:
    conn = keep(await dial(parse_url(shared_server.url), max_in_flight=1))
    for call in [conn.submit(("PING",)) for _ in range(3)]:
        call.cancel()
    await asyncio.sleep(0)
    assert await conn.call("ECHO", "through", timeout=1) == b"through"


async def test_a_full_socket_holds_calls_back(
    keep: Keeper, proxy: FaultProxy, client: Transport
) -> None:
    conn = keep(await dial(parse_url(proxy.url)))
    proxy.pause()
    payload = b"x" * (1 << 18)
    first = [conn.submit(("SET", f"a{n}", payload), 30) for n in range(16)]
    await until(lambda: conn.in_flight == 16)
    second = [conn.submit(("SET", f"b{n}", payload), 30) for n in range(16)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert conn.in_flight == 16
    proxy.resume()
    assert await asyncio.gather(*first, *second) == [b"OK"] * 32


async def test_losing_the_connection_tells_sent_from_unsent(
    keep: Keeper, proxy: FaultProxy, client: Transport
) -> None:
    conn = keep(await dial(parse_url(proxy.url), max_in_flight=2))
    proxy.pause()
    calls = [conn.submit(("PING",)) for _ in range(5)]
    await until(lambda: conn.in_flight == 2)
    proxy.cut()
    errors = [await failure(call) for call in calls]
    assert [error.ambiguous for error in errors] == [True, True, False, False, False]
    assert {error.kind for error in errors} == {"transport"}
    await until(lambda: not conn.is_open)
    late = await failure(conn.call("PING"))
    assert (late.kind, late.ambiguous) == ("transport", False)


async def test_closing_fails_what_is_pending(
    keep: Keeper, far: Transport, proxy: FaultProxy
) -> None:
    conn = keep(await far.blocking())
    proxy.pause()
    sent = conn.submit(("PING",))
    await until(lambda: conn.in_flight == 1)
    unsent = conn.submit(("PING",))
    await conn.aclose()
    assert (await failure(sent)).ambiguous
    assert not (await failure(unsent)).ambiguous


async def test_published_messages_reach_the_callback(keep: Keeper, client: Transport) -> None:
    heard: asyncio.Queue[list[Any]] = asyncio.Queue()
    conn = keep(await client.blocking(on_push=heard.put_nowait))
    assert await conn.call("SUBSCRIBE", "bell") == [b"subscribe", b"bell", 1]
    assert await conn.call("SSUBSCRIBE", "shard") == [b"ssubscribe", b"shard", 1]
    await client.call("PUBLISH", "bell", b"\x00ding")
    assert await heard.get() == [b"message", b"bell", b"\x00ding"]
    await client.call("SPUBLISH", "shard", "dong")
    assert await heard.get() == [b"smessage", b"shard", b"dong"]
    # Ordinary calls share the connection with the messages.
    calls = [conn.submit(("ECHO", n)) for n in range(50)]
    for n in range(50):
        await client.call("PUBLISH", "bell", n)
    assert await asyncio.gather(*calls) == [str(n).encode() for n in range(50)]
    assert [(await heard.get())[2] for _ in range(50)] == [str(n).encode() for n in range(50)]
    assert await conn.call("UNSUBSCRIBE", "bell") == [b"unsubscribe", b"bell", 0]


async def test_a_failing_callback_does_not_break_the_connection(
    keep: Keeper, client: Transport
) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    def fail(message: list[Any]) -> None:
        raise RuntimeError("callback")

    conn = keep(await client.blocking(on_push=fail))
    await conn.call("SUBSCRIBE", "bell")
    await client.call("PUBLISH", "bell", "x")
    await until(lambda: reported)
    assert await conn.call("PING") == b"PONG"
    await conn.aclose()
    assert "callback" in str(reported[0]["exception"])


async def test_a_blocking_read_does_not_hold_other_calls(keep: Keeper, client: Transport) -> None:
    conn = keep(await client.blocking())
    read = conn.submit(("BLPOP", "queue", 5), 5.5)
    assert await client.call("PING") == b"PONG"
    await client.call("RPUSH", "queue", "item")
    assert await read == [b"queue", b"item"]


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"%0\r\n+one reply\r\n+too many\r\n",
        b"%1\r\n*1\r\n:1\r\n:1\r\n",
    ],
)
async def test_a_peer_that_does_not_speak_the_protocol(keep: Keeper, reply: bytes) -> None:
    async with scripted_peer(lambda _: reply) as port:
        client = keep(Transport(parse_url(f"valkey://127.0.0.1:{port}")))
        error = await failure(client.call("PING"))
        assert error.kind == "protocol"
        await client.aclose()


async def test_a_peer_that_accepts_and_never_answers() -> None:
    async with scripted_peer(lambda _: b"") as port:
        with pytest.raises(TransportError) as caught:
            await dial(parse_url(f"valkey://127.0.0.1:{port}"), connect_timeout=0.1)
        assert caught.value.safe_to_repeat


async def test_the_handshake_sets_name_protocol_and_database(
    keep: Keeper, shared_server: TestServer
) -> None:
    conn = keep(await dial(parse_url(f"{shared_server.url}?db=3"), name="tester"))
    info = (await conn.call("CLIENT", "INFO")).decode()
    assert "name=tester" in info
    assert "db=3" in info
    assert "resp=3" in info
    await conn.aclose()
    with pytest.raises(TransportError, match="out of range") as caught:
        await dial(parse_url(f"{shared_server.url}?db=999"))
    assert not caught.value.retryable


async def test_a_connection_reports_that_it_ended(keep: Keeper, proxy: FaultProxy) -> None:
    lost: list[Connection] = []
    conn = keep(await dial(parse_url(proxy.url)))
    conn.on_lost = lost.append
    proxy.cut()
    await until(lambda: not conn.is_open)
    assert lost == [conn]
