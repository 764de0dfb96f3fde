"""A change of a Lua function's arguments or replies must raise the library version."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowfabric.engine.valkey.library import LIBRARY_VERSION, MIN_CLIENT
from tests.project.interface import Interface, current, noted
from tests.project.lua_source import LUA, interface_of


def test_the_interface_is_the_one_of_this_version() -> None:
    assert noted().problem(current()) is None
    assert 1 <= MIN_CLIENT <= LIBRARY_VERSION


def changed(tmp_path: Path, name: str, part: str, instead: str) -> bool:
    """Whether this change of a function file would change its interface."""
    original = LUA / "functions" / f"{name}.lua"
    text = original.read_text()
    assert part in text
    other = tmp_path / original.name
    other.write_text(text.replace(part, instead, 1))
    return interface_of(other) != interface_of(original)


@pytest.mark.parametrize(
    ("name", "part", "instead"),
    [
        ("ff_cancel", "reason, source, fence", "source, reason, fence"),
        ("ff_cancel", "source, fence.", "source."),
        ("ff_cancel", "reply.ok('cancelled', ", "reply.ok('cancelled', id, "),
        ("ff_cancel", "reply.ok('cancelled')", "reply.ok('ended')"),
        ("ff_trim", "return 'purging'", "return 'later'"),
        ("ff_read_waits", "waitpoint_id, flat, signal_ids,", "waitpoint_id, flat,"),
        ("ff_version", "SETTINGS.min_client,", ""),
        ("ff_scan_due", "'no-writes'", "'allow-oom'"),
    ],
)
def test_a_change_that_callers_notice_is_noticed(
    tmp_path: Path, name: str, part: str, instead: str
) -> None:
    assert changed(tmp_path, name, part, instead)


@pytest.mark.parametrize(
    ("name", "part", "instead"),
    [
        ("ff_cancel", "end an execution deliberately", "cancel an execution"),
        ("ff_cancel", "local problem\n", "local problem = { 'a', id }\n"),
        ("ff_trim", "> c.now then", ">= c.now then"),
    ],
)
def test_other_changes_are_not(tmp_path: Path, name: str, part: str, instead: str) -> None:
    assert not changed(tmp_path, name, part, instead)


def test_the_problem_says_what_to_do() -> None:
    before = Interface(4, {"ff_a": "1", "ff_b": "2"})
    assert before.problem(Interface(4, {"ff_a": "1", "ff_b": "2"})) is None
    told = before.problem(Interface(4, {"ff_a": "1", "ff_c": "3"}))
    assert told is not None
    assert told.startswith("The interface of ff_b, ff_c changed. Run `make library`")
    # Raising the number alone is not enough: what it stands for is noted with it.
    assert before.problem(Interface(5, {"ff_a": "2", "ff_b": "2"})) is not None
    assert before.problem(Interface(5, before.functions)) is not None
