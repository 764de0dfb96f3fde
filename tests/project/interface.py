"""The interface of the function library as last noted: `make library` notes a change of it."""

from __future__ import annotations

import hashlib
import re
import sys
import tomllib
from pathlib import Path

import msgspec

from flowfabric.engine.valkey.library import LIBRARY_VERSION
from tests.project.checkout import SOURCE
from tests.project.lua_source import FUNCTIONS, interface_of

NOTED = Path(__file__).with_name("library.toml")
_VERSION_LINE = re.compile(r"^LIBRARY_VERSION = (\d+)$", re.MULTILINE)


class Interface(msgspec.Struct, frozen=True):
    """A library version, and a fingerprint of each function that it has."""

    version: int
    functions: dict[str, str]

    def changes_to(self, now: Interface) -> list[str]:
        """The functions whose arguments or reply differ, and those that came or went."""
        either = self.functions.keys() | now.functions.keys()
        return sorted(n for n in either if self.functions.get(n) != now.functions.get(n))

    def problem(self, now: Interface) -> str | None:
        """What is wrong when this was noted, and the code says `now`."""
        changed = ", ".join(self.changes_to(now))
        if changed:
            return (
                f"The interface of {changed} changed. Run `make library` and commit what it writes:"
                f" it raises LIBRARY_VERSION above {self.version}. If callers of an older version"
                " no longer work, raise MIN_CLIENT, too (src/flowfabric/engine/valkey/library.py)."
            )
        if self.version != now.version:
            return f"Run `make library`: {NOTED.name} is of version {self.version}."
        return None


def current() -> Interface:
    """The interface as the code has it."""
    fingerprints = {
        path.stem: hashlib.sha256(interface_of(path).encode()).hexdigest()[:8] for path in FUNCTIONS
    }
    return Interface(LIBRARY_VERSION, fingerprints)


def noted() -> Interface:
    return msgspec.convert(tomllib.loads(NOTED.read_text()), Interface)


def write(interface: Interface) -> None:
    lines = [f'{name} = "{value}"\n' for name, value in sorted(interface.functions.items())]
    NOTED.write_text(
        "# Written by `make library`: what callers of each Lua function rely on.\n"
        f"version = {interface.version}\n\n[functions]\n" + "".join(lines)
    )


def main() -> None:
    """Note the interface; raise the version first if that did not happen yet."""
    before, now = noted(), current()
    changed = before.changes_to(now)
    if changed and now.version <= before.version:
        source = SOURCE / "engine" / "valkey" / "library.py"
        now = Interface(before.version + 1, now.functions)
        text, count = _VERSION_LINE.subn(f"LIBRARY_VERSION = {now.version}", source.read_text())
        assert count == 1
        source.write_text(text)
    write(now)
    sys.stdout.write(f"version {now.version}; changed: {', '.join(changed) or 'nothing'}\n")


if __name__ == "__main__":
    main()
