"""Only engine/valkey reaches Valkey: every other module goes through its interface."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project.checkout import SOURCE, modules

WIRE = "flowfabric.valkey"
ENGINE = "flowfabric.engine.valkey"
DOOR = Path("engine/connect.py")
"""Opens backends, on Valkey or on a server; everyone else imports it."""
DOORS = {"raw", "testing"}
"""What else others may import: the bare functions to measure against, and the clock of the testing
kit."""
COMMANDS = {"transport", "fcall", "fcall_ro"}


def _is_private(name: str) -> bool:
    parts = name.removeprefix(f"{ENGINE}.").split(".")
    folder = SOURCE / "engine" / "valkey"
    return parts[0] not in DOORS and (folder / f"{parts[0]}.py").exists()


def violations(source: str) -> Iterator[str]:
    """What a module outside the engine's Valkey folder must not import or use."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom():
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            case ast.Attribute(attr=attr) if attr in COMMANDS:
                yield f"line {node.lineno}: uses .{attr}"
                continue
            case _:
                continue
        for name in names:
            wire = name == WIRE or name.startswith(f"{WIRE}.")
            if wire or (name.startswith(f"{ENGINE}.") and _is_private(name)):
                yield f"line {node.lineno}: imports {name}"


def _is_outside(path: Path) -> bool:
    below = path.relative_to(SOURCE).parts
    is_door = path.relative_to(SOURCE) == DOOR
    return below[0] != "valkey" and below[:2] != ("engine", "valkey") and not is_door


def test_nothing_else_imports_the_wire_or_sends_a_command() -> None:
    found = {
        path.relative_to(SOURCE).as_posix(): broken
        for path in modules()
        if _is_outside(path) and (broken := list(violations(path.read_text())))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("source", "caught"),
    [
        ("from flowfabric.valkey.transport import Transport", True),
        ("def f():\n    from flowfabric.valkey import link", True),
        ("import flowfabric.valkey", True),
        ("from flowfabric.engine.valkey import keys", True),
        ("from flowfabric.engine.valkey.backend import ValkeyBackend", True),
        ("backend.transport.call('PING')", True),
        ("backend.calls.fcall('ff_x')", True),
        ("from flowfabric.engine.valkey.connect import open_backend", True),
        ("from flowfabric.engine.connect import open_backend", False),
        ("from flowfabric.engine.api.backend import Backend", False),
    ],
)
def test_the_guard_itself(source: str, caught: bool) -> None:
    assert bool(list(violations(source))) is caught
