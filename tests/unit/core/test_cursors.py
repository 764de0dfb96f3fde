"""The cursor grammar of streams: every form, every refusal."""

from __future__ import annotations

import pytest

from flowfabric.core.contracts.streams import (
    READ_HARD_CAP,
    START,
    StreamCursor,
    behind,
    check_count,
)
from flowfabric.core.errors import ValidationError

LARGEST = 2**64 - 1


@pytest.mark.parametrize(
    ("text", "concrete", "first", "last"),
    [
        ("start", False, "-", "-"),
        ("end", False, "+", "+"),
        ("0", True, "0-0", "0"),
        ("1713100800150", True, "1713100800150-0", "1713100800150"),
        ("1713100800150-7", True, "1713100800150-7", "1713100800150-7"),
        ("0-0", True, "0-0", "0-0"),
        ("007-01", True, "7-1", "7-1"),
        ("0010", True, "10-0", "10"),
        (f"{LARGEST}-{LARGEST}", True, f"{LARGEST}-{LARGEST}", f"{LARGEST}-{LARGEST}"),
        ("0" * 5000 + "5", True, "5-0", "5"),
    ],
)
def test_forms(text: str, concrete: bool, first: str, last: str) -> None:
    cursor = StreamCursor.parse(text)
    assert str(cursor) == text
    assert cursor.is_concrete is concrete
    assert (cursor.first(), cursor.last()) == (first, last)
    if concrete:
        assert cursor.after() == first


def problem(text: str) -> str:
    with pytest.raises(ValidationError) as caught:
        StreamCursor.parse(text)
    assert caught.value.code == "invalid_input"
    return caught.value.detail


def test_empty() -> None:
    assert problem("") == "cursor: Empty: pass start, end, <ms> or <ms>-<seq>"


@pytest.mark.parametrize("text", ["-", "+"])
def test_bare_markers(text: str) -> None:
    assert problem(text) == f"cursor: BareMarkerRejected: '{text}': use start or end"


@pytest.mark.parametrize(
    "text",
    [
        *("abc", "-1", "1-", "-1-2", "1-2-3", "1.2", "1 2", "Start", "END", " start", "1\n", "--"),
        *("+1", "1_0", "0x1", "(1-0", "*", "$", "1-*", "١٢", "1\u20112", "1٣-0", "²"),
        *(str(LARGEST + 1), f"1-{LARGEST + 1}", f"{LARGEST + 1}-0", "9" * 5000, f"1-{'9' * 5000}"),
    ],
)
def test_malformed(text: str) -> None:
    assert problem(text) == (f"cursor: Malformed: {text!r}: pass start, end, <ms> or <ms>-<seq>")


@pytest.mark.parametrize("text", ["start", "end"])
def test_a_tail_needs_a_concrete_position(text: str) -> None:
    with pytest.raises(ValidationError, match="pass 0-0"):
        StreamCursor.parse(text).after()


def test_behind_an_entry() -> None:
    assert behind(START.text) == "(0-0"
    assert behind(f"{LARGEST}-{LARGEST}") == f"{LARGEST}-{LARGEST}"


def test_counts_are_refused_never_clamped() -> None:
    assert [check_count(n) for n in (1, READ_HARD_CAP)] == [1, 10_000]
    for count in (0, -1, False, True):
        with pytest.raises(ValidationError) as caught:
            check_count(count)
        assert caught.value.details == ("count_limit must be >= 1",)
    with pytest.raises(ValidationError) as caught:
        check_count(READ_HARD_CAP + 1)
    assert caught.value.details == ("count_limit_exceeds_hard_cap",)
