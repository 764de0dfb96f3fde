"""Settings from a file and from flags, for the commands that run processes."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from flowfabric.cli.options import value
from flowfabric.server import config as settings
from flowfabric.server.config import Source

File = Annotated[
    Path | None,
    value("FILE", "Read settings from this TOML file. The environment overrides it.", "--config"),
]
Assignments = Annotated[
    list[str] | None, value("NAME=VALUE", "Override one setting. Repeatable.", "--set")
]
Given = dict[str, tuple[str, Source]]


def load_settings(
    file: Path | None, assignments: Sequence[str] | None, flags: dict[str, str]
) -> Given:
    """Put the settings of the file and the flags into the environment, where they are read."""
    flags = settings.parse_assignments(assignments or ()) | flags
    if file is not None:
        flags |= {settings.FILE_VARIABLE: str(file)}
    elif named := os.environ.get(settings.FILE_VARIABLE):
        file = Path(named)
    from_file = {} if file is None else settings.load_file(file)
    given = settings.layered(os.environ, from_file, flags)
    for name in settings.NAMES:
        if name in given:
            os.environ[name] = given[name][0]
        else:
            os.environ.pop(name, None)
    return given
