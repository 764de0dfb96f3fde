"""Every log record that people see has fields for machines, `action` among them."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.project.checkout import modules, name_of

LEVELS = frozenset({"info", "warning", "error", "exception", "critical"})
LOGGERS = frozenset({"log", "ends", "access"})


def without_fields(place: str, source: str) -> list[str]:
    """The calls of a module's loggers, above debug, that pass no `extra`."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=level), keywords=given):
                if name in LOGGERS and level in LEVELS and "extra" not in {k.arg for k in given}:
                    found.append(f"{place}:{node.lineno}")
            case _:
                pass
    return found


def test_every_record_has_fields() -> None:
    found = [each for path in modules() for each in without_fields(name_of(path), read(path))]
    assert found == [], 'pass extra={"action": …}'


def test_a_record_without_fields_is_found() -> None:
    source = 'log.info("x")\nlog.debug("y")\nlog.error("z", extra={"action": "z"})\n'
    assert without_fields("m", source) == ["m:1"]


def read(path: Path) -> str:
    return path.read_text()
