"""Connect to a deployment and check that its Valkey is new enough."""

import asyncio
import logging
from typing import Final, Unpack

from flowfabric.core.backoff import Backoff
from flowfabric.core.errors import EngineError, TransportError, engine_error
from flowfabric.valkey.address import Address
from flowfabric.valkey.cluster import ClusterTransport
from flowfabric.valkey.connection import CONNECT_TIMEOUT, DialOptions, Reply
from flowfabric.valkey.link import Revive
from flowfabric.valkey.transport import Transport

MINIMUM_VERSION: Final = (8, 0)

log = logging.getLogger(__name__)

# After this long, log what the process is waiting for.
_SILENCE: Final = 1.0
VERSION_BUDGET_S: Final = 60.0
"""How long a process that sets up a deployment waits for a Valkey that is new enough (09 §1.1)."""
VERSION_PAUSES_S: Final = (0.2, 5.0)


async def connect(
    address: Address,
    *,
    revive: Revive | None = None,
    patient: bool = True,
    **options: Unpack[DialOptions],
) -> Transport:
    """A transport to one server or a cluster that has answered PING; the caller closes it.

    `revive` may restart a single server that cannot be reached. A `patient` caller retries until
    the connect timeout, and the log says so; others get the first refusal.
    """
    limit = options.get("connect_timeout", CONNECT_TIMEOUT)
    if address.cluster:
        transport = ClusterTransport(address, **options)
    else:
        transport = Transport(address, revive=revive, **options)

    def log_waiting() -> None:
        text, extra = "waiting for Valkey at %s, for up to %g s", {"action": "connect_waiting"}
        if patient:
            log.warning(text, address.peer, limit, extra=extra)

    waiting = asyncio.get_running_loop().call_later(_SILENCE, log_waiting)
    try:
        await transport.wait_ready(limit, patient=patient)
    except BaseException:
        await transport.aclose()
        raise
    finally:
        waiting.cancel()
    return transport


async def check_server(
    transport: Transport, *, budget: float = VERSION_BUDGET_S, replicas: bool = True
) -> tuple[int, int]:
    """The lowest (major, minor) over all nodes; raises if it is below `MINIMUM_VERSION`.

    Asks again for `budget` seconds, because restarts, failovers and rolling upgrades end by
    themselves. Another product or a refused login is final.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + budget
    call_all = transport.call_all_nodes if replicas else transport.call_all_primaries
    backoff, waiting = Backoff(*VERSION_PAUSES_S), False
    while True:
        pause = backoff.next_s()
        try:
            return _lowest(await call_all("INFO", "server"))
        except _NotValkeyError as error:
            raise _too_low(str(error)) from None
        except EngineError as error:
            final = isinstance(error, TransportError) and not error.retryable
            if final or loop.time() + pause > deadline:
                raise
            if not waiting:
                waiting = True
                text = "the version of Valkey cannot be used yet, asking again for up to %g s: %s"
                extra = {"action": "version_waiting", "error": str(error)}
                log.warning(text, budget, error, extra=extra)
        await asyncio.sleep(pause)


class _NotValkeyError(Exception):
    """The server is another product; asking again cannot help."""


def _too_low(detail: str) -> EngineError:
    return engine_error("valkey_version_too_low", [detail])


def _lowest(bodies: dict[str, Reply]) -> tuple[int, int]:
    if not bodies:
        raise _too_low("no node answered INFO server")
    version = min(_version(node, body) for node, body in bodies.items())
    if version < MINIMUM_VERSION:
        detected, required = (".".join(map(str, v)) for v in (version, MINIMUM_VERSION))
        raise _too_low(f"detected {detected}, required >= {required}")
    return version


def _version(node: str, body: bytes) -> tuple[int, int]:
    fields = dict(line.split(":", 1) for line in body.decode().splitlines() if ":" in line)
    found = fields.get("valkey_version")
    # Newer servers freeze redis_version for old clients, so it counts only as a fallback.
    if found is None and fields.get("server_name", "").lower() == "valkey":
        found = fields.get("redis_version")
    if found is None and "redis_version" in fields:
        raise _NotValkeyError(f"{node} is not Valkey (redis_version {fields['redis_version']})")
    try:
        major, minor = (found or "").split(".")[:2]
        return int(major), int(minor)
    except ValueError:
        raise _too_low(f"{node} does not report its version ({found!r})") from None
