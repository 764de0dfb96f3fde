"""The signing secret of an embedded deployment, kept beside its data."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Generator
from pathlib import Path
from typing import Final

from flowfabric.core.errors import ConfigError
from flowfabric.valkey.embedded_folder import DataFolder, explained

SECRET_FILE: Final = "waitpoint_secret"  # noqa: S105 - a file name
_BYTES: Final = 32
_is_secret = re.compile(r"(?!0+$)(?:[0-9a-f]{2}){16,}").fullmatch


def folder_secret(path: Path) -> str:
    """The folder's waitpoint secret; generated if there is none, readable by this user alone.

    If several processes generate one at the same time, one wins and all return its secret.
    """
    with explained(path), contextlib.closing(DataFolder.prepare(path)) as folder:
        with contextlib.suppress(FileNotFoundError):
            return _read(folder)
        # Never replace an existing secret: tokens signed with it are in use.
        with (
            contextlib.suppress(FileExistsError),
            _draft(folder, secrets.token_hex(_BYTES)) as draft,
        ):
            os.link(draft, SECRET_FILE, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
        return _read(folder)


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


def _read(folder: DataFolder) -> str:
    with os.fdopen(
        folder.open(SECRET_FILE, os.O_RDONLY), errors="replace", encoding="ascii"
    ) as file:
        found = file.read().strip()
    if not _is_secret(found):
        raise ConfigError(
            "embedded",
            f"{folder.path / SECRET_FILE} holds no secret; restore it, or delete it for a new one",
        )
    return found
