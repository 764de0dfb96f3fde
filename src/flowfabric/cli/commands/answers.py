"""`flowfabric approve`, `signal` and `close-waitpoint`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from flowfabric.cli.errors import CliError, UsageError
from flowfabric.cli.options import (
    ByOption,
    IdArgument,
    JsonOption,
    NamespaceOption,
    PayloadOption,
    Target,
    UrlOption,
    YesOption,
    confirm,
)
from flowfabric.cli.session import find_execution, open_backend, user_name
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
    context: typer.Context,
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
    namespace: NamespaceOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer a wait as an operator, without a token.

    Your access to the server authorises you. Each person can send each signal once; a repeat
    changes nothing.
    """
    if reject and name is not None:
        raise typer.BadParameter("give either --reject or --name", param_hint="--reject")
    target = Target.of(context, url, namespace)
    decision = name or ("rejected" if reject else "approved")
    data = _read_payload(payload)

    async def run() -> None:
        async with open_backend(target.url) as backend:
            execution_id = await find_execution(backend, id_, target.namespace)
            found = await find_waitpoint(backend, execution_id, waitpoint)
            try:
                if found.required_signal_names == (OPERATOR_ONLY,):
                    if decision != "approved" or data is not None:
                        raise _accepts_no_signal()
                    await _resume(backend, execution_id, as_json=as_json)
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
        _print_outcome(execution_id, found, decision, outcome, as_json=as_json)

    asyncio.run(run())


def signal(
    context: typer.Context,
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
    namespace: NamespaceOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer a wait with the token of its waitpoint.

    For services and people without operator access. Operators use `flowfabric approve`.
    """
    if not token:
        raise UsageError("missing_token", "a signal needs the waitpoint's token", _HOW_TO_ANSWER)
    target = Target.of(context, url, namespace)
    data = _read_payload(payload)

    async def run() -> None:
        async with open_backend(target.url) as backend:
            execution_id = await find_execution(backend, id_, target.namespace)
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
        _print_outcome(execution_id, found, name, outcome, as_json=as_json)

    asyncio.run(run())


def close_waitpoint(
    context: typer.Context,
    id_: IdArgument,
    waitpoint: WaitpointArgument,
    *,
    reason: Annotated[
        str, typer.Option(metavar="TEXT", help="Stored with the waitpoint.")
    ] = "proactive_close",
    yes: YesOption = False,
    namespace: NamespaceOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Close a waitpoint, so that its token stops working.

    An execution that waits only for this waitpoint stays suspended until it times out or you
    cancel it.
    """
    target = Target.of(context, url, namespace)
    confirm("Close the waitpoint? It cannot be answered afterwards.", yes=yes)

    async def run() -> None:
        async with open_backend(target.url) as backend:
            execution_id = await find_execution(backend, id_, target.namespace)
            found = await find_waitpoint(backend, execution_id, waitpoint)
            closed = await backend.waitpoints.close_waitpoint(
                execution_id, found.waitpoint_id, reason
            )
        if as_json:
            plain = {"execution_id": execution_id, "waitpoint_id": found.waitpoint_id}
            print_json(plain | {"waitpoint_key": found.waitpoint_key, "closed": closed})
        else:
            effect = "closed" if closed else "no change: it was closed before"
            Screen().line(f"{execution_id}  {found.waitpoint_key}: ", effect)

    asyncio.run(run())


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


# --- the waitpoint ----------------------------------------------------------------------------


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
            raise await _not_open(backend, execution_id, text, found)
        found = named
    if len(found) > 1:
        raise CliError(
            "ambiguous_waitpoint",
            f"{execution_id} has {plural(len(found), 'open waitpoint')}:{_listed(found)}",
            "name one by its key or id",
            *(one.waitpoint_id for one in found),
        )
    return found[0]


def _listed(waitpoints: Sequence[OpenWaitpoint]) -> str:
    return "".join(
        f"\n  {one.waitpoint_id}  {one.waitpoint_key}  ({accepted_signals(one)})"
        for one in waitpoints
    )


async def _nothing_waiting(backend: Backend, execution_id: ExecutionId) -> CliError:
    """No waitpoint is open; if one was, the error says how its wait ended."""
    state = (await backend.reads.read_execution_state(execution_id)).value
    last = await backend.waitpoints.read_last_wait(execution_id)
    if last is None or last.closed_at is None:
        return CliError(
            "nothing_waiting",
            f"{execution_id} is {state} and waits for no answer",
            "`flowfabric waiting` lists open waits",
            state,
        )
    end = describe_end(last, await backend.meta.server_time_ms())
    return CliError(
        "already_answered" if last.answers else "nothing_waiting",
        f"{execution_id} is {state}; its wait {end}",
        "`flowfabric waiting` lists open waits",
        state,
    )


async def _not_open(
    backend: Backend, execution_id: ExecutionId, text: str, found: Sequence[OpenWaitpoint]
) -> CliError:
    past = await backend.waitpoints.read_waits(execution_id)
    over = any(wait.ended and text in (wait.waitpoint_key, wait.waitpoint_id) for wait in past)
    problem = "is already closed" if over else "is not an open waitpoint"
    return CliError(
        "already_answered" if over else "waitpoint_not_found",
        f"{text!r} {problem}; open on {execution_id}:{_listed(found)}",
        "name one by its key or id",
        *(one.waitpoint_id for one in found),
    )


async def _too_late(
    backend: Backend, execution_id: ExecutionId, error: EngineError
) -> FlowFabricError:
    """Say how the wait ended if that is why the call was refused."""
    return await _nothing_waiting(backend, execution_id) if error.code in _TOO_LATE else error


def _check_accepted(waitpoint: OpenWaitpoint, name: str, *, explicit: bool) -> None:
    """Refuse a default name that the wait does not accept; one given with --name is sent."""
    names = waitpoint.required_signal_names
    if names == (TIMEOUT_ONLY,):
        raise CliError(
            "not_asked",
            f"{waitpoint.waitpoint_key} only waits for its timeout and accepts no signal",
            "`flowfabric cancel` ends the execution",
        )
    if names and name not in names and not explicit:
        raise CliError(
            "not_asked",
            f"{waitpoint.waitpoint_key} does not accept {name!r}, only "
            f"{accepted_signals(waitpoint)}",
            "choose one with --name",
            *names,
        )


def _accepts_no_signal() -> CliError:
    return CliError(
        "not_asked",
        "the execution waits for an operator to resume it and accepts no signal or payload",
        "omit the options to resume it, or end it with `flowfabric cancel`",
    )


# --- output -----------------------------------------------------------------------------------


async def _resume(backend: Backend, execution_id: ExecutionId, *, as_json: bool) -> None:
    done = await backend.suspensions.resume_execution(execution_id, trigger_type="operator")
    if not as_json:
        Screen().line(f"{execution_id}  ", ("the execution resumes", "green"))
        return
    print_json(
        {
            "execution_id": execution_id,
            "outcome": "resumed",
            "public_state": done.public_state.value,
            "resumed": True,
        }
    )


def _print_outcome(
    execution_id: ExecutionId,
    waitpoint: OpenWaitpoint,
    name: str,
    outcome: SignalOutcome,
    *,
    as_json: bool,
) -> None:
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
    effect: Cell = ("no change: the same signal was sent before", "yellow")
    if accepted:
        effect = _EFFECTS.get(outcome.effect, (outcome.effect, ""))
    head = f"{execution_id}  {waitpoint.waitpoint_key}  {name}: "
    Screen().line(head, effect)
