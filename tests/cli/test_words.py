"""Values as people read them, and log lines in both forms."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from io import StringIO

import pytest
from rich.console import Console

from flowfabric.cli.logs import JsonFormatter, TextFormatter
from flowfabric.cli.views.screen import Row, Screen, published
from flowfabric.cli.views.text import clean, json_line, preview, short_length
from flowfabric.core.text import age, clock, duration, plural


@pytest.mark.parametrize(
    ("ms", "text"),
    [(-5, "0s"), (999, "0s"), (1000, "1s"), (59_999, "59s"), (60_000, "1m"), (3_600_000, "1h")],
)
def test_age(ms: int, text: str) -> None:
    assert age(ms) == text


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (1500, "1.5 s"),
        (30_000, "30 s"),
        (60_000, "1m"),
        (125_000, "2m 5s"),
        (90_061_000, "1d 1h"),
    ],
)
def test_duration(ms: int, text: str) -> None:
    assert duration(ms) == text


def test_clock_survives_any_number() -> None:
    now = datetime.now(UTC).astimezone().replace(microsecond=7000)
    assert clock(round(now.timestamp() * 1000)) == now.strftime("%Y-%m-%d %H:%M:%S.007")
    assert clock(2**62) == f"{2**62} ms"


def test_plural() -> None:
    assert (plural(0, "task"), plural(1, "task"), plural(2000, "task")) == (
        "0 tasks",
        "1 task",
        "2,000 tasks",
    )


HOSTILE = "a\x1b[31m\r\n\x00\x9b\u202e\u2028\u2067\U000e0001\t"
"""Moves a cursor, forges a line, starts a control sequence, turns text around."""


def test_clean_escapes_whatever_is_not_text() -> None:
    assert clean("naïve 漢字 [bold]") == "naïve 漢字 [bold]"
    assert clean("one\ntwo", keep="\n") == "one\ntwo"
    assert clean(HOSTILE) == ("a\\x1b[31m\\r\\n\\x00\\x9b\\u202e\\u2028\\u2067\\U000e0001\\t")


def on_terminal(width: int, row: Row, optional: tuple[str, ...] = ()) -> list[str]:
    """The lines of a table on a terminal of this width."""
    screen, written = Screen(), StringIO()
    screen.console = Console(width=width, file=written, force_terminal=True, color_system=None)
    screen.terminal = True
    screen.table([row], optional)
    return written.getvalue().splitlines()


@pytest.mark.parametrize(
    ("width", "shown"),
    [(83, "KEY A B LAST"), (70, "KEY B LAST"), (55, "KEY B LAST"), (54, "KEY LAST")],
)
def test_a_narrow_terminal_drops_optional_columns_and_cuts_nothing(width: int, shown: str) -> None:
    row: Row = {"KEY": "k" * 39, "A": "a" * 39, "B": "b" * 20, "LAST": "the-end"}
    header, *lines = on_terminal(width, row, ("A", "B"))
    assert header.split() == shown.split()
    assert max(map(len, lines)) <= width
    for name in shown.split():
        whole = str(row[name])
        start = header.index(name)
        cells = (line[start : start + len(whole)].partition(" ")[0] for line in lines)
        assert "".join(cells) == whole


@pytest.mark.parametrize("width", [80, 100, 200])
@pytest.mark.parametrize("long", ["KEY", "NOTE", "WHY"])
def test_one_long_text_neither_breaks_nor_hides_the_other_columns(width: int, long: str) -> None:
    row: Row = {"ID": "86-1d0e4b2a", "KEY": "a-key", "NOTE": "a-note", "STATE": "active"}
    row |= {"STARTED": "2026-11-19", "WHY": "unknown"}
    row[long] = text = " ".join(["words"] * 50)
    header, *lines = on_terminal(width, row)
    assert header.split() == list(row)
    assert max(map(len, lines)) <= width
    for name, cell in row.items():
        if name != long:
            assert lines[0][header.index(name) :].startswith(str(cell))
    folded = (line[header.index(long) :].split("  ")[0].strip() for line in lines)
    assert " ".join(folded) == text


def test_the_last_column_gives_way_before_times_are_broken() -> None:
    row: Row = {"#": "1", "STATE": "ended_failure", "WORKER": "vm-23768-724bedf3"}
    row |= {"STARTED": "2026-11-19 04:18:43.367", "REASON": "ConnectionError: no route to host"}
    _, first, *_ = on_terminal(80, row)
    assert first.rstrip().split("  ")[-2:] == ["2026-11-19 04:18:43.367", "ConnectionError:"]


def test_a_table_that_cannot_fit_keeps_its_columns() -> None:
    row: Row = {f"COLUMN-{number}": f"value-{number}" for number in range(9)}
    assert " ".join(on_terminal(40, row)).split() == [*row, *row.values()]


def test_columns_of_a_pipe_are_straight_beside_wide_letters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows: list[Row] = [{"TASK": "漢字", "STATE": "active"}, {"TASK": "mail", "STATE": "active"}]
    Screen().table(rows)
    assert capsys.readouterr().out.splitlines() == ["TASK  STATE", "漢字  active", "mail  active"]


def test_json_is_one_line_of_text_with_the_same_value() -> None:
    line = json_line({"text": HOSTILE, "plain": "naïve 漢字"})
    assert line.isprintable()
    assert "naïve 漢字" in line
    assert json.loads(line)["text"] == HOSTILE


def test_json_has_the_names_of_options_and_times_twice() -> None:
    stored = {
        "execution_kind": "resize",
        "lane_id": "mails",
        "public_state": "active",
        "attempt_index": 0,
        "created_at": "1700000000123",
        "expires_at_ms": 1_700_000_000_123,
        "until": None,
        "completed_at": 2**62,
        "liveness_ttl_ms": 5,
        "waits": [{"since": 0}],
        "tags": {"lane_id": "1", "created_at": "2"},
    }
    when = "2023-11-14T22:13:20.123Z"
    assert published(stored) == {
        "task": "resize",
        "lane": "mails",
        "state": "active",
        "attempt": 1,
        "created_at": 1_700_000_000_123,
        "created_at_iso": when,
        "expires_at_ms": 1_700_000_000_123,
        "expires_at_iso": when,
        "until": None,
        "completed_at": 2**62,
        "completed_at_iso": None,
        "liveness_ttl_ms": 5,
        "waits": [{"since": 0, "since_iso": "1970-01-01T00:00:00.000Z"}],
        "tags": {"lane_id": "1", "created_at": "2"},
    }


def test_short_length() -> None:
    assert short_length([]) == 8
    assert short_length(["12345678-a", "12345678-b"]) == 10
    assert short_length(["a" * 36, "a" * 36]) == 8


@pytest.mark.parametrize(
    ("data", "limit", "expected"),
    [
        (b"", 10, ("", "text", False)),
        ("äb".encode(), 10, ("äb", "text", False)),
        ("äbc".encode(), 2, ("äb", "text", True)),
        (b"\xff\x01\x02", 10, ("ff01 02", "hex", False)),
        (b"\xff" * 100, 400, ((b"\xff" * 64).hex(" ", -2), "hex", True)),
        (b"\xff" * 100, None, ((b"\xff" * 100).hex(" ", -2), "hex", False)),
    ],
)
def test_preview(data: bytes, limit: int | None, expected: tuple[str, str, bool]) -> None:
    assert preview(data, limit) == expected


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("flowfabric.x", logging.WARNING, "f.py", 1, message, None, None)
    made.__dict__.update(extra)
    return made


def refuse() -> None:
    raise ValueError("no\x1b")


def failing() -> logging.LogRecord:
    made = record("failed")
    try:
        refuse()
    except ValueError:
        made.exc_info = sys.exc_info()
    return made


def test_text_lines() -> None:
    plain = TextFormatter(colour=False)
    line = plain.format(record("hi\x1b", action="a", lanes=["x", "y"], count=2))
    assert line.endswith(" WARNING hi\\x1b  lanes=x,y  count=2")
    hostile = plain.format(record(HOSTILE, who=HOSTILE))
    assert (hostile.isprintable(), clean(HOSTILE) in hostile) == (True, True)
    assert "\x1b[33mWARNING" in TextFormatter(colour=True).format(record("hi"))
    assert plain.format(failing()).endswith("ValueError: no\\x1b")


def test_a_text_line_has_compact_ids_and_a_json_line_canonical_ones() -> None:
    uuid = "11111111-2222-4333-8444-555555555555"
    canonical, compact = f"{{fp:42}}:{uuid}", f"42-{uuid}"
    made = record(f"lost {canonical}", execution_id=canonical, other_id=canonical)
    assert TextFormatter(colour=False).format(made).endswith(f"lost {compact}")
    assert json.loads(JsonFormatter().format(made))["execution_id"] == canonical


def test_a_text_line_repeats_nothing() -> None:
    made = record("resize 86-12 failed (attempt 2)", execution_id="86-12", attempt=2, epoch=1)
    assert TextFormatter(colour=False).format(made).endswith(" (attempt 2)  epoch=1")


def test_what_follows_a_line_is_indented() -> None:
    """An exception's text cannot pass for a line of its own."""
    made = record("blocked", stack_info="Stack:\n  in hold\x9b")
    assert TextFormatter(colour=False).format(made).endswith("blocked\n  Stack:\n    in hold\\x9b")
    assert json.loads(JsonFormatter().format(made))["stack"] == "Stack:\n  in hold\x9b"


def test_the_target_of_audit_records() -> None:
    made = record("cancel_flow by oncall: ok", name="flowfabric.audit")
    assert json.loads(JsonFormatter().format(made))["target"] == "audit"


def test_json_lines() -> None:
    assert JsonFormatter().format(record(HOSTILE, who=HOSTILE)).isprintable()
    made = json.loads(JsonFormatter().format(record("hi", action="a", odd=object(), count=2)))
    assert datetime.fromisoformat(made.pop("time")).tzinfo is not None
    assert made.pop("odd").startswith("<object object")
    assert made == {
        "level": "warning",
        "target": "flowfabric.x",
        "message": "hi",
        "action": "a",
        "count": 2,
    }
    assert "ValueError: no" in json.loads(JsonFormatter().format(failing()))["exception"]


def test_a_lone_surrogate_is_escaped() -> None:
    """It is no Unicode, but names of files and messages of errors hold it."""
    made = JsonFormatter().format(record("\udcff", who="\ud800 \u202e"))
    assert made.isascii()
    assert json.loads(made)["message"] == "\udcff"
