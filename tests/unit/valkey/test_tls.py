"""TLS, to a peer that ends it in front of nothing but a scripted answer."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flowfabric.core.errors import TransportError
from flowfabric.valkey.address import Address, from_url
from flowfabric.valkey.connect import connect
from flowfabric.valkey.transport import Transport
from tests.support.listening import listening
from tests.unit.valkey.conftest import Keeper
from tests.unit.valkey.resp import HELLO, bulk, scripted_peer
from tests.unit.valkey.test_connection import failure


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A throw-away CA with a server and a client certificate, and a stranger's with one."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*args: str) -> None:
        subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "other"):
        names = ("-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
        usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
        openssl("req", "-x509", *key, *names, *usage, "-days", "2")
    (folder / "names").write_text(
        "subjectAltName=IP:127.0.0.1\nkeyUsage=digitalSignature\nauthorityKeyIdentifier=keyid\n"
    )
    for name, ca in (("server", "ca"), ("client", "ca"), ("stranger", "other")):
        request = ("-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl("req", *key, *request)
        signing = ("-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial", "-days", "2")
        signed = ("-in", f"{name}.csr", "-out", f"{name}.pem", "-extfile", "names")
        openssl("x509", "-req", *signed, *signing)
    openssl("ec", "-in", "client.key", "-aes256", "-passout", "pass:x", "-out", "locked.key")
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
        client = keep(Transport(address))
        assert await client.call("ECHO", "secret") == b"secret"
        large = "x" * 300_000
        assert await client.call("ECHO", large) == large.encode()
        await client.aclose()


async def test_an_unknown_authority_is_refused_at_once(
    keep: Keeper, certificates: Path, server_side: ssl.SSLContext
) -> None:
    async with scripted_peer(answer, tls=server_side) as port:
        for ca in (None, str(certificates / "other.pem")):
            client = keep(Transport(Address(port=port, tls=True, tls_ca=ca)))
            error = await failure(client.call("ECHO", "x", timeout=30))
            assert (error.kind, error.ambiguous) == ("auth", False)
            assert "FF_TLS_CA" in error.message


async def test_a_certificate_for_another_name_is_refused(
    keep: Keeper, certificates: Path, server_side: ssl.SSLContext
) -> None:
    async with scripted_peer(answer, tls=server_side) as port:
        ca = str(certificates / "ca.pem")
        client = keep(Transport(Address(host="localhost", port=port, tls=True, tls_ca=ca)))
        assert (await failure(client.call("ECHO", "x", timeout=30))).kind == "auth"


async def test_a_missing_ca_file_is_named(keep: Keeper) -> None:
    client = keep(Transport(Address(port=1, tls=True, tls_ca="/no/such/ca.pem")))
    error = await failure(client.call("PING", timeout=30))
    assert "/no/such/ca.pem" in error.message
    assert not error.retryable


async def test_the_error_names_a_port_without_tls() -> None:
    """It takes the greeting of TLS for the beginning of a command, and waits for the rest."""

    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with listening(silent) as port:
        address = Address(port=port, tls=True)
        for patient in (True, False):
            with pytest.raises(TransportError, match="check that this is its TLS port"):
                await connect(address, connect_timeout=0.3, patient=patient)


@pytest.fixture
def asking_side(certificates: Path, server_side: ssl.SSLContext) -> ssl.SSLContext:
    """A server that admits only clients with a certificate of its own authority."""
    server_side.verify_mode = ssl.CERT_REQUIRED
    server_side.load_verify_locations(certificates / "ca.pem")
    return server_side


async def test_a_client_certificate_opens_the_door(
    keep: Keeper, certificates: Path, asking_side: ssl.SSLContext
) -> None:
    async with scripted_peer(answer, tls=asking_side) as port:
        environ = {
            "FF_TLS_CA": str(certificates / "ca.pem"),
            "FF_TLS_CERT": str(certificates / "client.pem"),
            "FF_TLS_KEY": str(certificates / "client.key"),
        }
        client = keep(Transport(from_url(f"valkeys://127.0.0.1:{port}", environ)))
        assert await client.call("ECHO", "known") == b"known"


async def test_without_a_client_certificate_the_missing_setting_is_named(
    keep: Keeper, certificates: Path, asking_side: ssl.SSLContext
) -> None:
    async with scripted_peer(answer, tls=asking_side) as port:
        address = Address(port=port, tls=True, tls_ca=str(certificates / "ca.pem"))
        error = await failure(keep(Transport(address)).call("ECHO", "x", timeout=0.3))
        assert "FF_TLS_CERT" in error.message


@pytest.mark.parametrize(
    ("cert", "key"),
    [("none.pem", "client.key"), ("client.pem", "server.key"), ("client.pem", "locked.key")],
)
async def test_a_certificate_that_cannot_be_used_is_named(
    keep: Keeper, certificates: Path, cert: str, key: str
) -> None:
    ca = str(certificates / "ca.pem")
    files: dict[str, Any] = {
        "tls_cert": str(certificates / cert),
        "tls_key": str(certificates / key),
    }
    client = keep(Transport(Address(port=1, tls=True, tls_ca=ca, **files)))
    error = await failure(client.call("PING", timeout=30))
    assert cert in error.message
    assert "FF_TLS_CERT" in error.message
    assert not error.retryable
