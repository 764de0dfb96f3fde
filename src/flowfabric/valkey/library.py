"""The Lua function library: assembled from its files, loaded, versioned, reloaded when lost."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import msgspec

from flowfabric.core.errors import ConfigError, EngineError, TransportError, engine_error
from flowfabric.valkey.transport import Transport

__all__ = ["LIBRARY_VERSION", "MIN_CLIENT", "LibraryInfo", "ensure_library", "read_library"]

log = logging.getLogger(__name__)

LIBRARY_VERSION = 1
"""Rises whenever a function's arguments, reply or the set of names change."""

MIN_CLIENT = 1
"""The oldest library version whose callers this library still serves."""

_LOAD_PAUSES = (0.5, 1.0, 2.0, 4.0, 7.0)
_TRANSIENT_KINDS = frozenset({"cluster", "read_only", "busy_loading", "transport", "timeout"})


class LibraryInfo(msgspec.Struct, frozen=True):
    """What a server says about the library it has loaded."""

    version: int
    content_hash: str
    min_client: int


class _Settings(msgspec.Struct, frozen=True):
    cluster: bool
    events_maxlen: int
    testing: bool


def _sources(folder: Traversable) -> list[str]:
    paths = sorted((p for p in folder.iterdir() if p.name.endswith(".lua")), key=lambda p: p.name)
    return [path.read_text(encoding="utf-8") for path in paths]


@cache
def _body() -> tuple[str, str]:
    """The assembled code without its settings, and the hash that identifies it."""
    root = files("flowfabric") / "lua"
    # Each function file gets a scope of its own: Lua allows 200 locals in one.
    functions = [f"do\n{text}\nend\n" for text in _sources(root / "functions")]
    body = "\n".join(_sources(root / "lib") + functions)
    return body, hashlib.sha256(body.encode()).hexdigest()[:16]


def _assemble(settings: _Settings) -> str:
    body, content_hash = _body()
    head = (
        "#!lua name=flowfabric\n"
        f"local SETTINGS = {{ cluster = {'true' if settings.cluster else 'false'}, "
        f"events_maxlen = '{settings.events_maxlen}', version = {LIBRARY_VERSION}, "
        f"content_hash = '{content_hash}', min_client = {MIN_CLIENT} }}\n"
    )
    tail = ""
    if settings.testing:
        tests = files("flowfabric") / "lua" / "testing"
        tail = "\n".join(f"do\n{text}\nend\n" for text in _sources(tests))
    return head + body + tail


async def read_library(transport: Transport) -> LibraryInfo | None:
    """The library of the oldest primary, or None when a primary has none."""
    oldest: LibraryInfo | None = None
    try:
        replies: dict[str, Any] = await transport.call_all_primaries("FCALL", "ff_version", 0)
    except TransportError as error:
        if error.kind == "script_not_loaded":
            return None
        raise
    for version, content_hash, min_client in replies.values():
        info = LibraryInfo(int(version), content_hash.decode(), int(min_client))
        if oldest is None or info.version < oldest.version:
            oldest = info
    return oldest


def _must_load(stored: LibraryInfo | None, *, force: bool) -> bool:
    """Whether to install ours; raises when the stored one and ours cannot live together."""
    _, content_hash = _body()
    if stored is None or force or stored.version < LIBRARY_VERSION:
        return True
    if stored.version == LIBRARY_VERSION:
        if stored.content_hash == content_hash:
            return False
        raise engine_error(
            "library_version_conflict",
            (f"version {stored.version} is loaded with other content than ours",),
            "ensure_library",
        )
    if stored.min_client <= LIBRARY_VERSION:
        return False
    raise engine_error(
        "library_version_conflict",
        (f"version {stored.version} is loaded, ours is {LIBRARY_VERSION}: upgrade this process",),
        "ensure_library",
    )


def _transient(error: EngineError) -> bool:
    return isinstance(error, TransportError) and error.kind in _TRANSIENT_KINDS


async def ensure_library(
    transport: Transport, *, testing: bool = False, events_maxlen: int | None = None
) -> bool:
    """Makes sure every primary serves a library this process can call; True when it loaded ours.

    An older process never replaces a newer library; transient faults are tried again.
    """
    force = os.environ.get("FF_FORCE_LUA_RELOAD", "").lower() in {"1", "true", "yes"}
    maxlen = events_maxlen or _events_maxlen()
    settings = _Settings(transport.is_cluster, maxlen, testing)
    for pause in (*_LOAD_PAUSES, None):
        try:
            if not _must_load(await read_library(transport), force=force):
                return False
            await transport.call_all_primaries("FUNCTION", "LOAD", "REPLACE", _assemble(settings))
            _must_load(await read_library(transport), force=False)
        except EngineError as error:
            if pause is None or not _transient(error):
                raise
            log.warning("function library not loaded yet, trying again: %s", error)
            await asyncio.sleep(pause)
        else:
            log.info("function library version %s loaded", LIBRARY_VERSION)
            return True
    raise AssertionError("unreachable")


def _events_maxlen() -> int:
    text = os.environ.get("FF_EVENTS_MAXLEN", "10000")
    if not re.fullmatch(r"[1-9][0-9]*", text):
        raise ConfigError("environment", f"invalid value for FF_EVENTS_MAXLEN: {text!r}")
    return int(text)
