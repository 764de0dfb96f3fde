"""How `flowfabric tail` looks: output on one stream, what happens around it on the other."""

from __future__ import annotations

import base64
import codecs
import re
import sys
from abc import ABC, abstractmethod
from typing import Any
from zlib import crc32

from rich.console import Console
from rich.text import Text

from flowfabric.cli.screen import Cell, Screen, print_json, state_style
from flowfabric.cli.waiting_read import Wait
from flowfabric.cli.waiting_words import asked, moment
from flowfabric.cli.words import clean, preview
from flowfabric.core.contracts.executions import AttemptRecord, ExecutionInfo
from flowfabric.core.contracts.streams import StreamedFrame

__all__ = ["JsonPrinter", "Printer", "TextPrinter", "readable"]

_PLAIN_TYPES = frozenset({"delta", "stdout"})
_STYLES = {"stderr": "red", "event": "cyan", "blob": "magenta", "progress": "yellow"}
_OTHERS = ("blue", "green", "bright_cyan", "bright_magenta", "bright_yellow", "bright_blue")
_HEX_BYTES = 32
_colours = re.compile(r"\x1b\[[0-9;]*m")
_unsafe = re.compile(r"[^\n\t]+")
_REASONS = {
    "attempt_success": "succeeded",
    "attempt_failure": "failed",
    "attempt_cancelled": "was cancelled",
    "lease_expired": "stopped: its worker does not renew the lease",
    "lease_revoked": "stopped: its lease was revoked",
    "reclaimed": "was cut off: another worker took over",
    "max_reclaims_exceeded": "failed: too many workers were lost with it",
    "expired": "ran out of time",
    "suspension_timeout": "ended: nobody answered in time",
    "dependency_impossible": "was skipped: what it depends on cannot succeed",
}


def readable(text: str) -> str:
    """Text that cannot move the cursor: colours are dropped, line ends unified, the rest shown."""
    text = _colours.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _unsafe.sub(lambda part: clean(part[0]), text)


def _style(frame: StreamedFrame) -> str:
    name = frame.frame_type
    if name in _PLAIN_TYPES:
        style = ""
    else:
        # The same type has the same colour in every run.
        style = _STYLES.get(name) or _OTHERS[crc32(name.encode()) % len(_OTHERS)]
    return f"{style} dim".strip() if frame.mode == "best_effort" else style


class Printer(ABC):
    """Where frames and news about the execution go."""

    index = 0
    """The attempt that the news are about."""

    @abstractmethod
    def frame(self, frame: StreamedFrame) -> None:
        """One frame."""

    @abstractmethod
    def attempt(self, record: AttemptRecord | None, *, first: bool) -> None:
        """An attempt begins; `first` when it is merely where the printing begins."""

    @abstractmethod
    def closed(self, reason: str, record: AttemptRecord | None) -> None:
        """An attempt is over."""

    @abstractmethod
    def waiting(self, wait: Wait, now_ms: int) -> None:
        """The execution waits for an answer."""

    @abstractmethod
    def resumed(self) -> None:
        """Somebody answered, or the time was over: the handler starts again."""

    @abstractmethod
    def gap(self) -> None:
        """Older frames are gone."""

    @abstractmethod
    def interrupted(self, problem: str) -> None:
        """The server cannot be asked at the moment."""

    @abstractmethod
    def end(self, info: ExecutionInfo) -> None:
        """The execution has ended."""

    def flush(self) -> None:
        """Let a reader at the other end of a pipe see it."""
        sys.stdout.flush()


class TextPrinter(Printer):
    """For people; in a pipe the frames alone are on standard output."""

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
        shown, form, shortened = preview(frame.payload, None if _is_text(frame) else _HEX_BYTES)
        if form == "hex" or frame.encoding == "binary":
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
        self.flush()
        if self._screen.terminal:
            self._end_line()
            self.flush()
        elif self._mid_line and not self._set_apart:
            # Both streams may lead to one place; but the line end is ours, not the handler's.
            sys.stderr.write("\n")
            self._set_apart = True
        styled = [(cell, "bright_black") if isinstance(cell, str) else cell for cell in cells]
        line = Text.assemble(("── ", "bright_black"), *styled)
        self._notes.print(line, soft_wrap=True)

    def attempt(self, record: AttemptRecord | None, *, first: bool) -> None:
        kind = f" ({record.attempt_type})" if record is not None else ""
        worker = f" on {clean(record.worker_instance_id)}" if record is not None else ""
        hint = "; --attempt 0 shows it from the first" if first else ""
        self._note((f"attempt {self.index}", "bold"), f"{kind}{worker}{hint}")

    def closed(self, reason: str, record: AttemptRecord | None) -> None:
        told = _REASONS.get(reason, clean(reason))
        why = record.failure_reason if record is not None else None
        because = f": {clean(why.partition(chr(10))[0])}" if why else ""
        self._note((f"attempt {self.index}", "bold"), f" {told}{because}")
        self._decoder.reset()

    def waiting(self, wait: Wait, now_ms: int) -> None:
        limit = f" until {moment(wait.until, now_ms)}" if wait.until is not None else ""
        self._note(("suspended", state_style("suspended")), f": waits for {_asked(wait)}{limit}")

    def resumed(self) -> None:
        self._note(("resumed", "cyan"), ": the handler starts again")

    def gap(self) -> None:
        self._note("older output was trimmed away")

    def interrupted(self, problem: str) -> None:
        self._note(("no answer from the server", "yellow"), f", trying again: {clean(problem)}")

    def end(self, info: ExecutionInfo) -> None:
        state = info.public_state.value
        self._note((state, state_style(state)))


def _is_text(frame: StreamedFrame) -> bool:
    return frame.encoding != "binary"


def _asked(wait: Wait) -> str:
    return asked(wait.waitpoints) or wait.reason.replace("_", " ")


class JsonPrinter(Printer):
    """For programs: one object a line, told apart by `type`."""

    def frame(self, frame: StreamedFrame) -> None:
        try:
            payload, form = frame.payload.decode(), "text"
        except UnicodeDecodeError:
            payload, form = base64.b64encode(frame.payload).decode(), "base64"
        rest = {name: value for name, value in frame.fields.items() if name != "payload"}
        self._say("frame", id=frame.id, payload=payload, payload_form=form, **rest)

    def _say(self, kind: str, **fields: Any) -> None:
        print_json({"type": kind, "attempt": self.index} | fields)

    def attempt(self, record: AttemptRecord | None, *, first: bool) -> None:
        self._say(
            "attempt",
            new=not first,
            attempt_type=None if record is None else record.attempt_type,
            worker_instance_id=None if record is None else record.worker_instance_id,
        )
        self.flush()

    def closed(self, reason: str, record: AttemptRecord | None) -> None:
        why = None if record is None else record.failure_reason
        self._say("closed", reason=reason, failure_reason=why)
        self.flush()

    def waiting(self, wait: Wait, now_ms: int) -> None:
        self._say("waiting", at=now_ms, wait=wait)
        self.flush()

    def resumed(self) -> None:
        self._say("resumed")

    def gap(self) -> None:
        self._say("gap")

    def interrupted(self, problem: str) -> None:
        self._say("interrupted", problem=problem)
        self.flush()

    def end(self, info: ExecutionInfo) -> None:
        self._say("end", public_state=info.public_state.value)
        self.flush()
