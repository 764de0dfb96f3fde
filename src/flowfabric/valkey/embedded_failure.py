"""Errors for an embedded server that did not start, with what to do."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final

from flowfabric.core.errors import ConfigError
from flowfabric.valkey.binary import BINARY_VARIABLE
from flowfabric.valkey.embedded_folder import AOF_FOLDER, DataFolder

_MOST_LINES: Final = 8
# Lines below the level of a warning, and one warning that is about the host.
_routine = re.compile(r"\d+:[A-Z] .{20,30} [.\-*] |.*# WARNING Memory overcommit").match
_damaged = re.compile(r"Bad file format reading the append only file (\S+\.incr\.aof):").search


def start_error(folder: DataFolder, binary: Path, what: str, log_offset: int) -> ConfigError:
    """The error for a start that ended with `what` and logged from `log_offset` on."""
    said = folder.read_log(log_offset)
    if not said:
        return _error(
            f"{binary} printed nothing ({what}), so it is not a Valkey server; correct "
            f"{BINARY_VARIABLE}, or unset it to use the packaged server"
        )
    lines = said.splitlines()
    telling = [line for line in lines if not _routine(line)] or lines
    advice = f"fix the problem reported in {folder.log} and try again"
    if found := _damaged(said):
        advice = _repair(folder, binary, folder.path / AOF_FOLDER / found[1])
    shown = "\n".join(telling[-_MOST_LINES:])
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
