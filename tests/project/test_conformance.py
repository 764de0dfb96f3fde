"""Conformance tests speak to the engine through its interface alone, so any store can run them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

_TESTS = Path(__file__).parent.parent
_FILES = sorted((_TESTS / "conformance").glob("*.py"))
_STORAGE_MODULES = (
    "flowfabric.valkey",
    "flowfabric.engine.valkey",
    "tests.valkey",
    "tests.support.storage",
    "tests.support.proxy",
    "tests.support.server",
    "tests.support.leaks",
)
_STORAGE_ATTRIBUTES = {"transport", "calls", "stream_pool"}


@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.stem)
def test_no_conformance_test_knows_the_store(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.ImportFrom(module=str(module)) if module.startswith(_STORAGE_MODULES):
                pytest.fail(f"line {node.lineno} imports {module}: move the test to tests/valkey")
            case ast.Attribute(attr=attribute) if attribute in _STORAGE_ATTRIBUTES:
                pytest.fail(f"line {node.lineno} uses .{attribute}: move the test to tests/valkey")
            case _:
                pass
