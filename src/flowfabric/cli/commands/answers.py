"""`flowfabric approve`, `signal` and `close-waitpoint`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from flowfabric.cli.errors import CliError, UsageError
from flowfabric.cli.options import (
    ByOption,
    IdArgument,
    PayloadOption,
    Target,
    YesOption,
    confirm,
)
from flowfabric.cli.session import on_execution, user_name
from flowfabric.cli.views.screen import Cell, Screen, print_json
from flowfabric.cli.views.waits import OPERATOR_ONLY, TIMEOUT_ONLY, accepted_signals, describe_end
from flowfabric.core.contracts.suspension import Accepted, OpenWaitpoint, SignalOutcome
from flowfabric.core.errors import EngineError, FlowFabricError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.text import plural
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.overview import read_open_waitpoints

_MIN_PREFIX = 4
_TOO_LATE = frozenset({"waitpoint_closed", "target_not_signalable", "execution_not_suspended"})
_EFFECTS = {
    "resume_condition_satisfied": ("the execution resumes", "green"),
    "appended_to_waitpoint": ("counted; more signals are needed", "cyan"),
    "appended_to_waitpoint_duplicate": ("not counted: this source was counted before", "yellow"),
    "signal_ignored_not_in_condition": ("stored, but this wait does not need it", "yellow"),
    "signal_ignored_matcher_failed": ("stored, but this wait does not accept its name", "yellow"),
    "no_op": ("stored, but this wait does not accept its name", "yellow"),
    "buffered_for_pending_waitpoint": ("stored until the handler waits for it", "cyan"),
}
_HOW_TO_ANSWER = (
    "set FF_WAITPOINT_TOKEN to the token of the waitpoint; operators need no token: "
    "`flowfabric approve`"
)
_TOKEN_HINTS = {
    "invalid_token": "pass the token of this waitpoint exactly as it was issued; `flowfabric "
    "waiting` shows its signing key and fingerprint",
    "token_expired": "its signing key was retired; get a new token from the application, or answer "
    "as an operator: `flowfabric approve`",
}

WaitpointArgument = Annotated[
    str, typer.Argument(metavar="WAITPOINT", help="The waitpoint's key or id.", show_default=False)
]


def approve(
    target: Target,
    id_: IdArgument,
    waitpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="WAITPOINT",
            help="The waitpoint's key or id. Optional if only one is open.",
        ),
    ] = None,
    *,
    by: ByOption = None,
    reject: Annotated[
        bool, typer.Option("--reject", help="Send `rejected` instead of `approved`.")
    ] = False,
    name: Annotated[
        str | None, typer.Option(metavar="SIGNAL", help="Send the signal with this name instead.")
    ] = None,
    payload: PayloadOption = None,
) -> None:
    """Answer a wait as an operator, without a token.

    Your access to the server authorises you. Each person can send each signal once; a repeat
    changes nothing.
    """
    if reject and name is not None:
        raise typer.BadParameter("give either --reject or --name", param_hint="--reject")
    decision = name or ("rejected" if reject else "approved")
    data = _read_payload(payload)

    async def answer(backend: Backend, execution_id: ExecutionId) -> None:
        found = await find_waitpoint(backend, execution_id, waitpoint)
        try:
            if found.required_signal_names == (OPERATOR_ONLY,):
                if decision != "approved" or data is not None:
                    raise _accepts_no_signal()
                await _resume(target, backend, execution_id)
                return
            _check_accepted(found, decision, explicit=name is not None)
            outcome = await backend.signals.deliver_approval_signal(
                execution_id,
                found.waitpoint_id,
                decision,
                decided_by=user_name() if by is None else by,
                payload=data,
            )
        except EngineError as error:
            raise await _too_late(backend, execution_id, error) from error
        _print_outcome(target, found, decision, outcome)

    on_execution(target, id_, answer)


def signal(
    target: Target,
    id_: IdArgument,
    waitpoint: WaitpointArgument,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The signal's name.", show_default=False)
    ],
    *,
    token: Annotated[
        str,
        typer.Option(
            metavar="TOKEN",
            envvar="FF_WAITPOINT_TOKEN",
            show_default=False,
            help="The waitpoint's token. Other users of this machine can see options; prefer the "
            "variable.",
        ),
    ] = "",
    payload: PayloadOption = None,
    source: Annotated[
        str, typer.Option(metavar="IDENTITY", help="Who sends it. Stored with the signal.")
    ] = "",
    idempotency_key: Annotated[
        str, typer.Option(metavar="KEY", help="A repeat with the same key changes nothing.")
    ] = "",
) -> None:
    """Answer a wait with the token of its waitpoint.

    For services and people without operator access. Operators use `flowfabric approve`.
    """
    if not token:
        raise UsageError("missing_token", "a signal needs the waitpoint's token", _HOW_TO_ANSWER)
    data = _read_payload(payload)

    async def answer(backend: Backend, execution_id: ExecutionId) -> None:
        found = await find_waitpoint(backend, execution_id, waitpoint)
        try:
            outcome = await backend.signals.deliver_signal(
                execution_id,
                found.waitpoint_id,
                token,
                name,
                payload=data,
                source_identity=source,
                idempotency_key=idempotency_key,
            )
        except EngineError as error:
            hint = _TOKEN_HINTS.get(error.code)
            if hint is not None:
                raise CliError(error.code, "the token was refused", hint) from error
            raise await _too_late(backend, execution_id, error) from error
        _print_outcome(target, found, name, outcome)

    on_execution(target, id_, answer)


def close_waitpoint(
    target: Target,
    id_: IdArgument,
    waitpoint: WaitpointArgument,
    *,
    reason: Annotated[
        str, typer.Option(metavar="TEXT", help="Stored with the waitpoint.")
    ] = "proactive_close",
    yes: YesOption = False,
) -> None:
    """Close a waitpoint, so that its token stops working.

    An execution that waits only for this waitpoint stays suspended until it times out or you
    cancel it.
    """
    confirm("Close the waitpoint? It cannot be answered afterwards.", yes=yes)

    async def close(backend: Backend, execution_id: ExecutionId) -> None:
        found = await find_waitpoint(backend, execution_id, waitpoint)
        closed = await backend.waitpoints.close_waitpoint(execution_id, found.waitpoint_id, reason)
        if target.as_json:
            print_json(_ids(found) | {"closed": closed})
        else:
            effect = "closed" if closed else "no change: it was closed before"
            Screen().line(f"{execution_id}  {found.waitpoint_key}: ", effect)

    on_execution(target, id_, close)


def _read_payload(text: str | None) -> bytes | None:
    """The JSON of `--payload`."""
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
            """quote it for the shell, such as --payload '{"ok": true}'; a string needs its own """
            """quotes: --payload '"text"'""",
        ) from error
    return raw


# --- the waitpoint --------------------------------------------------------------------------------


async def find_waitpoint(
    backend: Backend, execution_id: ExecutionId, text: str | None
) -> OpenWaitpoint:
    """The open waitpoint with this key, id or start of an id; for None, the only one."""
    found = await read_open_waitpoints(backend, execution_id)
    if not found:
        raise await _nothing_waiting(backend, execution_id)
    if text is not None:
        named = [one for one in found if text in (one.waitpoint_key, one.waitpoint_id)]
        # The second wait of a handler under one name has a number.
        named = named or [one for one in found if one.waitpoint_key.rpartition("#")[0] == text]
        if not named and len(text) >= _MIN_PREFIX:
            named = [one for one in found if one.waitpoint_id.startswith(text.lower())]
        if not named:
            past = await backend.waitpoints.read_waits(execution_id)
            over = any(w.ended and text in (w.waitpoint_key, w.waitpoint_id) for w in past)
            problem = "is already closed" if over else "is not an open waitpoint"
            code = "already_answered" if over else "waitpoint_not_found"
            raise _choose(code, f"{text!r} {problem}; open on {execution_id}", found)
        found = named
    if len(found) > 1:
        count = plural(len(found), "open waitpoint")
        raise _choose("ambiguous_waitpoint", f"{execution_id} has {count}", found)
    return found[0]


def _choose(code: str, problem: str, found: Sequence[OpenWaitpoint]) -> CliError:
    listed = "".join(
        f"\n  {one.waitpoint_id}  {one.waitpoint_key}  ({accepted_signals(one)})" for one in found
    )
    ids = (one.waitpoint_id for one in found)
    return CliError(code, f"{problem}:{listed}", "name one by its key or id", *ids)


async def _nothing_waiting(backend: Backend, execution_id: ExecutionId) -> CliError:
    """No waitpoint is open; if one was, the error says how its wait ended."""
    state = (await backend.reads.read_execution_state(execution_id)).value
    last = await backend.waitpoints.read_last_wait(execution_id)
    code, problem = "nothing_waiting", f"{execution_id} is {state} and waits for no answer"
    if last is not None and last.closed_at is not None:
        end = describe_end(last, await backend.meta.server_time_ms())
        code = "already_answered" if last.answers else "nothing_waiting"
        problem = f"{execution_id} is {state}; its wait {end}"
    return CliError(code, problem, "`flowfabric waiting` lists open waits", state)


async def _too_late(
    backend: Backend, execution_id: ExecutionId, error: EngineError
) -> FlowFabricError:
    """Say how the wait ended if that is why the call was refused."""
    return await _nothing_waiting(backend, execution_id) if error.code in _TOO_LATE else error


def _check_accepted(waitpoint: OpenWaitpoint, name: str, *, explicit: bool) -> None:
    """Refuse a default name that the wait does not accept; one given with --name is sent."""
    key, names = waitpoint.waitpoint_key, waitpoint.required_signal_names
    if names == (TIMEOUT_ONLY,):
        raise CliError(
            "not_asked",
            f"{key} only waits for its timeout and accepts no signal",
            "`flowfabric cancel` ends the execution",
        )
    if names and name not in names and not explicit:
        problem = f"{key} does not accept {name!r}, only {accepted_signals(waitpoint)}"
        raise CliError("not_asked", problem, "choose one with --name", *names)


def _accepts_no_signal() -> CliError:
    return CliError(
        "not_asked",
        "the execution waits for an operator to resume it and accepts no signal or payload",
        "omit the options to resume it, or end it with `flowfabric cancel`",
    )


# --- output ---------------------------------------------------------------------------------------


async def _resume(target: Target, backend: Backend, execution_id: ExecutionId) -> None:
    done = await backend.suspensions.resume_execution(execution_id, trigger_type="operator")
    if not target.as_json:
        Screen().line(f"{execution_id}  ", ("the execution resumes", "green"))
        return
    state = done.public_state.value
    plain = {"execution_id": execution_id, "outcome": "resumed", "public_state": state}
    print_json(plain | {"resumed": True})


def _ids(waitpoint: OpenWaitpoint) -> dict[str, object]:
    names = ("execution_id", "waitpoint_id", "waitpoint_key")
    return {name: getattr(waitpoint, name) for name in names}


def _print_outcome(
    target: Target, waitpoint: OpenWaitpoint, name: str, outcome: SignalOutcome
) -> None:
    accepted = isinstance(outcome, Accepted)
    if target.as_json:
        result = {
            "signal_name": name,
            "outcome": outcome.kind,
            "signal_id": outcome.signal_id if accepted else outcome.existing_signal_id,
            "effect": outcome.effect if accepted else None,
            "resumed": accepted and outcome.resumed,
        }
        print_json(_ids(waitpoint) | result)
        return
    effect: Cell = ("no change: the same signal was sent before", "yellow")
    if accepted:
        effect = _EFFECTS.get(outcome.effect, (outcome.effect, ""))
    Screen().line(f"{waitpoint.execution_id}  {waitpoint.waitpoint_key}  {name}: ", effect)
