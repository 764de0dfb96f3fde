"""A module imports only from its own layer and from the layers before it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project.checkout import SOURCE, modules, name_of

LAYERS = (
    *("core", "valkey", "lua", "engine", "observability", "scheduler", "scanners"),
    *("sdk", "app", "testing", "bench", "server", "cli"),
)
FACADE = LAYERS.index("app")
"""`flowfabric` itself re-exports the app layer: what comes after it may use the public names."""


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, also inside functions and type checks."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def violations(place: str, layer: str, source: str) -> list[str]:
    """What a module of a layer imports and must not."""
    own = LAYERS.index(layer)
    found: list[str] = []
    for line, name in imports(ast.parse(source)):
        parts = name.split(".")
        if name.startswith("."):
            found.append(f"{place}:{line}: relative import of {name}")
        if parts[0] != "flowfabric":
            continue
        target = parts[1] if len(parts) > 1 and parts[1] in LAYERS else ""
        wanted = LAYERS.index(target) if target else FACADE
        if wanted > own or (not target and own == FACADE):
            found.append(f"{place}:{line}: {layer} imports {name}")
    return found


def layer_of(path: Path) -> str:
    """The layer of a module; empty for the package's own `__init__`."""
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else ""


def test_every_folder_is_a_known_layer() -> None:
    assert {layer_of(path) for path in modules()} - {""} <= set(LAYERS)


def test_no_module_imports_from_a_later_layer() -> None:
    found: list[str] = []
    for path in modules():
        if layer := layer_of(path):
            found += violations(name_of(path), layer, path.read_text())
    assert found == []


def test_core_does_no_io() -> None:
    banned = {"asyncio", "socket", "subprocess", "threading", "libvalkey", "uvloop", "pathlib"}
    found = [
        f"{name_of(path)}:{line}: {name}"
        for path in modules()
        if layer_of(path) == "core"
        for line, name in imports(ast.parse(path.read_text()))
        if name.partition(".")[0] in banned
        # Closing waits for a task; it opens nothing.
        if (path.stem, name) != ("closing", "asyncio")
        # A pure path is only a name.
        if name != "pathlib.PurePath"
    ]
    assert found == []


@pytest.mark.parametrize(
    ("layer", "source", "caught"),
    [
        ("core", "from flowfabric.engine.backend import Backend", True),
        ("engine", "def f():\n    import flowfabric.cli.main", True),
        ("engine", "from flowfabric import sdk", True),
        ("sdk", "import flowfabric", True),
        ("app", "import flowfabric as ff", True),
        ("sdk", "from . import config", True),
        ("cli", "import flowfabric as ff", False),
        ("engine", "from flowfabric.engine.valkey import keys", False),
        ("engine", "from flowfabric.engine.calls import Calls", False),
    ],
)
def test_the_guard_itself(layer: str, source: str, caught: bool) -> None:
    assert bool(violations("module.py", layer, source)) is caught
