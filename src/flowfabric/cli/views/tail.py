"""What `flowfabric tail` prints: frames on standard output, notes on standard error."""

import base64
import codecs
import re
import sys
from typing import Any
from zlib import crc32

from rich.console import Console
from rich.text import Text

from flowfabric.cli.views.screen import Cell, Screen, print_json, state_cell
from flowfabric.cli.views.text import clean, preview
from flowfabric.cli.views.waits import describe_waitpoints, future_time
from flowfabric.core.contracts.executions import AttemptRecord, ExecutionInfo
from flowfabric.core.contracts.streams import StreamedFrame
from flowfabric.engine.overview import Wait

_PLAIN_TYPES = frozenset({"delta", "stdout"})
_STYLES = {"stderr": "red", "event": "cyan", "blob": "magenta", "progress": "yellow"}
_OTHER_STYLES = ("blue", "green", "bright_cyan", "bright_magenta", "bright_yellow", "bright_blue")
_HEX_BYTES = 32
_colours = re.compile(r"\x1b\[[0-9;]*m")
_unsafe = re.compile(r"[^\n\t]+")
_REASONS = {
    "attempt_success": "succeeded",
    "attempt_failure": "failed",
    "attempt_cancelled": "was cancelled",
    "lease_expired": "stopped: its worker did not renew the lease",
    "lease_revoked": "stopped: its lease was revoked",
    "reclaimed": "stopped: another worker took over",
    "max_reclaims_exceeded": "failed: too many of its workers died",
    "expired": "timed out",
    "suspension_timeout": "stopped: no answer came in time",
    "dependency_impossible": "was skipped: an execution it depends on cannot succeed",
}


def readable(text: str) -> str:
    """Text that cannot move the cursor: without colours, other control characters escaped."""
    text = _colours.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _unsafe.sub(lambda part: clean(part[0]), text)


def _style(frame: StreamedFrame) -> str:
    name, style = frame.frame_type, ""
    if name not in _PLAIN_TYPES:
        # A type has the same colour in every run.
        style = _STYLES.get(name) or _OTHER_STYLES[crc32(name.encode()) % len(_OTHER_STYLES)]
    return f"{style} dim".strip() if frame.mode == "best_effort" else style


class TextPrinter:
    """Prints frames and what happens to the execution; a pipe gets only the frames."""

    index = 0
    """The index of the attempt that is being printed."""

    def __init__(self) -> None:
        self._screen = Screen()
        self._notes = Console(stderr=True, highlight=False, emoji=False, markup=False)
        self._mid_line = False
        self._set_apart = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def frame(self, frame: StreamedFrame) -> None:
        style = _style(frame)
        if frame.encoding == "utf8":
            # A character may be split between two frames.
            self._write(readable(self._decoder.decode(frame.payload)), style)
            return
        binary = frame.encoding == "binary"
        shown, form, shortened = preview(frame.payload, _HEX_BYTES if binary else None)
        if form == "hex" or binary:
            shown = shown if form == "hex" else frame.payload[:_HEX_BYTES].hex(" ", -2)
            more = " …" if shortened else ""
            shown = f"<{len(frame.payload):,} bytes: {shown}{more}>"
        head = "" if frame.frame_type in _PLAIN_TYPES else f"{clean(frame.frame_type)} "
        self._end_line()
        self._write(f"{head}{readable(shown)}\n", style)

    def _write(self, text: str, style: str) -> None:
        if not text:
            return
        if self._screen.terminal:
            self._screen.console.print(Text(text, style), end="", soft_wrap=True)
        else:
            sys.stdout.write(text)
        self._mid_line = not text.endswith("\n")
        self._set_apart = False

    def _end_line(self) -> None:
        if self._mid_line:
            sys.stdout.write("\n")
            self._mid_line = False

    def _note(self, *cells: Cell) -> None:
        sys.stdout.flush()
        if self._screen.terminal:
            self._end_line()
            sys.stdout.flush()
        elif self._mid_line and not self._set_apart:
            # Both streams may go to one terminal. The line end is not part of the output.
            sys.stderr.write("\n")
            self._set_apart = True
        pairs = [(cell, "bright_black") if isinstance(cell, str) else cell for cell in cells]
        styled = [(clean(text), style) for text, style in pairs]
        line = Text.assemble(("── ", "bright_black"), *styled)
        self._notes.print(line, soft_wrap=True)

    def attempt(self, record: AttemptRecord | None, *, first: bool) -> None:
        kind = f" ({record.attempt_type})" if record is not None else ""
        worker = f" on {record.worker_instance_id}" if record is not None else ""
        hint = "; --attempt 1 starts with the first" if first else ""
        self._note((f"attempt {self.index + 1}", "bold"), f"{kind}{worker}{hint}")

    def closed(self, reason: str, record: AttemptRecord | None) -> None:
        ending = _REASONS.get(reason, reason)
        why = record.failure_reason if record is not None else None
        because = f": {why.partition(chr(10))[0]}" if why else ""
        self._note((f"attempt {self.index + 1}", "bold"), f" {ending}{because}")
        self._decoder.reset()

    def waiting(self, wait: Wait, now_ms: int) -> None:
        limit = f" until {future_time(wait.until, now_ms)}" if wait.until is not None else ""
        what = describe_waitpoints(wait.waitpoints) or wait.reason.replace("_", " ")
        self._note(state_cell("suspended"), f": waits for {what}{limit}")

    def resumed(self) -> None:
        self._note(("resumed", "cyan"), ": the handler starts again")

    def gap(self) -> None:
        self._note("older output was trimmed")

    def interrupted(self, problem: str) -> None:
        self._note(("no answer from the server", "yellow"), f", retrying: {problem}")

    def end(self, info: ExecutionInfo) -> None:
        self._note(state_cell(info.public_state.value))


class JsonPrinter:
    """Prints one JSON object per line; `type` says what it is."""

    index = 0

    def frame(self, frame: StreamedFrame) -> None:
        try:
            payload, form = frame.payload.decode(), "text"
        except UnicodeDecodeError:
            payload, form = base64.b64encode(frame.payload).decode(), "base64"
        rest = {name: value for name, value in frame.fields.items() if name != "payload"}
        self._print("frame", id=frame.id, payload=payload, payload_form=form, **rest)

    def _print(self, kind: str, **fields: Any) -> None:
        print_json({"type": kind, "attempt_index": self.index} | fields)
        if kind != "frame":
            sys.stdout.flush()

    def attempt(self, record: AttemptRecord | None, *, first: bool) -> None:
        self._print(
            "attempt",
            new=not first,
            attempt_type=None if record is None else record.attempt_type,
            worker_instance_id=None if record is None else record.worker_instance_id,
        )

    def closed(self, reason: str, record: AttemptRecord | None) -> None:
        why = None if record is None else record.failure_reason
        self._print("closed", reason=reason, failure_reason=why)

    def waiting(self, wait: Wait, now_ms: int) -> None:
        self._print("waiting", at=now_ms, wait=wait)

    def resumed(self) -> None:
        self._print("resumed")

    def gap(self) -> None:
        self._print("gap")

    def interrupted(self, problem: str) -> None:
        self._print("interrupted", problem=problem)

    def end(self, info: ExecutionInfo) -> None:
        self._print("end", public_state=info.public_state.value)


Printer = TextPrinter | JsonPrinter
