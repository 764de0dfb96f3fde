"""What answering a wait needs: the waitpoint a person means, the payload, and what came of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from flowfabric.cli.errors import CliError, UsageError
from flowfabric.cli.screen import Cell, Screen, print_json
from flowfabric.cli.waiting_read import open_waitpoints, read_last_wait
from flowfabric.cli.waiting_words import ended, wanted
from flowfabric.cli.words import clean, plural
from flowfabric.core.contracts.suspension import Accepted, OpenWaitpoint, SignalOutcome
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.backend import Backend

__all__ = ["find_waitpoint", "read_payload", "say", "too_late"]

_MIN_PREFIX = 4
_TOO_LATE = frozenset({"waitpoint_closed", "target_not_signalable", "execution_not_suspended"})
_EFFECTS = {
    "resume_condition_satisfied": ("it goes on", "green"),
    "appended_to_waitpoint": ("it counts, and more answers are needed", "cyan"),
    "appended_to_waitpoint_duplicate": (
        "it does not count: an answer of this kind was counted before",
        "yellow",
    ),
    "signal_ignored_not_in_condition": ("it is kept, but nothing asks for it", "yellow"),
    "signal_ignored_matcher_failed": ("it is kept, but nothing asks for this name", "yellow"),
    "no_op": ("it is kept, but nothing asks for this name", "yellow"),
    "buffered_for_pending_waitpoint": ("it is kept until the handler waits for it", "cyan"),
}


async def find_waitpoint(
    backend: Backend, execution_id: ExecutionId, text: str | None
) -> OpenWaitpoint:
    """The open waitpoint named by its key, its id or a beginning of that; or the only one."""
    found = await open_waitpoints(backend, execution_id)
    if not found:
        raise await nothing_waits(backend, execution_id)
    if text is not None:
        named = [one for one in found if text in (one.waitpoint_key, one.waitpoint_id)]
        # The second wait of a handler for one name has a number.
        named = named or [one for one in found if one.waitpoint_key.rpartition("#")[0] == text]
        if not named and len(text) >= _MIN_PREFIX:
            named = [one for one in found if one.waitpoint_id.startswith(text.lower())]
        if not named:
            raise await _unknown(backend, execution_id, text, found)
        found = named
    if len(found) > 1:
        raise CliError(
            "ambiguous_waitpoint",
            f"{execution_id} has {plural(len(found), 'open waitpoint')}:{_listed(found)}",
            "name one of them, by its key or its id",
            *(one.waitpoint_id for one in found),
        )
    return found[0]


def _listed(waitpoints: Sequence[OpenWaitpoint]) -> str:
    return "".join(
        f"\n  {one.waitpoint_id}  {clean(one.waitpoint_key)}  ({wanted(one)})" for one in waitpoints
    )


async def nothing_waits(backend: Backend, execution_id: ExecutionId) -> CliError:
    """Nothing can be answered; if something was, how that ended."""
    state = (await backend.read_execution_state(execution_id)).value
    last = await read_last_wait(backend, execution_id)
    if last is None or last.closed_at is None:
        return CliError(
            "nothing_waiting",
            f"{execution_id} is {state} and waits for no answer",
            "`flowfabric waiting` lists what waits",
            state,
        )
    told = ended(last, await backend.server_time_ms())
    return CliError(
        "already_answered" if last.answers else "nothing_waiting",
        f"{execution_id} is {state}; its wait {told}",
        "nothing is left to do; `flowfabric waiting` lists what waits",
        state,
    )


async def _unknown(
    backend: Backend, execution_id: ExecutionId, text: str, found: Sequence[OpenWaitpoint]
) -> CliError:
    past = await backend.read_waits(execution_id)
    over = any(wait.ended and text in (wait.waitpoint_key, wait.waitpoint_id) for wait in past)
    said = "is over, it was waited for before" if over else "is no open waitpoint"
    return CliError(
        "already_answered" if over else "waitpoint_not_found",
        f"{text!r} {said}; open on {execution_id}:{_listed(found)}",
        "name one of them, by its key or its id",
        *(one.waitpoint_id for one in found),
    )


async def too_late(backend: Backend, execution_id: ExecutionId, code: str) -> CliError | None:
    """The error to tell instead, when a call was refused because the wait is over."""
    return await nothing_waits(backend, execution_id) if code in _TOO_LATE else None


def read_payload(text: str | None) -> bytes | None:
    """JSON given as it is, as `@file`, or as `-` for standard input."""
    if text is None:
        return None
    if text == "-":
        raw = sys.stdin.buffer.read()
    elif text.startswith("@"):
        try:
            raw = Path(text[1:]).expanduser().read_bytes()
        except OSError as error:
            raise UsageError("invalid_input", f"--payload: {error.strerror}: {text[1:]}") from error
    else:
        raw = text.encode(errors="surrogateescape")
    try:
        msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            "invalid_input",
            f"--payload: not JSON: {error}",
            """quote it for the shell, such as --payload '{"ok": true}'; a text needs its own """
            """quotes: --payload '"text"'""",
        ) from error
    return raw


def say(
    execution_id: ExecutionId,
    waitpoint: OpenWaitpoint,
    name: str,
    outcome: SignalOutcome,
    *,
    as_json: bool,
) -> None:
    """What became of a signal."""
    accepted = isinstance(outcome, Accepted)
    if as_json:
        plain: dict[str, Any] = {
            "execution_id": execution_id,
            "waitpoint_id": waitpoint.waitpoint_id,
            "waitpoint_key": waitpoint.waitpoint_key,
            "signal_name": name,
            "outcome": outcome.kind,
            "signal_id": outcome.signal_id if accepted else outcome.existing_signal_id,
            "effect": outcome.effect if accepted else None,
            "resumed": accepted and outcome.resumed,
        }
        print_json(plain)
        return
    told: Cell = ("nothing new: the same answer was given before", "yellow")
    if accepted:
        told = _EFFECTS.get(outcome.effect, (clean(outcome.effect), ""))
    head = f"{execution_id}  {clean(waitpoint.waitpoint_key)}  {clean(name)}: "
    Screen().line(head, told)
