"""The Lua function library: assembled from its files, loaded, versioned, reloaded when lost."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

import msgspec

from flowfabric.core.environment import flag, whole_number
from flowfabric.core.errors import EngineError, TransportError, UnavailableError
from flowfabric.valkey.transport import Ask, Transport

log = logging.getLogger(__name__)
LIBRARY_VERSION = 14
"""Rises whenever a function's arguments, reply or the set of names change."""
MIN_CLIENT = 9
"""The oldest library version whose callers this library still serves."""
_EVENTS_MAXLEN = 10_000
# Feed length, cluster, extended: what older versions do not say of themselves.
_SETTINGS_BEFORE_3 = (_EVENTS_MAXLEN, 0, 0)
_LOAD_PAUSE = 0.5
# A load, the look at it, and a second go when another process came in between.
_LOAD_ROUNDS = 4
_EXISTS = "Library 'flowfabric' already exists"
_TRANSIENT_KINDS = frozenset({"cluster", "read_only", "busy_loading", "transport", "timeout"})


class LibraryInfo(msgspec.Struct, frozen=True):
    """What a server says about the library it has loaded."""

    version: int
    content_hash: str
    min_client: int
    events_maxlen: int = _EVENTS_MAXLEN
    cluster: bool = False
    """Whether it rings doorbells as a cluster needs it."""
    extended: bool = False
    """Whether it has functions that are not part of the package: see `include`."""


def _sources(folder: Traversable) -> list[str]:
    paths = sorted((p for p in folder.iterdir() if p.name.endswith(".lua")), key=lambda p: p.name)
    return [path.read_text(encoding="utf-8") for path in paths]


_extensions: list[str] = []


def include(source: str) -> None:
    """Make more Lua functions part of the library that this process loads and accepts.

    For tests, which move the engine's clock with one. They see the names of the library's own
    files. A process that does not include them refuses a server that has them.
    """
    if source not in _extensions:
        _extensions.append(source)
        _body.cache_clear()


@cache
def _body() -> tuple[str, str]:
    """The assembled code without its settings, and the hash that identifies it."""
    root = files("flowfabric") / "lua"
    modules, *helpers = _sources(root / "lib")
    # Every other file gets a scope of its own: Lua allows 200 locals in one.
    scoped = [*helpers, *_sources(root / "functions"), *_extensions]
    body = "\n".join([modules, *(f"do\n{text}\nend\n" for text in scoped)])
    return body, hashlib.sha256(body.encode()).hexdigest()[:16]


def _lua(value: bool) -> str:  # noqa: FBT001
    return "true" if value else "false"


def _assemble(*, cluster: bool, events_maxlen: int) -> str:
    body, content_hash = _body()
    return (
        "#!lua name=flowfabric\n"
        f"local SETTINGS = {{ cluster = {_lua(cluster)}, events_maxlen = '{events_maxlen}', "
        f"version = {LIBRARY_VERSION}, content_hash = '{content_hash}', min_client = {MIN_CLIENT}, "
        f"extended = {_lua(bool(_extensions))} }}\n"
    ) + body


Stored = Mapping[str, LibraryInfo | None]
"""What each primary has loaded; None where the library is missing."""


class LibraryConflictError(UnavailableError):
    """The library in the server and this process cannot live together."""

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__("library_version_conflict", problem, op="ensure_library")
        self.args = (problem, advice)
        self._advice = advice

    @property
    def hint(self) -> str:
        """What to do: which side is to change depends on the case."""
        return self._advice


class _Rules(msgspec.Struct, frozen=True):
    """What may be replaced, and which settings ours gets. A newer library never is."""

    same_version: bool
    """Other content of our own version."""
    any_older: bool
    """Also one whose callers ours does not serve."""
    cluster: bool
    events_maxlen: int | None
    """None keeps what is stored."""

    def must_load(self, node: str, stored: LibraryInfo | None) -> bool:
        """Whether to install ours; raises when the stored one and ours cannot live together."""
        if stored is None:
            return True
        if stored.version < LIBRARY_VERSION:
            return self._may_replace_older(node, stored)
        if stored.version == LIBRARY_VERSION:
            return self._may_replace_content(node, stored) or self._has_other_settings(stored)
        if stored.min_client > LIBRARY_VERSION:
            raise LibraryConflictError(
                f"{node} has version {stored.version}, which serves callers from version "
                f"{stored.min_client} on; ours is {LIBRARY_VERSION}",
                "Upgrade this process: the server runs a newer function library.",
            )
        if stored.extended and not _extensions:
            raise _extended(node, stored)
        return False

    def _may_replace_older(self, node: str, stored: LibraryInfo) -> bool:
        if self.any_older or stored.version >= MIN_CLIENT:
            return True
        raise LibraryConflictError(
            f"{node} has version {stored.version}; ours, {LIBRARY_VERSION}, would end the service "
            f"for its callers: it serves them from version {MIN_CLIENT} on",
            "Stop the older processes, then run `flowfabric doctor --prepare` with this version.",
        )

    def _may_replace_content(self, node: str, stored: LibraryInfo) -> bool:
        _, ours = _body()
        if stored.content_hash == ours:
            return False
        if self.same_version:
            return True
        if stored.extended and not _extensions:
            raise _extended(node, stored)
        raise LibraryConflictError(
            f"{node} has version {stored.version} with other content than ours "
            f"({stored.content_hash}, ours is {ours}): another build of the same version loaded it",
            "Use one build everywhere, or start this one once with FF_FORCE_LUA_RELOAD=1 to load "
            "its content over the other.",
        )

    def _has_other_settings(self, stored: LibraryInfo) -> bool:
        other_length = self.events_maxlen not in (None, stored.events_maxlen)
        return other_length or stored.cluster != self.cluster

    def code(self, stored: LibraryInfo | None) -> str:
        """Our library, with the settings of the one it replaces where this process has none."""
        kept = _EVENTS_MAXLEN if stored is None else stored.events_maxlen
        return _assemble(cluster=self.cluster, events_maxlen=self.events_maxlen or kept)


def _extended(node: str, stored: LibraryInfo) -> LibraryConflictError:
    return LibraryConflictError(
        f"{node} has version {stored.version} with functions for tests: its clock can be moved",
        "Use a server that no test uses, or delete the library there: FUNCTION DELETE flowfabric.",
    )


async def _read(ask: Ask) -> LibraryInfo | None:
    try:
        version, content_hash, *more = await ask("FCALL", "ff_version", 0)
    except TransportError as error:
        if error.kind == "script_not_loaded":
            return None
        raise
    min_client, maxlen, cluster, extended = [*more, *_SETTINGS_BEFORE_3[len(more) - 1 :]][:4]
    return LibraryInfo(
        version, content_hash.decode(), min_client, maxlen, bool(cluster), bool(extended)
    )


async def read_primaries(transport: Transport) -> Stored:
    """The library of every primary."""
    primaries = await transport.primaries()
    found = await asyncio.gather(*map(_read, primaries.values()))
    return dict(zip(primaries, found, strict=True))


async def read_library(transport: Transport) -> LibraryInfo | None:
    """The library of the oldest primary, or None when a primary has none."""
    found = (await read_primaries(transport)).values()
    known = [info for info in found if info is not None]
    if len(known) < len(found):
        return None
    return min(known, key=lambda info: info.version)


def _transient(error: EngineError) -> bool:
    return isinstance(error, TransportError) and error.kind in _TRANSIENT_KINDS


def _rules(transport: Transport, *, owned: bool, only_joining: bool) -> _Rules:
    force = flag(os.environ, "FF_FORCE_LUA_RELOAD")
    maxlen = whole_number(os.environ, "FF_EVENTS_MAXLEN", 0, 1, 2**53 - 1) or None
    return _Rules(
        same_version=force or owned,
        any_older=not only_joining,
        cluster=transport.is_cluster,
        # The length of the feeds is the deployment's: whoever prepares it decides.
        events_maxlen=None if only_joining else maxlen,
    )


async def library_fits(transport: Transport, *, owned: bool = False) -> bool:
    """Whether every primary serves this process as it is; raises when it cannot. Loads nothing."""
    rules = _rules(transport, owned=owned, only_joining=False)
    found = await read_primaries(transport)
    # All are judged: a conflict on one is told even if another only lacks the library.
    lacking = {node for node, stored in found.items() if rules.must_load(node, stored)}
    return not lacking


async def ensure_library(
    transport: Transport,
    *,
    owned: bool = False,
    only_joining: bool = False,
    found: Stored | None = None,
) -> bool:
    """Makes sure every primary serves a library this process can call; True when it loaded ours.

    An older process never replaces a newer library; transient faults are tried again. `owned`:
    the server is this project's own, so other content of our version is replaced. `only_joining`
    leaves an older library alone whose callers ours would not serve, and settings as they are.
    `found` saves a first look.
    """
    rules = _rules(transport, owned=owned, only_joining=only_joining)
    loop = asyncio.get_running_loop()
    last = loop.time() + transport.patience_s - _LOAD_PAUSE
    while True:
        try:
            loaded = await _ensure(transport, rules, found)
        except EngineError as error:
            if loop.time() > last or not _transient(error):
                raise
            log.warning("function library not loaded yet, trying again: %s", error)
            await asyncio.sleep(_LOAD_PAUSE)
            found = None
        else:
            if loaded:
                log.info("function library version %s loaded", LIBRARY_VERSION)
            return loaded


async def _ensure(transport: Transport, rules: _Rules, found: Stored | None) -> bool:
    found = await read_primaries(transport) if found is None else found
    # A conflict on one primary leaves the others as they are.
    lacking = {node for node, stored in found.items() if rules.must_load(node, stored)}
    if not lacking:
        return False
    fitting = found.keys() - lacking
    # A primary that lost the library gets the settings that the others have.
    model = next(filter(None, found.values()), None)
    loaded = [
        await _load(node, ask, rules, model)
        for node, ask in (await transport.primaries()).items()
        if node not in fitting
    ]
    return any(loaded)


async def _load(node: str, ask: Ask, rules: _Rules, model: LibraryInfo | None) -> bool:
    """Load ours on one primary unless another process has just made that needless or wrong."""
    loaded = exists = False
    for _ in range(_LOAD_ROUNDS):
        stored = await _read(ask)
        if not rules.must_load(node, stored):
            return loaded
        # What is missing is never loaded over what came meanwhile.
        replace = ("REPLACE",) if exists or stored is not None else ()
        try:
            await ask("FUNCTION", "LOAD", *replace, rules.code(stored or model))
            loaded = True
        except TransportError as error:
            if replace or _EXISTS not in error.message:
                raise
            # Another process was faster, or the one that is there does not say what it is.
            exists = True
    raise LibraryConflictError(
        f"{node}: other processes load other content of version {LIBRARY_VERSION} all the time",
        "Use one build everywhere, and FF_FORCE_LUA_RELOAD=1 in one process at most.",
    )
