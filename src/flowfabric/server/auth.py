"""Bearer tokens, and the tokens file with scopes and namespaces (10 §2.2, §11.10)."""

import hashlib
import hmac
import logging
import math
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import msgspec

from flowfabric.core.errors import ConfigError, ValidationError
from flowfabric.core.ids import validate_namespace
from flowfabric.server.routing import Scope

log = logging.getLogger(__name__)
SCOPES: tuple[str, ...] = get_args(Scope)
_INCLUDED_BY = {"remote": ("operate",)}
_LOOK_S = 1.0
_PREFIX = "sha256:"
_MAX_RATE = 1_000_000
_is_id = re.compile(r"[A-Za-z0-9._-]{1,64}").fullmatch
_is_hash = re.compile(r"sha256:[0-9a-f]{64}").fullmatch


class RateLimit:
    """How many requests a token may send to one server process.

    The first requests may come at once, as many as `burst`; after that, `rate_per_s`.
    """

    __slots__ = ("_at", "_left", "burst", "rate_per_s")

    def __init__(self, rate_per_s: float, burst: int) -> None:
        self.rate_per_s = rate_per_s
        self.burst = burst
        self._left = float(burst)
        self._at = time.monotonic()

    def take(self) -> float:
        """Count a request; returns 0, or the seconds after which it would be accepted."""
        now = time.monotonic()
        self._left = min(self.burst, self._left + (now - self._at) * self.rate_per_s)
        self._at = now
        if self._left < 1:
            return (1 - self._left) / self.rate_per_s
        self._left -= 1
        return 0.0


class ApiCaller(msgspec.Struct, frozen=True):
    """Who makes a request, and what they may do."""

    token_id: str
    scopes: frozenset[str] = frozenset({"admin"})
    namespaces: frozenset[str] | None = None
    """None means all of them."""
    limit: RateLimit | None = None

    def may(self, scope: str) -> bool:
        """Whether the caller has this scope."""
        return bool(self.scopes & {scope, "admin", *_INCLUDED_BY.get(scope, ())})

    def sees(self, namespace: str | None) -> bool:
        """Whether the caller may see what belongs to this namespace."""
        return self.namespaces is None or namespace in self.namespaces


ANYONE = ApiCaller("anonymous")
"""The caller of a server without tokens."""
OWNER = ApiCaller("FF_API_TOKEN")


class StoredToken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One token of the file; the token itself is not stored."""

    id: str
    hash: str
    scopes: tuple[str, ...]
    namespaces: tuple[str, ...] | None = None
    rate_per_s: float | None = None
    """How many requests per second a server accepts; None means any number."""
    burst: int | None = None
    """How many requests may come at once; by default, those of one second."""
    created_at: int = 0

    def check(self) -> None:
        """Raise `ConfigError` if the entry cannot be used."""
        if _is_id(self.id) is None:
            raise _invalid(self.id, "the id must be 1 to 64 characters of A-Z a-z 0-9 . _ -")
        if _is_hash(self.hash) is None:
            raise _invalid(self.id, "hash must be sha256: and 64 hex digits")
        unknown = sorted(set(self.scopes) - set(SCOPES))
        if unknown or not self.scopes:
            wrong = f"unknown scope {unknown[0]!r}" if unknown else "scopes must not be empty"
            raise _invalid(self.id, f"{wrong}; the scopes are {', '.join(SCOPES)}")
        if self.rate_per_s is not None and not 0 < self.rate_per_s <= _MAX_RATE:
            raise _invalid(self.id, f"rate_per_s must be above 0 and at most {_MAX_RATE}")
        if self.burst is not None and (self.rate_per_s is None or not 0 < self.burst <= _MAX_RATE):
            raise _invalid(self.id, f"burst must be from 1 to {_MAX_RATE} and requires rate_per_s")
        for namespace in self.namespaces or ():
            try:
                validate_namespace(namespace)
            except ValidationError as error:
                raise _invalid(self.id, error.detail) from None

    @property
    def caller(self) -> ApiCaller:
        """The caller that presents this token."""
        allowed = None if self.namespaces is None else frozenset(self.namespaces)
        limit = None
        if self.rate_per_s is not None:
            limit = RateLimit(self.rate_per_s, self.burst or math.ceil(self.rate_per_s))
        return ApiCaller(self.id, frozenset(self.scopes), allowed, limit)


class _TokensFile(msgspec.Struct, forbid_unknown_fields=True):
    token: list[StoredToken] = []


def _invalid(token_id: str, problem: str) -> ConfigError:
    return ConfigError("tokens", f"token {token_id!r}: {problem}")


def read_tokens(path: Path) -> list[StoredToken]:
    """The tokens of a file; an absent file has none."""
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=_TokensFile).token
    except FileNotFoundError:
        return []
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError("tokens", f"cannot read {path}: {error}") from error
    for each in found:
        each.check()
    if len({each.id for each in found}) < len(found):
        raise ConfigError("tokens", f"{path} has two tokens with the same id")
    return found


def write_tokens(path: Path, tokens: Sequence[StoredToken]) -> None:
    """Replace the file atomically. Only the owner can read a new file.

    Follows links and keeps owner and mode, because servers may use the file under another name or
    as another user.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(descriptor, "w") as file:
        file.write("".join(_toml(each) for each in tokens))
        with suppress(FileNotFoundError, PermissionError):
            before = path.stat()
            os.fchown(descriptor, before.st_uid, before.st_gid)
            os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
    Path(name).replace(path)


def _toml(token: StoredToken) -> str:
    fields: dict[str, Any] = msgspec.structs.asdict(token)
    lines = [f"{name} = {_value(each)}" for name, each in fields.items() if each is not None]
    return "\n".join(["[[token]]", *lines]) + "\n\n"


def _value(value: object) -> str:
    # JSON text, numbers and arrays of text are also TOML.
    return msgspec.json.encode(value).decode()


def new_token(
    token_id: str,
    scopes: Collection[str],
    namespaces: Collection[str] | None,
    *,
    rate_per_s: float | None = None,
    burst: int | None = None,
) -> tuple[str, StoredToken]:
    """A new random token, and its stored form."""
    token = f"ff_{secrets.token_urlsafe(32)}"
    allowed = None if namespaces is None else tuple(sorted(set(namespaces)))
    stored = StoredToken(
        id=token_id,
        hash=token_hash(token),
        scopes=tuple(scope for scope in SCOPES if scope in scopes) or tuple(scopes),
        namespaces=allowed,
        rate_per_s=rate_per_s,
        burst=burst,
        created_at=round(time.time() * 1000),
    )
    stored.check()
    return token, stored


def token_hash(token: str) -> str:
    """The stored digest of a token. Tokens are random, so a plain hash cannot be reversed."""
    return _PREFIX + hashlib.sha256(token.encode()).hexdigest()


class Tokens:
    """Finds the caller of a token. A changed file takes effect within a second."""

    def __init__(self, token: str | None = None, path: Path | None = None) -> None:
        self._token = None if token is None else token.encode()
        self._path = path
        self._known: dict[str, ApiCaller] = {}
        self._stamp: tuple[int, ...] | None = None
        self._looked_at = -_LOOK_S
        if path is not None:
            self._load(path)

    @property
    def required(self) -> bool:
        """Whether requests need a token."""
        return self._token is not None or self._path is not None

    def identify(self, authorization: bytes | None) -> ApiCaller | None:
        """Who sent this header; None if the token is missing or unknown."""
        if not self.required:
            return ANYONE
        if authorization is None or not authorization.startswith(b"Bearer "):
            return None
        given = authorization[7:]
        if self._token is not None and hmac.compare_digest(given, self._token):
            return OWNER
        if self._path is None:
            return None
        self._look(self._path)
        return self._known.get(token_hash(given.decode("latin-1")))

    def is_current(self, caller: ApiCaller, authorization: bytes | None) -> bool:
        """Whether the sender of this header still has the rights of `caller`."""
        found = self.identify(authorization)
        rights = None if found is None else (found.scopes, found.namespaces)
        return rights == (caller.scopes, caller.namespaces)

    def _look(self, path: Path) -> None:
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        try:
            if _stamp(path) != self._stamp:
                self._load(path)
                extra = {"action": "tokens_loaded", "path": str(path)}
                if self._stamp is None:
                    log.warning("the tokens file is gone: no token of it is valid", extra=extra)
                else:
                    log.info("reloaded the tokens file", extra=extra)
        except ConfigError as error:
            # A half-edited file must neither lock everyone out nor let anyone in.
            extra = {"action": "tokens_unreadable", "path": str(path)}
            text = "cannot reload the tokens file; the tokens read before stay valid: %s"
            log.error(text, error, extra=extra)  # noqa: TRY400

    def _load(self, path: Path) -> None:
        self._stamp = _stamp(path)
        self._known = {each.hash: each.caller for each in read_tokens(path)}
        self._looked_at = time.monotonic()


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    # ctime too: after a change of permissions, an unreadable file may be readable.
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino
