"""Checks of the server: settings, memory, role, disk, clock, access, patch level."""

import asyncio
import logging
import re
from typing import Any

from flowfabric.core.errors import EngineError
from flowfabric.engine.api.meta import Finding, Grade, broken, ok, warning
from flowfabric.valkey.transport import Transport

log = logging.getLogger(__name__)
_NEARLY_FULL = 0.9
_MIB = 1024 * 1024
# Fields of INFO that show a failing disk, which makes the server refuse writes.
_DISK = {
    "aof_last_write_status": "the last write to the append-only file failed",
    "rdb_last_bgsave_status": "the last snapshot failed",
}
Version = tuple[int, int, int]
_HOLES: dict[tuple[int, int], dict[int, str]] = {
    (8, 0): {
        1: "CVE-2024-31449",
        2: "CVE-2024-46981",
        6: "CVE-2025-49844, CVE-2025-46817, CVE-2025-46818, CVE-2025-46819",
        7: "CVE-2025-67733",
        # 8.0.8 was withdrawn.
        9: "CVE-2026-23631",
    },
    (8, 1): {
        4: "CVE-2025-49844, CVE-2025-46817, CVE-2025-46818, CVE-2025-46819",
        6: "CVE-2025-67733",
        7: "CVE-2026-23631",
    },
    (9, 0): {3: "CVE-2025-67733", 4: "CVE-2026-23631"},
}
"""The patch level that fixes vulnerabilities of the scripting engine, by release series."""
_LOOPBACK = re.compile(r"-?(127\.[\d.]+|::1|localhost)").fullmatch
_version = re.compile(r"^valkey_version:(\d+)\.(\d+)\.(\d+)", re.MULTILINE).search

Facts = dict[str, dict[str, str]]
"""The reported values of each server, by its address."""


async def health_findings(transport: Transport) -> list[Finding]:
    """Check every primary; skip what a server does not show."""
    # Not wrapped in another coroutine: one cancelled before it starts would never await these.
    read = await asyncio.gather(
        _settings(transport, "maxmemory-policy", "appendonly", "appendfsync"),
        server_facts(transport, "memory", "persistence", "replication"),
        return_exceptions=True,
    )
    settings, facts = map(_shown, read)
    findings = [_eviction(settings)]
    if settings:
        findings.append(_persistence(settings))
    if facts:
        findings += [_memory(facts), _writes(facts)]
    return [*findings, await _clock(transport)]


async def log_findings(transport: Transport) -> None:
    """Warn about settings that put work at risk. Never raises an error."""
    try:
        findings = await health_findings(transport)
    except EngineError as error:
        log.debug("the server's health is not readable: %s", error)
        return
    for finding in findings:
        if finding.grade is not Grade.OK:
            log.warning(
                *("%s: %s; %s", finding.name, finding.detail, finding.advice),
                extra={"action": "server_health", "grade": finding.grade.value},
            )


def _eviction(settings: Facts) -> Finding:
    name, option = "eviction", "maxmemory-policy"
    if not settings:
        return ok(name, "the server does not show its settings")
    for server, found in settings.items():
        if found[option] != "noeviction":
            where = _where(server, settings)
            detail = f"{option} is {found[option]}{where}: the server may delete work"
            advice = f"run CONFIG SET {option} noeviction, and save it in the configuration"
            return broken(name, detail, advice)
    return ok(name, f"{option} is noeviction")


def _persistence(settings: Facts) -> Finding:
    for server, found in settings.items():
        if found["appendonly"] != "yes":
            return warning(
                "persistence",
                f"no append-only file{_where(server, settings)}: a crash of the server loses "
                "everything since its last save",
                "run CONFIG SET appendonly yes, unless losing recent work is acceptable",
            )
    modes = sorted({found["appendfsync"] for found in settings.values()})
    return ok("persistence", f"append-only file, fsync {', '.join(modes)}")


def _memory(facts: Facts) -> Finding:
    def share(server: str) -> float:
        limit = int(facts[server].get("maxmemory", 0))
        return int(facts[server].get("used_memory", 0)) / limit if limit else 0.0

    fullest = max(facts, key=share)
    used = int(facts[fullest].get("used_memory", 0))
    if not share(fullest):
        return ok("memory", f"{_size(used)} used, no limit set")
    limit = int(facts[fullest]["maxmemory"])
    detail = f"{_size(used)} of {_size(limit)} used{_where(fullest, facts)}"
    advice = "raise maxmemory, or shorten the retention of finished work"
    if share(fullest) >= 1:
        return broken("memory", f"{detail}: the server refuses new work", advice)
    if share(fullest) >= _NEARLY_FULL:
        return warning("memory", f"{detail}: nearly full", advice)
    return ok("memory", detail)


def _writes(facts: Facts) -> Finding:
    for server, found in facts.items():
        if found.get("role") not in (None, "master"):
            primary = f"{found.get('master_host')}:{found.get('master_port')}"
            detail = f"this server is a replica of {primary} and refuses writes"
            return broken("writes", detail, f"connect to the primary, {primary}")
        for field, failure in _DISK.items():
            if found.get(field, "ok") != "ok":
                detail = f"{failure}{_where(server, facts)}: the server may refuse writes"
                advice = "check the server's log and the free space on its disk"
                return broken("writes", detail, advice)
    return ok("writes", "accepted")


async def _clock(transport: Transport) -> Finding:
    first: Any = await transport.call("TIME", key="")
    await asyncio.sleep(0.002)
    second: Any = await transport.call("TIME", key="")
    moved = (int(second[0]) - int(first[0])) * 1_000_000 + int(second[1]) - int(first[1])
    if moved > 0:
        return ok("clock", "the server's clock advances")
    detail = f"the server's clock moved by {moved} µs in 2 ms"
    advice = "repair the host's clock: leases, delays and deadlines depend on it"
    return broken("clock", detail, advice)


def _shown(read: Facts | BaseException) -> Facts:
    """The result of a read; empty if the server does not show it."""
    if isinstance(read, EngineError):
        # Managed servers often forbid CONFIG.
        log.debug("cannot read the settings or the state of the server: %s", read)
        return {}
    if isinstance(read, BaseException):
        raise read
    return read


async def _settings(transport: Transport, *names: str) -> Facts:
    replies: dict[str, Any] = await transport.call_all_primaries("CONFIG", "GET", *names)
    return {
        server: {name.decode(): value.decode() for name, value in table.items()}
        for server, table in replies.items()
    }


async def server_facts(transport: Transport, *sections: str) -> Facts:
    replies: dict[str, Any] = await transport.call_all_primaries("INFO", *sections)
    found = {server: info.decode(errors="replace") for server, info in replies.items()}
    return {
        server: dict(line.split(":", 1) for line in info.split("\r\n") if ":" in line)
        for server, info in found.items()
    }


def _where(server: str, among: Facts) -> str:
    return f" on {server}" if len(among) > 1 else ""


def _size(count: int) -> str:
    return f"{count / _MIB:,.0f} MiB" if count >= _MIB else f"{count / 1024:,.0f} KiB"


async def check_security(transport: Transport) -> list[Finding]:
    return [await _scripting(transport), await _access(transport)]


async def _scripting(transport: Transport) -> Finding:
    replies: dict[str, Any] = await transport.call_all_nodes("INFO", "server")
    found = [_version(reply.decode(errors="replace")) for reply in replies.values()]
    versions = [(int(one[1]), int(one[2]), int(one[3])) for one in found if one is not None]
    if not versions:
        return ok("scripting", "the server does not show its patch level")
    return scripting_finding(max(versions, key=lambda version: len(_missing_fixes(version))))


def _missing_fixes(version: Version) -> dict[int, str]:
    fixes = _HOLES.get(version[:2], {})
    return {patch: cves for patch, cves in fixes.items() if version[2] < patch}


def scripting_finding(version: Version) -> Finding:
    shown, fixes = ".".join(map(str, version)), _missing_fixes(version)
    if not fixes:
        detail = f"this version of FlowFabric knows of no vulnerability in Valkey {shown}"
        return ok("scripting", detail)
    return warning(
        "scripting",
        f"the scripting engine of Valkey {shown} has known vulnerabilities: "
        f"{', '.join(fixes.values())}",
        f"upgrade to Valkey {version[0]}.{version[1]}.{max(fixes)} or newer",
    )


async def _access(transport: Transport) -> Finding:
    try:
        settings: Any = await transport.call("CONFIG", "GET", "port", "tls-port", "bind", key="")
        user: Any = await transport.call("ACL", "GETUSER", "default", key="")
    except EngineError:
        # Only an administrator may read these, so the default user is not our user.
        return ok("access", "the server does not show its users")
    port = max(int(settings[b"port"]), int(settings[b"tls-port"]))
    flags: list[bytes] = list(user[b"flags"])
    if not port:
        return ok("access", "no TCP port is open")
    if b"on" not in flags:
        return ok("access", "the default user is disabled")
    addresses = settings[b"bind"].decode().split() or ["*"]
    exposed = not all(map(_LOOPBACK, addresses))
    everything = user[b"commands"] == b"+@all" and user[b"keys"] == b"~*"
    if b"nopass" in flags:
        who = "anyone on the network" if exposed else "every user of that machine"
        detail = f"TCP port {port} needs no password: {who} can read and change everything"
        advice = "set requirepass and put the password into FF_PASSWORD, or use a unix socket"
        return warning("access", detail, advice)
    if exposed and everything:
        return warning(
            "access",
            f"there is no ACL: with its password, the default user of TCP port {port} may run "
            "every command",
            "create an ACL user per role and disable the default user: see the deployment guide",
        )
    return ok("access", f"TCP port {port} needs a password")
