"""Connecting, and the version gate."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flowfabric.core.backoff import Backoff
from flowfabric.core.errors import EngineError, TransportError
from flowfabric.engine.valkey.library import LOAD_PAUSES_S, ensure_library
from flowfabric.valkey.address import Address, parse_url
from flowfabric.valkey.connect import VERSION_BUDGET_S, VERSION_PAUSES_S, check_server, connect
from tests.support.listening import listening
from tests.support.server import TestServer, free_port
from tests.unit.valkey.resp import HELLO, bulk, scripted_peer


def speaking(*bodies: str) -> Callable[[list[bytes]], bytes]:
    """A server whose INFO shows these bodies one after the other, the last one for ever."""
    left = list(bodies)

    def answer(command: list[bytes]) -> bytes:
        if command[0] == b"INFO":
            return bulk(left.pop(0) if len(left) > 1 else left[0])
        return HELLO if command[0] == b"HELLO" else b"+PONG\r\n"

    return answer


async def gate(*bodies: str, budget: float = 0.0) -> tuple[int, int]:
    async with scripted_peer(speaking(*bodies)) as port:
        transport = await connect(parse_url(f"valkey://127.0.0.1:{port}"))
        try:
            return await check_server(transport, budget=budget)
        finally:
            await transport.aclose()


async def test_the_real_server_passes(shared_server: TestServer) -> None:
    transport = await connect(parse_url(shared_server.url), name="checker")
    assert await check_server(transport) >= (8, 0)
    assert await transport.call("CLIENT", "GETNAME") == b"checker"
    await transport.aclose()


@pytest.mark.parametrize(
    ("body", "version"),
    [
        ("# Server\r\nredis_version:7.2.4\r\nvalkey_version:8.1.3\r\n", (8, 1)),
        ("server_name:Valkey\r\nredis_version:8.0.1\r\n", (8, 0)),
        ("valkey_version:10.0-rc1\r\n", None),
        ("valkey_version:9.1.2\r\nserver_name:valkey\r\n", (9, 1)),
    ],
)
async def test_reading_the_version(body: str, version: tuple[int, int] | None) -> None:
    if version is None:
        with pytest.raises(EngineError, match="does not report its version"):
            await gate(body)
    else:
        assert await gate(body) == version


async def test_too_old_is_refused_when_the_budget_is_spent() -> None:
    with pytest.raises(EngineError) as caught:
        await gate("valkey_version:7.2.5\r\n", budget=0.3)
    assert caught.value.code == "valkey_version_too_low"
    assert "valkey_version_too_low: detected 7.2, required >= 8.0" in str(caught.value)


async def test_an_upgrade_under_way_is_waited_for() -> None:
    old, new = "valkey_version:7.2.5\r\n", "valkey_version:8.0.0\r\n"
    assert await gate(old, "", new, budget=5) == (8, 0)


def test_the_pauses_and_the_budget_of_a_start() -> None:
    """09 §1.1 and §1.4."""
    assert VERSION_BUDGET_S == 60
    backoff = Backoff(*VERSION_PAUSES_S)
    assert [backoff.next_s() for _ in range(7)] == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert LOAD_PAUSES_S == (0.5, 1, 2, 4, 7)


LOADING = b"-LOADING Valkey is loading the dataset in memory\r\n"
READ_ONLY = b"-READONLY You can't write against a read only replica.\r\n"


async def test_the_version_gate_waits_for_a_server_that_loads() -> None:
    async with scripted_peer(refusing(b"INFO", LOADING)) as port:
        url = f"valkey://127.0.0.1:{port}"
        transport = await connect(parse_url(url), request_timeout=0.05)
        with pytest.raises(TransportError) as caught:
            await asyncio.wait_for(check_server(transport, budget=0.3), 5)
        await transport.aclose()
    assert caught.value.kind == "busy_loading"


@pytest.mark.parametrize("fault", [LOADING, READ_ONLY])
async def test_a_load_is_tried_once_more_than_it_pauses(
    fault: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[list[bytes]] = []
    async with scripted_peer(refusing(b"FCALL", fault, asked)) as port:
        peer = f"127.0.0.1:{port}"
        transport = await connect(parse_url(f"valkey://{peer}"), request_timeout=0.05)
        with pytest.raises(TransportError):
            await asyncio.wait_for(ensure_library(transport, pauses=(0.0, 0.01, 0.0)), 5)
        await transport.aclose()
    told = [r.__dict__ for r in caplog.records if r.__dict__["action"] == "library_not_loaded"]
    assert len(told) == 3
    assert len(asked) >= 4
    # On a replica, the log shows which nodes this process takes for primaries.
    shown = [peer] if fault is READ_ONLY else None
    assert [each.get("primaries") for each in told] == [shown] * 3


def refusing(
    name: bytes, fault: bytes, asked: list[list[bytes]] | None = None
) -> Callable[[list[bytes]], bytes]:
    """A server that answers one command with an error."""

    def answer(command: list[bytes]) -> bytes:
        if command[0] == name:
            (asked if asked is not None else []).append(command)
            return fault
        return HELLO if command[0] == b"HELLO" else b"+PONG\r\n"

    return answer


async def test_redis_is_refused_at_once() -> None:
    with pytest.raises(EngineError, match="not Valkey") as caught:
        await asyncio.wait_for(gate("redis_version:7.4.1\r\n", budget=60), 5)
    assert caught.value.code == "valkey_version_too_low"


async def test_a_refused_login_is_final(shared_server: TestServer) -> None:
    address = Address(
        socket_path=str(shared_server.socket_path), username="nobody", password="none"
    )
    with pytest.raises(TransportError) as caught:
        await asyncio.wait_for(connect(address, connect_timeout=30), 5)
    assert caught.value.kind == "auth"


async def test_connect_gives_up_at_its_timeout(tmp_path: Path) -> None:
    with pytest.raises(TransportError) as caught:
        await connect(Address(socket_path=str(tmp_path / "none")), connect_timeout=0.1)
    assert caught.value.safe_to_repeat
    assert len(asyncio.all_tasks()) == 1


async def test_another_service_is_named_as_such_and_nothing_is_unknown() -> None:
    async with scripted_peer(lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        with pytest.raises(TransportError) as caught:
            await connect(parse_url(f"valkey://127.0.0.1:{port}"), connect_timeout=30)
    error = caught.value
    assert (error.kind, error.ambiguous) == ("protocol", False)
    assert error.message.startswith(f"no connection to 127.0.0.1:{port}: ")
    assert "unknown" not in str(error)
    assert "not a proxy or another service" in str(error)


async def test_a_peer_that_hangs_up_on_the_greeting_leaves_nothing_unknown() -> None:
    hung_up = 0

    async def hang_up(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        nonlocal hung_up
        await reader.read(1)
        hung_up += 1

    async with listening(hang_up) as port:
        with pytest.raises(TransportError) as caught:
            await connect(parse_url(f"valkey://127.0.0.1:{port}"), connect_timeout=0.2)
    assert hung_up
    assert caught.value.safe_to_repeat
    assert "unknown" not in str(caught.value)


async def test_a_standalone_server_is_not_a_cluster(shared_server: TestServer) -> None:
    async with scripted_peer(
        lambda c: (
            HELLO if c[0] == b"HELLO" else b"-ERR This instance has cluster support disabled\r\n"
        )
    ) as port:
        with pytest.raises(
            TransportError, match=r"cluster support disabled \(this is a single server: write"
        ):
            await connect(parse_url(f"valkey+cluster://127.0.0.1:{port}"), connect_timeout=30)


async def test_an_impatient_caller_gets_a_refusal_at_once(tmp_path: Path) -> None:
    refused = f"127.0.0.1:{free_port()}"
    places = (f"valkey://{refused}", f"valkey+cluster://{refused}", f"unix://{tmp_path}/none")
    for url in places:
        async with asyncio.timeout(5):
            with pytest.raises(TransportError, match=r"Connection refused|No such file"):
                await connect(parse_url(url), connect_timeout=60.0, patient=False)


async def test_a_patient_caller_logs_that_it_waits(caplog: pytest.LogCaptureFixture) -> None:
    peer = f"127.0.0.1:{free_port()}"
    told = asyncio.Event()
    with telling(told):
        waiting = asyncio.create_task(connect(parse_url(f"valkey://{peer}"), connect_timeout=60.0))
        async with asyncio.timeout(20):
            await told.wait()
        waiting.cancel()
        await asyncio.wait([waiting])
    assert caplog.messages == [f"waiting for Valkey at {peer}, for up to 60 s"]


@contextmanager
def telling(told: asyncio.Event) -> Generator[None]:
    """Set the event with the first record of `connect`."""

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.set()

    listener, logger = Listener(), logging.getLogger("flowfabric.valkey.connect")
    logger.addHandler(listener)
    try:
        yield
    finally:
        logger.removeHandler(listener)
