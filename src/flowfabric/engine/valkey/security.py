"""Checks of who can reach the server, and of known holes in its scripting engine."""

from __future__ import annotations

import re
from typing import Any

from flowfabric.core.errors import EngineError
from flowfabric.engine.api.meta import Finding, Grade
from flowfabric.valkey.transport import Transport

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
"""By release series: the patch level that fixes holes in the scripting engine."""
_LOOPBACK = re.compile(r"-?(127\.[\d.]+|::1|localhost)").fullmatch
_version = re.compile(r"^valkey_version:(\d+)\.(\d+)\.(\d+)", re.MULTILINE).search


async def check_security(transport: Transport) -> list[Finding]:
    """Check the patch level of every node, and the password and rights of the default user."""
    return [await _scripting(transport), await _access(transport)]


async def _scripting(transport: Transport) -> Finding:
    replies: dict[str, Any] = await transport.call_all_nodes("INFO", "server")
    found = [_version(reply.decode(errors="replace")) for reply in replies.values()]
    versions = [(int(one[1]), int(one[2]), int(one[3])) for one in found if one is not None]
    if not versions:
        return Finding("scripting", Grade.OK, "the server does not show its patch level")
    return scripting_finding(max(versions, key=_missing_fixes))


def _missing_fixes(version: Version) -> int:
    return sum(version[2] < fixed for fixed in _HOLES.get(version[:2], {}))


def scripting_finding(version: Version) -> Finding:
    """The finding for a server of this version."""
    shown = ".".join(map(str, version))
    fixes = {
        patch: cves for patch, cves in _HOLES.get(version[:2], {}).items() if version[2] < patch
    }
    if not fixes:
        detail = f"this version of FlowFabric knows of no security hole in Valkey {shown}"
        return Finding("scripting", Grade.OK, detail)
    return Finding(
        "scripting",
        Grade.WARNING,
        f"the scripting engine of Valkey {shown} has known security holes: "
        f"{', '.join(fixes.values())}",
        f"upgrade to Valkey {version[0]}.{version[1]}.{max(fixes)} or newer",
    )


async def _access(transport: Transport) -> Finding:
    try:
        settings: Any = await transport.call("CONFIG", "GET", "port", "tls-port", "bind", key="")
        user: Any = await transport.call("ACL", "GETUSER", "default", key="")
    except EngineError:
        # Only an administrator may read these, so the default user is not our user.
        return Finding("access", Grade.OK, "the server does not show its users")
    port = max(int(settings[b"port"]), int(settings[b"tls-port"]))
    flags: list[bytes] = list(user[b"flags"])
    enabled = b"on" in flags
    if not port or not enabled:
        why = "no TCP port is open" if not port else "the default user is disabled"
        return Finding("access", Grade.OK, why)
    addresses = settings[b"bind"].decode().split() or ["*"]
    exposed = not all(map(_LOOPBACK, addresses))
    everything = user[b"commands"] == b"+@all" and user[b"keys"] == b"~*"
    if b"nopass" in flags:
        who = "anyone on the network" if exposed else "every user of that machine"
        return Finding(
            "access",
            Grade.WARNING,
            f"TCP port {port} needs no password: {who} can read and change everything",
            "set requirepass and put the password into FF_PASSWORD, or use a unix socket",
        )
    if exposed and everything:
        return Finding(
            "access",
            Grade.WARNING,
            f"there is no ACL: with its password, the default user of TCP port {port} may run "
            "every command",
            "create an ACL user per role and disable the default user: see the deployment guide",
        )
    return Finding("access", Grade.OK, f"TCP port {port} needs a password")
