"""Answers and lost connections as the errors that every backend raises (10 §5, 12 §4)."""

import ssl
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, cast

import msgspec

from flowfabric.core.catalogue import FAULT_KINDS
from flowfabric.core.errors import (
    AuthError,
    EngineError,
    TransportError,
    UnavailableError,
    ValidationError,
    engine_error,
)
from flowfabric.core.ids import given_name
from flowfabric.engine.http.address import ServerAddress

_HINTS: Final = {
    "transport": "Check the address, and that `flowfabric server` is running there.",
    "timeout": "The server did not answer in time; check its load.",
    "protocol": "Check that the address is a FlowFabric server of the same version.",
    "auth": "Check the certificate, or set FF_TLS_CA to the right CA file.",
}
_NO_TLS: Final = "if this port does not use TLS, write http://"
# Answers by a proxy, which may have forwarded the request before it lost the server.
_MAYBE_PASSED_ON: Final = frozenset({502, 504})


class ServerFault(TransportError):
    """The FlowFabric server was unreachable, or its answer was lost or unusable."""

    @property
    def hint(self) -> str:
        return super().hint if self.ambiguous else _HINTS.get(self.kind, super().hint)


class Answer(msgspec.Struct, frozen=True):
    """What the server answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""


def from_connect(error: BaseException, address: ServerAddress) -> ServerFault:
    """The error for a failed connect: nothing was sent, so it is never ambiguous."""
    if isinstance(error, ssl.SSLCertVerificationError):
        problem = getattr(error, "verify_message", "") or str(error)
        return ServerFault("auth", f"the certificate of {address.peer} is not trusted: {problem}")
    no_tls = address.tls and isinstance(error, (ssl.SSLError, TimeoutError, ConnectionResetError))
    advice = f" ({_NO_TLS})" if no_tls else ""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if isinstance(error, ConnectionRefusedError):
        reason = "connection refused"
    elif isinstance(error, TimeoutError):
        reason = "it did not answer in time"
    return ServerFault("transport", f"no connection to {address.url}: {reason}{advice}")


def lost(peer: str, reason: str, *, sent: bool) -> ServerFault:
    """The error for a lost connection; a request that was sent may have been served."""
    fate = "" if sent else "; the call was not sent"
    return ServerFault("transport", f"{peer}: {reason}{fate}", ambiguous=sent)


def timed_out(peer: str, *, sent: bool) -> ServerFault:
    """The error for a request past its deadline."""
    unsent = "the deadline passed before the call could be sent"
    fate = "no response before the deadline" if sent else unsent
    return ServerFault("timeout", f"{peer}: {fate}", ambiguous=sent)


def refused(answer: Answer, address: ServerAddress, op: str) -> EngineError:
    """The error for a refusal."""
    envelope = _envelope(answer.body)
    if answer.status == HTTPStatus.UNAUTHORIZED and "group" not in envelope:
        missing = "the server needs a token; set FF_API_TOKEN"
        unknown = "the server does not accept the token in FF_API_TOKEN"
        return AuthError("unauthorized", unknown if address.token else missing, op=op)
    code = envelope.get("code")
    if not isinstance(code, str):
        return _unexpected(answer, address, op)
    if code == "transport":
        return _server_fault(envelope, address, op)
    if code == "payload_too_large" and "limit_bytes" in envelope:
        problem = f"the server accepts requests of at most {envelope['limit_bytes']} bytes"
        return ValidationError(code, problem, op=op)
    if code == "unavailable":
        closing = envelope.get("retryable") is True
        of = str(envelope.get("detail") or op)
        return UnavailableError(code, of, op=of, shutting_down=closing)
    error = engine_error(code, _details(envelope), op, function="the server")
    if isinstance(error, ValidationError):
        error.undecodable = answer.status == HTTPStatus.UNPROCESSABLE_ENTITY
    return error


def _envelope(body: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _details(envelope: Mapping[str, Any]) -> list[str]:
    given = envelope.get("details")
    if isinstance(given, list):
        found = [str(each) for each in cast("Sequence[object]", given)]
    else:
        found = [str(envelope["detail"])] if envelope.get("detail") else []
    # The server only knows the ids that this process derived from names.
    found = [given_name(each) for each in found]
    wait = envelope.get("retry_after_ms")
    if wait is not None and not any(each.startswith("retry_after_ms=") for each in found):
        found.append(f"retry_after_ms={wait}")
    return found


def _server_fault(envelope: Mapping[str, Any], address: ServerAddress, op: str) -> TransportError:
    """A fault between the server and its Valkey."""
    kind = envelope.get("kind")
    known = kind if isinstance(kind, str) and kind in FAULT_KINDS else "other"
    message = f"{address.peer}: {envelope.get('detail') or envelope.get('error', '')}"
    return TransportError(known, message, ambiguous=envelope.get("ambiguous") is True, op=op)


def _unexpected(answer: Answer, address: ServerAddress, op: str) -> EngineError:
    """The error for an answer without our envelope: a missing route, a proxy or another service."""
    status = answer.status
    if status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED) and _envelope(answer.body):
        problem = f"{address.url} returned {status} {_phrase(status)} for {op}"
        advice = "check the address, and that the server has the same version of FlowFabric"
        return UnavailableError("unavailable", f"{problem}; {advice}", op=op)
    said = f"{address.url} returned {status} {_phrase(status)}"
    if target := answer.headers.get("location"):
        return ServerFault("protocol", f"{said}: it moved to {target}; use that address", op=op)
    if status in _MAYBE_PASSED_ON:
        return ServerFault("transport", said, ambiguous=True, op=op)
    kind = "transport" if status == HTTPStatus.SERVICE_UNAVAILABLE else "protocol"
    return ServerFault(kind, said, op=op)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""
