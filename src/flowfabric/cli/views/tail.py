"""What `flowfabric tail` prints: frames on standard output, notes on standard error."""

import base64
import codecs
import contextlib
import re
import sys
from typing import Any
from zlib import crc32

import msgspec
from rich.console import Console
from rich.text import Text

from flowfabric.cli.views.screen import Cell, Screen, print_json, state_cell
from flowfabric.cli.views.text import clean
from flowfabric.cli.views.waits import describe_end
from flowfabric.core.contracts.streams import StreamedFrame
from flowfabric.engine.api.waitpoints import LastWait
from flowfabric.engine.overview import Wait
from flowfabric.sdk.diagnosis import describe_waitpoints, future_time

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
    "suspension_timeout": "stopped: no answer arrived in time",
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


def _content(frame: StreamedFrame) -> str:
    data = frame.payload
    if frame.encoding != "binary":
        with contextlib.suppress(UnicodeDecodeError):
            return data.decode()
    more = " …" if len(data) > _HEX_BYTES else ""
    return f"<{len(data):,} bytes: {data[:_HEX_BYTES].hex(' ', -2)}{more}>"


class TextPrinter:
    """Prints frames and what happens to the execution; a pipe gets only the frames."""

    index = 0
    """The index of the attempt that is being printed."""

    def __init__(self) -> None:
        self._screen = Screen()
        self._notes = Console(stderr=True, highlight=False, emoji=False, markup=False)
        self._mid_line = False
        """Whether the output so far ends within a line."""
        self._set_apart = False
        """Whether a note has already ended that line."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def frame(self, frame: StreamedFrame) -> None:
        style = _style(frame)
        if frame.encoding == "utf8":
            # A character may be split between two frames.
            self._write(readable(self._decoder.decode(frame.payload)), style)
            return
        head = "" if frame.frame_type in _PLAIN_TYPES else f"{clean(frame.frame_type)} "
        self._end_line()
        self._write(f"{head}{readable(_content(frame))}\n", style)

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

    def note(self, kind: str, **fields: Any) -> None:
        """Print on standard error what happened."""
        attempt = (f"attempt {self.index + 1}", "bold")
        match kind:
            case "attempt":
                hint = "" if fields["new"] else "; --attempt 1 starts with the first"
                how, worker = fields["attempt_type"], fields["worker_instance_id"]
                self._print(attempt, f" ({how}) on {worker}{hint}" if how else hint)
            case "closed":
                ending = _REASONS.get(fields["reason"], fields["reason"])
                why = (fields["failure_reason"] or "").partition("\n")[0]
                self._print(attempt, f" {ending}: {why}" if why else f" {ending}")
                self._decoder.reset()
            case "waiting":
                wait: Wait = fields["wait"]
                what = describe_waitpoints(wait.waitpoints) or wait.reason.replace("_", " ")
                limit = (
                    "" if wait.until is None else f" until {future_time(wait.until, fields['at'])}"
                )
                self._print(state_cell("suspended"), f": waits for {what}{limit}")
                if wait.prompt is not None:
                    self._print(("asks", "magenta"), f": {wait.prompt}")
                if wait.details is not None:
                    self._print(msgspec.json.encode(wait.details).decode())
            case "resumed":
                last: LastWait | None = fields["wait"]
                ended = f"the wait {describe_end(last)}" if last and last.closed_at else ""
                self._print(("resumed", "cyan"), f": {ended or 'the handler starts again'}")
            case "gap":
                self._print("older output was trimmed")
            case "interrupted":
                problem = fields["problem"]
                self._print(("no answer from the server", "yellow"), f", retrying: {problem}")
            case _:
                self._print(state_cell(fields["public_state"]))

    def _print(self, *cells: Cell) -> None:
        sys.stdout.flush()
        if self._screen.terminal:
            self._end_line()
            sys.stdout.flush()
        elif self._mid_line and not self._set_apart:
            # Both streams may go to one terminal. The line end is not part of the output.
            sys.stderr.write("\n")
            self._set_apart = True
        line = Text()
        for cell in ("── ", *cells):
            text, style = (cell, "bright_black") if isinstance(cell, str) else cell
            line.append(clean(text), style)
        self._notes.print(line, soft_wrap=True)


class JsonPrinter:
    """Prints one JSON object per line; `type` says what it is."""

    index = 0

    def frame(self, frame: StreamedFrame) -> None:
        try:
            payload, form = frame.payload.decode(), "text"
        except UnicodeDecodeError:
            payload, form = base64.b64encode(frame.payload).decode(), "base64"
        fields = frame.fields | {"id": frame.id, "payload": payload, "payload_form": form}
        print_json({"type": "frame", "attempt_index": self.index} | fields)

    def note(self, kind: str, **fields: Any) -> None:
        print_json({"type": kind, "attempt_index": self.index} | fields)
        sys.stdout.flush()


Printer = TextPrinter | JsonPrinter
