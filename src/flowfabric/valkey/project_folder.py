"""Where the embedded Valkey of a project keeps its data. Works on platforms without one."""

import contextlib
import os
import stat
from pathlib import Path
from typing import Final

FOLDER_VARIABLE: Final = "FF_DATA_DIR"
NO_SERVER: Final = "Start a Valkey server and set FF_URL to it, as in valkey://127.0.0.1:6379"
"""What to do where there is no embedded Valkey."""
_NAME: Final = ".flowfabric"


def data_folder() -> Path:
    """`FF_DATA_DIR`, or the nearest `.flowfabric` of this folder and those above it.

    If there is none, it will be made in this folder.
    """
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(chosen).expanduser().absolute()
    here = Path.cwd()
    # A folder that cannot be read ends the search; a home may be unknown.
    with contextlib.suppress(OSError, RuntimeError):
        for folder in (here, *here.parents):
            if folder != here and _is_shared(folder):
                break
            if os.path.lexists(folder / _NAME):
                return folder / _NAME
            if (folder / ".git").exists():
                break
    return here / _NAME


def _is_shared(folder: Path) -> bool:
    """Whether the folder holds more than one project: a home, the root, or a place like /tmp."""
    if folder == folder.parent or folder == Path.home():
        return True
    return bool(folder.stat().st_mode & stat.S_IWOTH)
