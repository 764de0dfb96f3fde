"""Nothing that is printed, formatted, logged or raised shows a token or a secret."""

from __future__ import annotations

import logging
import traceback
from typing import Any

import msgspec
import pytest

from flowfabric.core.conditions import Single
from flowfabric.core.contracts.suspension import Accepted, AlreadySatisfiedSuspension, UsePending
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import WaitpointToken, new_uuid
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.boot import configured_secret
from flowfabric.valkey.address import parse_url
from tests.support.engine import Engine
from tests.support.proxy import FaultProxy
from tests.support.server import TestServer
from tests.support.suspension import SECRET, Waits


def renderings(value: Any) -> list[str]:
    """Every way a value usually becomes text."""
    return [
        repr(value),
        str(value),
        f"{value}",
        f"{value!r:>200}",
        "%s %r" % (value, value),  # noqa: UP031
        "{}".format(value),  # noqa: UP032
        logging.LogRecord("x", 20, "x", 1, "%s %r", (value, value), None).getMessage(),
        str([value]),
        str({"x": value}),
    ]


async def test_every_object_that_carries_a_token(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", 60_000)
    await waits.signal(handle.execution_id, pending, "go")
    satisfied = await waits.backend.suspensions.suspend(
        handle, condition=Single("k"), waitpoints=[UsePending(pending.waitpoint_id)]
    )
    assert isinstance(satisfied, AlreadySatisfiedSuspension)
    parked = await waits.park(handle=handle)
    read = await waits.backend.signals.read_waitpoint_token(
        handle.execution_id, parked.details.waitpoint_id
    )
    assert read is not None
    tokens = [pending.waitpoint_token, parked.details.waitpoint_token, read]
    carriers: list[Any] = [
        *tokens,
        pending,
        satisfied,
        satisfied.details,
        parked,
        parked.details,
        parked.details.waitpoints[0],
        parked.handle,
    ]
    digests = {token.reveal().partition(":")[2] for token in tokens}
    for carrier in carriers:
        for text in renderings(carrier):
            for digest in digests:
                assert digest not in text
    assert "k1:<REDACTED:len=40>" in repr(parked.details)
    for carrier in (parked.details, pending):
        with pytest.raises(TypeError):
            msgspec.json.encode(carrier)
    assert not hasattr(read, "__dict__")


@pytest.mark.corrupts
@pytest.mark.parametrize("field", ["accepted_at", "signal_name"])
async def test_a_damaged_signal_does_not_show_the_token(engine: Engine, field: str) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", 60_000)
    outcome = await waits.signal(handle.execution_id, pending, payload=b'"private"')
    assert isinstance(outcome, Accepted)
    key = keys.signal(handle.execution_id, outcome.signal_id)
    await waits.backend.transport.call("HDEL", key, field)
    with pytest.raises(EngineError) as caught:
        await waits.backend.waitpoints.read_waits(handle.execution_id, "k")
    shown = "".join([*renderings(caught.value), *traceback.format_exception(caught.value)])
    assert pending.waitpoint_token.reveal().partition(":")[2] not in shown
    assert "private" not in shown


def test_malformed_tokens_are_hidden_too() -> None:
    for raw in ("", "no-colon", ":x", "x:"):
        token = WaitpointToken(raw)
        assert str(token) == "<REDACTED:malformed>"
        assert repr(token) == "WaitpointToken(<REDACTED:malformed>)"
        assert f"{token:>30}" == f"{'<REDACTED:malformed>':>30}"


async def test_no_error_shows_what_was_presented(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    execution_id, point = parked.handle.execution_id, parked.details.waitpoint_id
    backend = waits.backend
    presented = "k1:" + "deadbeef" * 5
    with caplog.at_level(logging.DEBUG):
        calls = [
            backend.signals.deliver_signal(execution_id, point, presented, "go"),
            backend.signals.deliver_signal(execution_id, new_uuid(), presented, "go"),
            backend.signals.deliver_signal(engine.new_id(), point, presented, "go"),
            backend.signals.deliver_signal(execution_id, "x", presented, "go"),
            backend.signals.deliver_signal(execution_id, point, presented, ""),
            backend.signals.verify_and_deliver(execution_id, point, presented, "go"),
        ]
        for call in calls:
            with pytest.raises(EngineError) as caught:
                await call
            for text in (*renderings(caught.value), str(caught.value.args)):
                assert "deadbeef" not in text
    assert "deadbeef" not in caplog.text


async def test_no_error_shows_a_secret(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    secret = "c0ffee" * 11
    backend: Any = engine.backend
    await backend.secrets.seed_at_boot(SECRET)
    with caplog.at_level(logging.DEBUG):
        await backend.secrets.seed_at_boot(secret)
        calls = [
            backend.secrets.rotate_waitpoint_hmac_secret(0, "k1", secret),
            backend.secrets.rotate_waitpoint_hmac_secret(0, "k:1", secret),
            backend.secrets.rotate_waitpoint_hmac_secret(0, "k2", secret + "x"),
            backend.secrets.rotate_waitpoint_hmac_secret(0, "k2", secret, -1),
            backend.secrets.seed_waitpoint_hmac_secret("k2", secret),
            backend.secrets.seed_waitpoint_hmac_secret("k2", secret[:64]),
            backend.secrets.seed_at_boot(secret + "x"),
        ]
        for call in calls:
            with pytest.raises(EngineError) as caught:
                await call
            for text in (*renderings(caught.value), str(caught.value.args)):
                assert "c0ffee" not in text
        summary = await backend.secrets.rotate_waitpoint_hmac_secret_all("k1", secret)
        assert "c0ffee" not in repr(summary)
    for shown in (caplog.text, repr([r.__dict__ for r in caplog.records])):
        assert "c0ffee" not in shown
        assert SECRET not in shown


def test_a_bad_setting_is_named_but_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FF_WAITPOINT_HMAC_SECRET", raising=False)
    assert configured_secret() is None
    monkeypatch.setenv("FF_WAITPOINT_HMAC_SECRET", "")
    assert configured_secret() is None
    monkeypatch.setenv("FF_WAITPOINT_HMAC_SECRET", "AB" * 16)
    assert configured_secret() == "ab" * 16
    monkeypatch.setenv("FF_WAITPOINT_HMAC_SECRET", "c0ffee-is-no-hex")
    with pytest.raises(Exception, match="FF_WAITPOINT_HMAC_SECRET") as caught:
        configured_secret()
    assert "c0ffee" not in repr(caught.value)
    assert caught.value.__cause__ is None


async def test_a_lost_connection_shows_nothing(
    engine: Engine, valkey: TestServer, caplog: pytest.LogCaptureFixture
) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    with FaultProxy(valkey.socket_path) as proxy:
        client = await ValkeyBackend.connect(parse_url(proxy.url), request_timeout=0.2)
        async with client:
            proxy.down()
            with caplog.at_level(logging.DEBUG):
                calls = [
                    client.signals.deliver_signal(
                        parked.handle.execution_id,
                        parked.details.waitpoint_id,
                        "k1:" + "deadbeef" * 5,
                        "go",
                    ),
                    client.secrets.rotate_waitpoint_hmac_secret(0, "k2", "deadbeef" * 4),
                ]
                for call in calls:
                    with pytest.raises(EngineError) as caught:
                        await call
                    for text in renderings(caught.value):
                        assert "deadbeef" not in text
            assert "deadbeef" not in caplog.text
