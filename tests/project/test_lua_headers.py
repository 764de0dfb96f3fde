"""Every Lua function file begins by telling what it takes, answers, refuses and reports: truly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowfabric.core.catalogue import CATALOGUE
from tests.project.lua_source import (
    FUNCTIONS,
    Block,
    arguments_of,
    comment_of,
    errors_in,
    events_in,
    first_sentence,
    function,
    helpers,
    positions_in,
    sections_of,
    without_comments,
    without_notes,
)

WORDS = ("Arguments", "Replies", "Errors", "Events")
FLAGS = {"no-writes", "allow-oom", "allow-stale"}
# What helpers could report, but not as these functions call them: the kind of the claim is
# given, and a fence that is only looked at marks no lapsed lease.
UNREACHED = {
    **dict.fromkeys(("ff_claim_execution", "ff_claim_resumed", "ff_grant_and_claim"), "reclaimed"),
    **dict.fromkeys(
        (
            *("ff_cancel", "ff_close_waitpoint", "ff_create_waitpoint", "ff_progress"),
            "ff_record_step",
        ),
        "expired",
    ),
    "ff_reclaim": "acquired",
}
# What the end of a member may bring about: its flow finishes, a flow that it owns is cancelled.
# Where `completion` is named, these follow, and only functions about flows name them as well.
FOLLOWS = {"flow_finished", "flow_cancel_requested"}
each_function = pytest.mark.parametrize("path", FUNCTIONS, ids=lambda path: path.stem)


def missing(name: str, text: str) -> list[str]:
    """What the header leaves out. A function that cannot write has no events to name."""
    wanted = [word for word in WORDS if word != "Events" or "no-writes" not in text]
    absent = [word for word in wanted if word not in sections_of(text)]
    return absent if comment_of(text).startswith(f"{name}: ") else [f"{name}: …", *absent]


def argument_problem(text: str) -> str | None:
    """Where the arguments that a header names are not those that the code reads."""
    said, read = arguments_of(text), positions_in(Block(Path(), without_comments(text)))
    once = len(said.fixed)
    numbers = set(range(1, once + 1))
    if not numbers <= read:
        return f"never read: {sorted(numbers - read)}"
    unnamed = read - set(range(1, once + 1 + (said.group or 0)))
    if unnamed:
        return f"read, but not named: {sorted(unnamed)}"
    if said.repeated and not re.search(rf"(?:= |args, |\+ |', ){once + 1}\b", text):
        return f"nothing repeats from {once + 1} on"
    steps = {int(step) for step in re.findall(r"for \w+ = \d+, #args, (\d+) do", text)}
    if said.group and steps - {said.group}:
        return f"repeats every {steps}, the header lists {said.group}"
    return None


def error_problem(text: str) -> str | None:
    """Codes named in a note in brackets may occur in the code without being answered."""
    said = sections_of(text)["Errors"]
    code = re.compile(rf"\b(?:[a-z]+(?:_[a-z]+)+|{'|'.join(CATALOGUE)})\b")
    named, noted = set(code.findall(without_notes(said))), set(code.findall(said))
    if "those of the fence" in said:
        named |= errors_in(helpers()["fence.check"])
    for other in (path for path in FUNCTIONS if f"those of {path.stem}" in said):
        noted |= errors_in(function(other))
        named.discard(other.stem)
    used = errors_in(Block(Path(), without_comments(text)))
    return difference(named - {"corruption"}, used, noted)


def event_problem(name: str, text: str) -> str | None:
    said = without_notes(sections_of(text).get("Events", "none")).partition(";")[0]
    words = re.split(r",| and |\|", first_sentence(said))
    named = {word.strip() for word in words} - {"none", ""}
    used = events_in(Block(Path(), without_comments(text)))
    follow: set[str] = FOLLOWS if "completion" in named else set()
    return difference(named, used - {UNREACHED.get(name)}, follow)


def difference(named: set[str], used: set[str], noted: set[str]) -> str | None:
    if named - used:
        return f"named, but not in the code: {sorted(named - used)}"
    if used - named - noted:
        return f"in the code, but not named: {sorted(used - named - noted)}"
    return None


@each_function
def test_header(path: Path) -> None:
    text = path.read_text()
    assert missing(path.stem, text) == []
    assert argument_problem(text) is None
    assert error_problem(text) is None
    assert event_problem(path.stem, text) is None


@each_function
def test_one_function_a_file_named_like_it(path: Path) -> None:
    registered = re.findall(r"\bregister(?:_\w+)?\('(\w+)'", path.read_text())
    assert registered == [path.stem]


@each_function
def test_flags_are_passed_at_registration(path: Path) -> None:
    flags = re.search(r"\nend, (\{.*\})\)\n$", path.read_text())
    assert flags is not None, "end the file with `end, { flags })`: see lib/05_register.lua"
    assert set(re.findall(r"'([\w-]+)'", flags[1])) <= FLAGS


def test_what_helpers_report_is_seen_through_them() -> None:
    many = function(next(path for path in FUNCTIONS if path.stem == "ff_complete"))
    assert {"completion", "acquired", "reclaimed"} <= events_in(many)
    assert {"stale_lease", "execution_not_active"} <= errors_in(many)


HONEST = """-- ff_x: does.
-- Arguments: id, ttl (ms, at most 9), then per item: a, b. Replies: one.
-- Errors: no_such_thing (never_that_one). Events: completion.
local function f() return reply.err('no_such_thing') end
register('ff_x', function(keys, args)
  local id, ttl = args[1], args[2]
  for i = 3, #args, 2 do events.emit(c, 'completion', id, rec) end
end, { 'allow-oom' })
"""


@pytest.mark.parametrize(
    ("part", "instead", "problem"),
    [
        ("args[2]", "1", "never read: [2]"),
        ("args[1], args[2]", "args[1], args[2], args[6]", "read, but not named: [6]"),
        ("i = 3", "i = 4", "nothing repeats from 3 on"),
        ("#args, 2", "#args, 3", "repeats every {3}, the header lists 2"),
        ("('no_such_thing", "('never_that_one", "named, but not in the code: ['no_such_thing']"),
        ("'completion'", "'released'", "named, but not in the code: ['completion']"),
        ("do events", "do reply.err('a_b') events", "in the code, but not named: ['a_b']"),
        ("completion.", "none.", "in the code, but not named: ['completion']"),
    ],
)
def test_the_guard_notices(part: str, instead: str, problem: str) -> None:
    def problems(text: str) -> list[str | None]:
        return [argument_problem(text), error_problem(text), event_problem("ff_x", text)]

    assert problems(HONEST) == [None, None, None]
    assert part in HONEST
    assert problem in problems(HONEST.replace(part, instead, 1))


def test_the_guard_misses_no_section() -> None:
    assert missing("ff_x", "-- ff_x: does.\n-- Arguments: none. Replies: one.\n") == [
        "Errors",
        "Events",
    ]
    assert missing("ff_x", "local x = 1") == ["ff_x: …", *WORDS]
