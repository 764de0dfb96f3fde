"""A server behind TLS."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from flowfabric.core.errors import ConfigError, TransportError
from flowfabric.engine.http.address import parse_url
from flowfabric.engine.http.link import HttpLink
from tests.support.listening import listening
from tests.unit.http_link.test_link import answer, request
from tests.unit.valkey.test_tls import certificates, server_side

__all__ = ["certificates", "server_side"]


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await request(reader)
    writer.write(answer(200, b"7"))
    await writer.drain()
    writer.close()


async def test_the_certificate_is_checked(certificates: Path, server_side: ssl.SSLContext) -> None:
    async with listening(serve, tls=server_side) as port:
        url = f"https://127.0.0.1:{port}"
        trusted = parse_url(url, {"FF_TLS_CA": str(certificates / "ca.pem")})
        async with HttpLink(trusted) as link:
            assert await link.call("GET", "/v1/x") == 7
        async with HttpLink(parse_url(url)) as link:
            with pytest.raises(TransportError, match="is not trusted") as caught:
                await link.call("GET", "/v1/x")
        assert caught.value.kind == "auth"
        assert "FF_TLS_CA" in caught.value.hint


async def test_a_port_without_tls() -> None:
    async with listening(serve) as port:
        address = parse_url(f"https://127.0.0.1:{port}")
        async with HttpLink(address, patient=False, connect_timeout_s=2) as link:
            with pytest.raises(TransportError, match="does not use TLS, write http://"):
                await link.call("GET", "/v1/x")


def test_an_authority_that_cannot_be_read() -> None:
    with pytest.raises(ConfigError, match="FF_TLS_CA"):
        HttpLink(parse_url("https://a", {"FF_TLS_CA": "/nowhere/ca.pem"}))
