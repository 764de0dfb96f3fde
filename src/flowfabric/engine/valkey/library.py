"""The Lua function library: assembled from its files, loaded, versioned, reloaded when lost."""

import asyncio
import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import msgspec

from flowfabric.core.environment import flag, whole_number
from flowfabric.core.errors import TransportError, UnavailableError
from flowfabric.valkey.transport import Ask, Transport

log = logging.getLogger(__name__)
LIBRARY_VERSION = 45
"""Raised whenever the set of functions, or the arguments or reply of one, changes."""
MIN_CLIENT = 42
"""The oldest library version whose callers this library still serves."""
_EVENTS_MAXLEN = 10_000
_CASCADE_UNITS = 128
_MAX_CASCADE_UNITS = 1000
LOAD_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 7.0)
"""How long a load waits after each transient fault, before it gives up (09 §1.4)."""
# One load and check, and a second try if another process interfered.
_LOAD_ROUNDS = 4
_EXISTS = "Library 'flowfabric' already exists"
_TRANSIENT_KINDS = frozenset({"cluster", "read_only", "busy_loading", "transport", "timeout"})


class LibraryInfo(msgspec.Struct, frozen=True):
    """The library that a server has loaded."""

    version: int
    content_hash: str
    min_client: int
    events_maxlen: int = _EVENTS_MAXLEN
    cluster: bool = False
    """Whether it rings doorbells in the way that a cluster needs."""
    extended: bool = False
    """Whether it has functions that are not part of the package; see `include`."""
    cascade_units: int = _CASCADE_UNITS
    """How many dependent members one call may resolve."""


def _sources(folder: Traversable) -> list[str]:
    paths = sorted((p for p in folder.iterdir() if p.name.endswith(".lua")), key=lambda p: p.name)
    return [path.read_text(encoding="utf-8") for path in paths]


_extensions: list[str] = []


def include(source: str) -> None:
    """Add Lua functions for tests; processes without them refuse to use the server."""
    if source not in _extensions:
        _extensions.append(source)
        _body.cache_clear()


def include_test_clock() -> None:
    """Add the functions that move the engine's clock; see `include`."""
    include((files("flowfabric") / "lua" / "testing" / "clock.lua").read_text(encoding="utf-8"))


@cache
def _body() -> tuple[str, str]:
    """The assembled code without its settings, and the hash that identifies it."""
    root = files("flowfabric") / "lua"
    modules, *helpers = _sources(root / "lib")
    # Every other file gets its own scope, because Lua allows only 200 locals in one.
    scoped = [*helpers, *_sources(root / "functions"), *_extensions]
    body = "\n".join([modules, *(f"do\n{text}\nend\n" for text in scoped)])
    return body, hashlib.sha256(body.encode()).hexdigest()[:16]


def _assemble(*, cluster: bool, events_maxlen: int, cascade_units: int = _CASCADE_UNITS) -> str:
    body, content_hash = _body()
    extended = bool(_extensions)
    return (
        "#!lua name=flowfabric\n"
        f"local SETTINGS = {{ cluster = {str(cluster).lower()}, events_maxlen = '{events_maxlen}', "
        f"version = {LIBRARY_VERSION}, content_hash = '{content_hash}', min_client = {MIN_CLIENT}, "
        f"extended = {str(extended).lower()}, cascade_units = {cascade_units} }}\n"
    ) + body


Stored = Mapping[str, LibraryInfo | None]
"""The library on each primary; None where it is missing."""


class LibraryConflictError(UnavailableError):
    """This process cannot use the library that the server has loaded."""

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__("library_version_conflict", problem, op="ensure_library")
        self.args = (problem, advice)
        self._advice = advice

    @property
    def hint(self) -> str:
        return self._advice


class _Rules(msgspec.Struct, frozen=True):
    """Which libraries ours may replace, and its settings. A newer one is never replaced."""

    same_version: bool
    """Replace other content of the same version."""
    any_older: bool
    """Replace also a version whose callers ours does not serve."""
    cluster: bool
    events_maxlen: int | None
    """None keeps the stored setting, here and below."""
    cascade_units: int | None

    def must_load(self, node: str, stored: LibraryInfo | None) -> bool:
        """Whether to load ours; an error if the stored one can be neither used nor replaced."""
        if stored is None:
            return True
        found = f"{node} has version {stored.version}"
        if stored.version < LIBRARY_VERSION:
            if self.any_older or stored.version >= MIN_CLIENT:
                return True
            raise LibraryConflictError(
                f"{found}, and processes may still use it: version {LIBRARY_VERSION} of this "
                f"process serves callers from version {MIN_CLIENT}",
                "Stop the older processes, then run `flowfabric doctor --prepare` with this "
                "version.",
            )
        if stored.min_client > LIBRARY_VERSION:
            raise LibraryConflictError(
                f"{found}, which serves callers from version {stored.min_client}; this process "
                f"has version {LIBRARY_VERSION}",
                "Upgrade this process: the server runs a newer function library.",
            )
        same = stored.version > LIBRARY_VERSION or stored.content_hash == _body()[1]
        if not same and self.same_version:
            return True
        if stored.extended and not _extensions:
            raise LibraryConflictError(
                f"{found} with functions for tests that move its clock",
                "Use another server, or delete the library there: FUNCTION DELETE flowfabric.",
            )
        if not same:
            raise LibraryConflictError(
                f"{found} from another build (content {stored.content_hash}, this process has "
                f"{_body()[1]})",
                "Use one build everywhere, or start this one once with FF_FORCE_LUA_RELOAD=1 to "
                "replace the content.",
            )
        return stored.version == LIBRARY_VERSION and self._has_other_settings(stored)

    def _has_other_settings(self, stored: LibraryInfo) -> bool:
        other_length = self.events_maxlen not in (None, stored.events_maxlen)
        other_units = self.cascade_units not in (None, stored.cascade_units)
        return other_length or other_units or stored.cluster != self.cluster

    def code(self, stored: LibraryInfo | None) -> str:
        """Our library; settings that this process lacks come from the replaced one."""
        length = _EVENTS_MAXLEN if stored is None else stored.events_maxlen
        units = _CASCADE_UNITS if stored is None else stored.cascade_units
        return _assemble(
            cluster=self.cluster,
            events_maxlen=self.events_maxlen or length,
            cascade_units=self.cascade_units or units,
        )


async def _read(ask: Ask) -> LibraryInfo | None:
    try:
        version, content_hash, *more = await ask("FCALL", "ff_version", 0)
    except TransportError as error:
        if error.kind == "script_not_loaded":
            return None
        raise
    # Other versions may report fewer or more settings.
    return LibraryInfo(version, content_hash.decode(), *more[:5])


async def read_primaries(transport: Transport) -> Stored:
    primaries = await transport.primaries()
    found = await asyncio.gather(*map(_read, primaries.values()))
    return dict(zip(primaries, found, strict=True))


async def read_library(transport: Transport) -> LibraryInfo | None:
    """The library of the oldest primary, or None when a primary has none."""
    found = list((await read_primaries(transport)).values())
    if None in found:
        return None
    return min(filter(None, found), key=lambda info: info.version)


def configured_library() -> tuple[bool, int | None, int | None]:
    """Whether to reload the library always, and the feed length and cascade units to set."""
    return (
        flag(os.environ, "FF_FORCE_LUA_RELOAD"),
        whole_number(os.environ, "FF_EVENTS_MAXLEN", 0, 1, 2**53 - 1) or None,
        whole_number(os.environ, "FF_CASCADE_INLINE_EDGES", 0, 1, _MAX_CASCADE_UNITS) or None,
    )


def _rules(transport: Transport, *, owned: bool, only_joining: bool) -> _Rules:
    force, maxlen, units = configured_library()
    return _Rules(
        same_version=force or owned,
        any_older=not only_joining,
        cluster=transport.is_cluster,
        # Only a process that prepares the deployment changes its settings.
        events_maxlen=None if only_joining else maxlen,
        cascade_units=None if only_joining else units,
    )


async def library_fits(transport: Transport, *, owned: bool = False) -> bool:
    """Whether every primary can serve this process; raises on a conflict. Loads nothing."""
    rules = _rules(transport, owned=owned, only_joining=False)
    found = await read_primaries(transport)
    # Check all primaries: a conflict on one must be reported even if another lacks the library.
    return not [node for node, stored in found.items() if rules.must_load(node, stored)]


async def ensure_library(
    transport: Transport,
    *,
    owned: bool = False,
    only_joining: bool = False,
    found: Stored | None = None,
    pauses: Sequence[float] = LOAD_PAUSES_S,
) -> bool:
    """Make sure that every primary has a library this process can call; True if it loaded one.

    Never replaces a newer library. Retries after each of `pauses` on transient faults. `owned`: the
    server belongs to this project, so other content of the same version is replaced. `only_joining`
    keeps the settings, and an older library whose callers ours would not serve. `found` saves the
    first check.
    """
    rules = _rules(transport, owned=owned, only_joining=only_joining)
    left = iter(pauses)
    while True:
        try:
            loaded = await _ensure(transport, rules, found)
        except TransportError as error:
            pause = next(left, None)
            if pause is None or error.kind not in _TRANSIENT_KINDS:
                raise
            await transport.refresh()
            await _log_retry(transport, error, pause)
            await asyncio.sleep(pause)
            found = None
            continue
        if loaded:
            extra = {"action": "library_loaded", "version": LIBRARY_VERSION}
            log.info("function library version %s loaded", LIBRARY_VERSION, extra=extra)
        return loaded


async def _log_retry(transport: Transport, error: TransportError, pause: float) -> None:
    extra: dict[str, Any] = {"action": "library_not_loaded", "error": str(error)}
    if error.kind == "read_only":
        # A replica was mistaken for a primary: log the cluster as this process sees it.
        with suppress(TransportError):
            extra["primaries"] = sorted(await transport.primaries())
    text = "function library not loaded yet, retrying in %g s: %s"
    log.warning(text, pause, error, extra=extra)


async def _ensure(transport: Transport, rules: _Rules, found: Stored | None) -> bool:
    found = await read_primaries(transport) if found is None else found
    # A conflict on one primary leaves the others as they are.
    lacking = {node for node, stored in found.items() if rules.must_load(node, stored)}
    if not lacking:
        return False
    fitting = found.keys() - lacking
    # A primary that lost the library gets the settings that the others have.
    model = next(filter(None, found.values()), None)
    primaries = (await transport.primaries()).items()
    return any([await _load(*each, rules, model) for each in primaries if each[0] not in fitting])


async def _load(node: str, ask: Ask, rules: _Rules, model: LibraryInfo | None) -> bool:
    """Load ours on one primary, unless another process has just loaded one that fits."""
    loaded = exists = False
    for _ in range(_LOAD_ROUNDS):
        stored = await _read(ask)
        if not rules.must_load(node, stored):
            return loaded
        # Without REPLACE: another process may load its library in between.
        replace = ("REPLACE",) if exists or stored is not None else ()
        try:
            await ask("FUNCTION", "LOAD", *replace, rules.code(stored or model))
            loaded = True
        except TransportError as error:
            if replace or _EXISTS not in error.message:
                raise
            # Another process was faster, or the library there does not report its version.
            exists = True
    raise LibraryConflictError(
        f"{node}: other processes keep loading other content of version {LIBRARY_VERSION}",
        "Use one build everywhere, and FF_FORCE_LUA_RELOAD=1 in at most one process.",
    )
