"""Notices changes of a project's Python files by reading their times."""

import asyncio
import os
import time
from collections.abc import Generator, Sequence
from pathlib import Path

_INTERVAL_S = 0.2
_REST = 20
"""A slow look rests this many times as long as it took: at most 5 % of one core."""
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})
_Stamp = tuple[int, int, int]


class ProjectFiles:
    """The Python files in some folders. Hidden folders and virtual environments do not count.

    The whole tree, not only the modules that are loaded: an import that failed is fixed in a file
    that may be new.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._changed: set[str] = set()
        self._seen = self._look()

    async def changed(self) -> list[str]:
        """The files that changed since the last call, as soon as they stay the same for a moment.

        An editor or a version control system may write several files one after the other.
        """
        pause_s = _INTERVAL_S
        while True:
            await asyncio.sleep(pause_s)
            started = time.perf_counter()
            found = await asyncio.to_thread(self._look)
            pause_s = max(_INTERVAL_S, _REST * (time.perf_counter() - started))
            differing = {path for path, _ in found.items() ^ self._seen.items()}
            self._seen = found
            self._changed |= differing
            if self._changed and not differing:
                changed, self._changed = self._changed, set()
                return sorted(changed)

    def _look(self) -> dict[str, _Stamp]:
        return {path: stamp for folder in self._folders for path, stamp in _files(str(folder))}


def _files(root: str) -> Generator[tuple[str, _Stamp]]:
    folders = [root]
    while folders:
        try:
            entries = list(os.scandir(folders.pop()))
        except OSError:
            # Deleted meanwhile, or not ours to read.
            continue
        if any(entry.name == "pyvenv.cfg" for entry in entries):
            continue
        for entry in entries:
            try:
                if entry.is_dir(follow_symlinks=False):
                    if not entry.name.startswith(".") and entry.name not in _SKIPPED:
                        folders.append(entry.path)
                elif entry.name.endswith(".py"):
                    found = entry.stat()
                    yield entry.path, (found.st_mtime_ns, found.st_size, found.st_ino)
            except OSError:
                continue
