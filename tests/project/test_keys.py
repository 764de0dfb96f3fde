"""Key names are written in two places only, which a test of the engine compares."""

from __future__ import annotations

import re

import pytest

from tests.project.checkout import SOURCE, code, name_of

NAMES = {SOURCE / "engine" / "valkey" / "keys.py", SOURCE / "lua" / "lib" / "20_keys.lua"}
LITERAL = re.compile(r"""["']ff:|\[\[ff:""")


def literals(name: str, text: str) -> list[str]:
    """The lines that spell out a key."""
    return [
        f"{name}:{number}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if LITERAL.search(line)
    ]


def test_no_key_is_spelled_out_elsewhere() -> None:
    found = [
        hit
        for path in code()
        if path.is_relative_to(SOURCE) and path not in NAMES
        for hit in literals(name_of(path), path.read_text())
    ]
    assert found == [], "build it with engine/valkey/keys.py or lua/lib/20_keys.lua"


@pytest.mark.parametrize(
    "line",
    ['key = f"ff:wp:{tag}"', "return 'ff:sec:' .. tag", "local key = [[ff:idx:lanes]]"],
)
def test_the_guard_catches(line: str) -> None:
    assert literals("f", line) == [f"f:1: {line}"]


@pytest.mark.parametrize("line", ['"""Indexes after `ff:idx:T:`."""', "-- `ff:idx:T:`", '"off:"'])
def test_the_guard_lets_pass(line: str) -> None:
    assert literals("f", line) == []
