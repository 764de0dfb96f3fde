"""Why the embedded server did not start, and what its user can do about it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final

from flowfabric.core.errors import ConfigError
from flowfabric.valkey.binary import BINARY_VARIABLE
from flowfabric.valkey.embedded_folder import AOF_FOLDER, DataFolder

__all__ = ["start_error"]

_MOST_LINES: Final = 8
# What every start says, below the level of a warning, and one warning that is about the host.
_routine = re.compile(r"\d+:[A-Z] .{20,30} [.\-*] |.*# WARNING Memory overcommit").match
_damaged = re.compile(r"Bad file format reading the append only file (\S+\.incr\.aof):").search


def start_error(folder: DataFolder, binary: Path, what: str, log_offset: int) -> ConfigError:
    """The error for a start that ended with `what`; its part of the log begins at the offset."""
    with folder.log.open("rb") as log:
        log.seek(log_offset)
        said = log.read()[-8000:].decode(errors="replace").strip()
    if not said:
        return _error(
            f"{binary} said nothing ({what}), so it is no Valkey server; correct "
            f"{BINARY_VARIABLE}, or remove it to use the packaged server"
        )
    lines = said.splitlines()
    telling = [line for line in lines if not _routine(line)] or lines
    advice = f"correct what its log {folder.log} says and try again"
    if found := _damaged(said):
        advice = _repair(folder, binary, folder.path / AOF_FOLDER / found[1])
    shown = "\n".join(telling[-_MOST_LINES:])
    return _error(f"the server did not start ({what}); {advice}:\n{shown}")


def _repair(folder: DataFolder, binary: Path, file: Path) -> str:
    # The server is its own checking tool when it is called by that tool's name. It is given this
    # one file: the manifest would have it judge the base file too, whose form it does not know.
    tool = f"exec -a valkey-check-aof {shlex.quote(str(binary))} --fix {shlex.quote(str(file))}"
    return (
        f"its log of changes {file} is damaged: copy {folder.path}, then cut the log where the "
        f"damage begins with\n  bash -c {shlex.quote(tool)}\n"
        f"or move the folder away to start empty. {folder.log} says"
    )


def _error(message: str) -> ConfigError:
    return ConfigError("embedded", message, "server")
