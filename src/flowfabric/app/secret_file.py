"""The signing secret of an embedded deployment, kept beside its data."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

from flowfabric.core.errors import ConfigError

__all__ = ["folder_secret"]

_NAME = "waitpoint_secret"
_BYTES = 32
_is_secret = re.compile(r"(?!0+$)(?:[0-9a-f]{2}){16,}").fullmatch


def folder_secret(folder: Path) -> str:
    """The folder's waitpoint secret; minted when there is none, for this user alone.

    Of processes that mint at the same time one wins, and all return its secret.
    """
    path = folder / _NAME
    with contextlib.suppress(FileNotFoundError):
        return _read(path)
    draft = folder / f".{_NAME}.{secrets.token_hex(8)}"
    descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        # Never over one that exists: its tokens are out already.
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(draft)
    finally:
        draft.unlink()
    return _read(path)


def _read(path: Path) -> str:
    found = path.read_text(encoding="ascii", errors="replace").strip()
    if not _is_secret(found):
        raise ConfigError(
            "embedded", f"{path} holds no secret: restore it, or delete it to mint a new one"
        )
    return found
