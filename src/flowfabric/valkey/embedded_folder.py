"""The embedded server's private folder: its files, its generated configuration, its socket."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from flowfabric.core.errors import ConfigError
from flowfabric.valkey import embedded_guard as guard

Aof: TypeAlias = Literal["no", "everysec", "always"]

FOLDER_VARIABLE = "FF_DATA_DIR"
_DEFAULT_FOLDER = ".flowfabric"
AOF_FOLDER = "appendonlydir"
_SOCKET_NAME = "valkey.sock"
# The kernel takes 107 bytes on Linux and 103 on macOS.
_SOCKET_PATH_LIMIT = 100
_LOG_LIMIT = 1 << 20


def folder_error(message: str) -> ConfigError:
    """A problem with the data folder."""
    return ConfigError("embedded", message, "data_dir")


@contextlib.contextmanager
def explained(folder: Path) -> Generator[None]:
    """Turn what the system says about the folder into what its user can do about it."""
    try:
        yield
    except OSError as error:
        elsewhere = f"or set {FOLDER_VARIABLE} to another folder"
        reason = error.strerror or str(error)
        match error.errno:
            case errno.EEXIST | errno.ENOTDIR:
                text = f"{folder} is not a folder; move that file away, {elsewhere}"
            case errno.EACCES | errno.EPERM | errno.EROFS:
                text = (
                    f"cannot write in {folder} ({reason}); give this user write access, {elsewhere}"
                )
            case errno.ENAMETOOLONG:
                text = f"the path {folder} is too long; set {FOLDER_VARIABLE} to a shorter one"
            case errno.ENOSPC | errno.EDQUOT:
                text = f"no room left for {folder} ({reason}); free some space, {elsewhere}"
            case _:
                text = f"cannot use {folder} ({reason}); set {FOLDER_VARIABLE} to a local folder"
        raise folder_error(text) from error


def check_owner(path: Path, status: os.stat_result) -> None:
    """Nobody else may put files into the folder, and it must be this user's own."""
    if status.st_mode & 0o022:
        raise folder_error(
            f"other users can write in {path}; run `chmod 700 '{path}'`, or set "
            f"{FOLDER_VARIABLE} to a folder inside it, which will be created private"
        )
    if os.geteuid() not in (0, status.st_uid):
        raise folder_error(
            f"{path} belongs to another user (uid {status.st_uid}); run as that user, or set "
            f"{FOLDER_VARIABLE} to another folder"
        )


@dataclass(frozen=True, slots=True)
class DataFolder:
    """One project's data folder; every process of the project names the same one."""

    path: Path

    @classmethod
    def prepare(cls, data_dir: Path | None) -> DataFolder:
        """The given folder, `FF_DATA_DIR` or `./.flowfabric`; created for this user alone."""
        chosen = data_dir or Path(os.environ.get(FOLDER_VARIABLE) or _DEFAULT_FOLDER)
        path = Path(os.path.realpath(chosen.expanduser()))
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
                # The data must not end up in the project's version control.
                (path / ".gitignore").write_text("*\n")
            status = path.stat()
            if not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        check_owner(path, status)
        return cls(path)

    @property
    def log(self) -> Path:
        """The server's log, which also takes what its guard has to say."""
        return self.path / "valkey.log"

    @property
    def pid(self) -> int | None:
        """The running server's pid; None while there is none."""
        try:
            return int((self.path / guard.PID_FILE).read_text())
        except (OSError, ValueError):
            return None

    def socket(self) -> Path:
        """Where the server listens, as the process that started it has decided."""
        try:
            return Path(os.fsdecode((self.path / guard.SOCKET_RECORD).read_bytes()))
        except FileNotFoundError:
            return self.path / _SOCKET_NAME

    def place_socket(self) -> Path:
        """Decide where the server shall listen: here, or behind a shorter path."""
        record = self.path / guard.SOCKET_RECORD
        beside = self.path / _SOCKET_NAME
        if _fits(beside):
            record.unlink(missing_ok=True)
            return beside
        # Users of a server that crashed keep the address they were given.
        previous = self.socket()
        if previous != beside and _is_private(previous.parent):
            return previous
        chosen = _short_folder() / _SOCKET_NAME
        draft = record.with_suffix(".new")
        draft.write_bytes(os.fsencode(chosen))
        draft.replace(record)
        return chosen

    def listen_name(self, socket: Path) -> str:
        """The socket as the server and its guard, which run inside the folder, name it.

        They name everything in it relatively: should the folder be moved or deleted under them,
        they cannot touch the files of a successor.
        """
        return socket.name if socket.parent == self.path else str(socket)

    def write_config(self, socket: Path, aof: Aof) -> None:
        """Generate the server's configuration."""
        if aof == "no" and (self.path / AOF_FOLDER).exists():
            raise folder_error(
                f"{self.path} holds data, which a server without its log would not see; start it "
                "with aof='everysec', or use another folder"
            )
        file = self.path / guard.CONFIG_FILE
        file.touch(mode=0o600)
        file.write_bytes(_config(self.listen_name(socket), aof))

    def prepare_log(self) -> int:
        """Set a log aside that has grown long; where in the file this start's part begins."""
        self.log.touch(mode=0o600)
        size = self.log.stat().st_size
        if size <= _LOG_LIMIT:
            return size
        self.log.replace(self.log.with_suffix(".log.1"))
        self.log.touch(mode=0o600)
        return 0


def _fits(socket: Path) -> bool:
    return len(os.fsencode(socket)) <= _SOCKET_PATH_LIMIT


def _is_private(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & 0o077
    )


def _short_folder() -> Path:
    bases = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()]
    for base in filter(None, bases):
        if not _fits(Path(base, "flowfabric-########", _SOCKET_NAME)):
            continue
        with contextlib.suppress(OSError):
            return Path(tempfile.mkdtemp(prefix="flowfabric-", dir=base))
    raise folder_error(
        "no writable temporary folder with a path short enough for a unix socket; set TMPDIR to "
        f"a short one such as /tmp, or {FOLDER_VARIABLE} to a path below 90 bytes"
    )


def _config(listen: str, aof: Aof) -> bytes:
    settings = {
        "port": "0",
        "unixsocket": _quoted(listen),
        "unixsocketperm": "700",
        "daemonize": "no",
        "dir": "./",
        "pidfile": guard.PID_FILE,
        "logfile": "valkey.log",
        "save": '""',
        "appendonly": "no" if aof == "no" else "yes",
        "appendfsync": aof,
        "appenddirname": AOF_FOLDER,
        "aof-use-rdb-preamble": "yes",
        "aof-load-truncated": "yes",
        "maxmemory-policy": "noeviction",
        "hash-max-listpack-value": "512",
        "hash-max-listpack-entries": "512",
    }
    lines = ["# Written at each start; changes here are lost."]
    lines += [f"{name} {value}" for name, value in settings.items()]
    return os.fsencode("\n".join(lines) + "\n")


def _quoted(text: str) -> str:
    special = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(special.get(letter, letter) for letter in text) + '"'
