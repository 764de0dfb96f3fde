"""TLS, to a peer that ends it in front of nothing but a scripted answer."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from pathlib import Path

import pytest

from flowfabric.core.errors import TransportError
from flowfabric.valkey.address import Address
from flowfabric.valkey.connect import connect
from flowfabric.valkey.transport import Client
from tests.support.listening import listening
from tests.unit.valkey.conftest import Keeper
from tests.unit.valkey.resp import HELLO, bulk, scripted_peer
from tests.unit.valkey.test_connection import failure


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A throw-away CA (`ca.pem`), a server certificate it signed, and a stranger's CA."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*args: str) -> None:
        subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "other"):
        names = ("-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
        usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
        openssl("req", "-x509", *key, *names, *usage, "-days", "2")
    openssl("req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=server")
    (folder / "names").write_text(
        "subjectAltName=IP:127.0.0.1\nkeyUsage=digitalSignature\nauthorityKeyIdentifier=keyid\n"
    )
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
    openssl("x509", "-req", "-in", "server.csr", *signing, "-out", "server.pem", "-days", "2")
    return folder


@pytest.fixture
def server_side(certificates: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    return context


def answer(command: list[bytes]) -> bytes:
    return HELLO if command[0] == b"HELLO" else bulk(command[1].decode())


async def test_tls_with_a_known_authority(
    keep: Keeper, certificates: Path, server_side: ssl.SSLContext
) -> None:
    async with scripted_peer(answer, tls=server_side) as port:
        address = Address(port=port, tls=True, tls_ca=str(certificates / "ca.pem"))
        client = keep(Client(address))
        assert await client.call("ECHO", "secret") == b"secret"
        large = "x" * 300_000
        assert await client.call("ECHO", large) == large.encode()
        await client.aclose()


async def test_an_unknown_authority_is_refused_at_once(
    keep: Keeper, certificates: Path, server_side: ssl.SSLContext
) -> None:
    async with scripted_peer(answer, tls=server_side) as port:
        for ca in (None, str(certificates / "other.pem")):
            client = keep(Client(Address(port=port, tls=True, tls_ca=ca)))
            error = await failure(client.call("ECHO", "x", timeout=30))
            assert (error.kind, error.ambiguous) == ("auth", False)
            assert "FF_TLS_CA" in error.message


async def test_a_certificate_for_another_name_is_refused(
    keep: Keeper, certificates: Path, server_side: ssl.SSLContext
) -> None:
    async with scripted_peer(answer, tls=server_side) as port:
        ca = str(certificates / "ca.pem")
        client = keep(Client(Address(host="localhost", port=port, tls=True, tls_ca=ca)))
        assert (await failure(client.call("ECHO", "x", timeout=30))).kind == "auth"


async def test_a_missing_ca_file_is_named(keep: Keeper) -> None:
    client = keep(Client(Address(port=1, tls=True, tls_ca="/no/such/ca.pem")))
    error = await failure(client.call("PING", timeout=30))
    assert "/no/such/ca.pem" in error.message
    assert not error.retryable


async def test_a_port_without_tls_is_told_as_such() -> None:
    """It takes the greeting of TLS for the beginning of a command, and waits for the rest."""

    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with listening(silent) as port:
        address = Address(port=port, tls=True)
        for patient in (True, False):
            with pytest.raises(TransportError, match=r"is this its port for TLS\?"):
                await connect(address, connect_timeout=0.3, patient=patient)
