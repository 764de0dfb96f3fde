"""The embedded Valkey's data folder: who may use it, and the files in it.

Every file is opened relative to the checked folder and never through a symbolic link. Renaming the
folder or planting a link cannot make this process read or write another file.
"""

import contextlib
import errno
import os
import re
import secrets
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Literal, Self, TypeAlias

from flowfabric.core.errors import ConfigError
from flowfabric.valkey import embedded_guard as guard
from flowfabric.valkey.project_folder import FOLDER_VARIABLE, data_folder

Aof: TypeAlias = Literal["no", "everysec", "always"]

AOF_FOLDER: Final = "appendonlydir"
SECRET_FILE: Final = "waitpoint_secret"  # noqa: S105 - a file name
_SECRET_BYTES: Final = 32
_is_secret = re.compile(r"(?!0+$)(?:[0-9a-f]{2}){16,}").fullmatch
_LOG: Final = "valkey.log"
_LOG_LIMIT: Final = 1 << 20
# A socket's path may have 107 bytes on Linux and 103 on macOS.
_SOCKET_PATH_LIMIT: Final = 100


def folder_error(message: str) -> ConfigError:
    return ConfigError("embedded", message, "data_dir")


@contextlib.contextmanager
def explained(folder: Path) -> Generator[None]:
    """Turn an `OSError` about the folder into an error that says what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        match error.errno:
            case errno.EEXIST | errno.ENOTDIR:
                text = f"{folder} is not a folder; move that file away"
            case errno.EACCES | errno.EPERM | errno.EROFS:
                text = f"cannot write to {folder} ({reason}); give this user write access"
            case errno.ELOOP:
                text = f"a file in {folder} is a symbolic link, never followed; remove the link"
            case errno.ENAMETOOLONG:
                text = f"the path {folder} is too long; shorten it"
            case errno.ENOSPC | errno.EDQUOT:
                text = f"no space left for {folder} ({reason}); free some space"
            case _:
                text = f"cannot use {folder} ({reason}); move it to a local disk"
        raise folder_error(f"{text}, or set {FOLDER_VARIABLE} to another folder") from error


def check_owner(path: Path, status: os.stat_result) -> None:
    """Refuse a folder that belongs to another user or that others can write to, even for root."""
    _check_user(path, status)
    if status.st_mode & 0o022:
        raise folder_error(
            f"other users can write to {path}; run `chmod 700 '{path}'`, or set "
            f"{FOLDER_VARIABLE} to a folder inside it, which will be created private"
        )


def _check_user(path: Path, status: os.stat_result) -> None:
    user = os.geteuid()
    if status.st_uid != user:
        raise folder_error(
            f"{path} belongs to another user (uid {status.st_uid}; this process runs as uid "
            f"{user}); run as that user, or set {FOLDER_VARIABLE} to a folder of your own"
        )


@dataclass(frozen=True, slots=True)
class DataFolder:
    """One project's data folder, opened; every process of the project names the same one."""

    path: Path
    fd: int

    @classmethod
    def prepare(cls, data_dir: Path | None) -> Self:
        """Open the given folder or that of the project; create it for this user."""
        chosen = data_folder() if data_dir is None else data_dir.expanduser()
        path = Path(os.path.realpath(chosen))
        with explained(path):
            if chosen.is_symlink():
                _check_user(chosen, chosen.lstat())
            for parent in reversed(path.parents):
                if not parent.exists():
                    parent.mkdir(mode=0o755, exist_ok=True)
            is_new = not path.exists()
            path.mkdir(mode=0o700, exist_ok=True)
            folder = cls(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))
            try:
                check_owner(path, os.fstat(folder.fd))
                if is_new:
                    # Keep the data out of the project's version control.
                    with os.fdopen(folder.open(".gitignore"), "w") as file:
                        file.write("*\n")
            except BaseException:
                folder.close()
                raise
        return folder

    def open(self, name: str, flags: int = os.O_RDWR | os.O_CREAT) -> int:
        """Open a file in the folder; a new one is private."""
        return os.open(name, flags | os.O_NOFOLLOW, 0o600, dir_fd=self.fd)

    def copy(self) -> Self:
        """The same folder and its lock, while the copy is open."""
        return type(self)(self.path, os.dup(self.fd))

    def close(self) -> None:
        """Close the folder; its lock goes with the last copy."""
        os.close(self.fd)

    @property
    def log(self) -> Path:
        return self.path / _LOG

    @property
    def pid(self) -> int | None:
        """The running server's pid; None while there is none."""
        with os.fdopen(self.open(guard.SERVER_LOCK)) as lock:
            return guard.server_pid(lock.fileno())

    @property
    def socket(self) -> str:
        """The path of the server's socket, for this process."""
        path = str(self.path / guard.SOCKET)
        if len(os.fsencode(path)) <= _SOCKET_PATH_LIMIT:
            return path
        if sys.platform == "linux":
            return f"/proc/self/fd/{self.fd}/{guard.SOCKET}"
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))

    def check_current(self) -> None:
        """Refuse to start a server in a folder that has been moved or deleted."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self.path.stat(), os.fstat(self.fd)):
                return
        raise folder_error(f"{self.path} was deleted or replaced; restart this process to use it")

    def check_contents(self) -> None:
        """Refuse files of other users, who could write here once."""
        for name in (".", AOF_FOLDER):
            with contextlib.suppress(FileNotFoundError):
                opened = self.open(name, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    for entry in os.listdir(opened):  # noqa: PTH208
                        found = os.stat(entry, dir_fd=opened, follow_symlinks=False)
                        _check_user(self.path / name / entry, found)
                finally:
                    os.close(opened)

    def config(self, aof: Aof) -> bytes:
        if aof == "no" and (self.path / AOF_FOLDER).exists():
            raise folder_error(
                f"{self.path} holds data that a server without its log would not load; start it "
                "with aof='everysec', or use another folder"
            )
        settings = {
            "port": "0",
            "unixsocket": guard.SOCKET,
            "unixsocketperm": "700",
            "daemonize": "no",
            "logfile": '""',
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
        return "".join(f"{name} {value}\n" for name, value in settings.items()).encode()

    def open_log(self) -> BinaryIO:
        """Open the log at its end; a long one is renamed first."""
        log = os.fdopen(self.open(_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")
        if log.tell() <= _LOG_LIMIT:
            return log
        log.close()
        os.replace(_LOG, f"{_LOG}.1", src_dir_fd=self.fd, dst_dir_fd=self.fd)
        return self.open_log()

    def read_log(self, offset: int) -> str:
        with os.fdopen(self.open(_LOG, os.O_RDONLY), "rb") as log:
            log.seek(offset)
            return log.read()[-8000:].decode(errors="replace").strip()


def folder_secret(path: Path) -> str:
    """The folder's waitpoint secret; if there is none, a new one, the same for all processes."""
    with explained(path), contextlib.closing(DataFolder.prepare(path)) as folder:
        with contextlib.suppress(FileNotFoundError):
            return _read_secret(folder)
        secret = secrets.token_hex(_SECRET_BYTES)
        # Never replace an existing secret: tokens signed with it are in use.
        with contextlib.suppress(FileExistsError), _draft(folder, secret) as draft:
            os.link(draft, SECRET_FILE, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
        return _read_secret(folder)


def replace_folder_secret(path: Path, secret: str) -> None:
    """Store the secret that the deployment was rotated to."""
    with (
        explained(path),
        contextlib.closing(DataFolder.prepare(path)) as folder,
        _draft(folder, secret) as draft,
    ):
        os.rename(draft, SECRET_FILE, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)


@contextlib.contextmanager
def _draft(folder: DataFolder, secret: str) -> Generator[str]:
    """A private file with the secret, under a temporary name."""
    draft = f".{SECRET_FILE}.{secrets.token_hex(8)}"
    try:
        with os.fdopen(folder.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY), "w") as file:
            file.write(secret + "\n")
            file.flush()
            os.fsync(file.fileno())
        yield draft
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=folder.fd)


def _read_secret(folder: DataFolder) -> str:
    with os.fdopen(folder.open(SECRET_FILE, os.O_RDONLY), "rb") as file:
        found = file.read().decode("ascii", "replace").strip()
    if not _is_secret(found):
        problem = f"{folder.path / SECRET_FILE} holds no secret; restore it, or delete it"
        raise ConfigError("embedded", problem)
    return found
