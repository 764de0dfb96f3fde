"""`flowfabric waiting`, `approve`, `signal` and `close-waitpoint`."""

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated

import typer

from flowfabric.cli import options, session
from flowfabric.cli.errors import CliError, UsageError
from flowfabric.cli.options import Target, argument, flag, value
from flowfabric.cli.views import waits as view
from flowfabric.cli.views.screen import Cell, print_json, print_result
from flowfabric.core.contracts.suspension import Accepted, OpenWaitpoint, SignalOutcome
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.text import plural
from flowfabric.engine import overview
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.overview import Wait, list_waits, read_wait
from flowfabric.sdk.diagnosis import OPERATOR_ONLY, TIMEOUT_ONLY

_MIN_PREFIX = 4
_TOO_LATE = frozenset({"waitpoint_closed", "target_not_signalable", "execution_not_suspended"})
_EFFECTS = {
    "resume_condition_satisfied": ("the execution resumes", "green"),
    "appended_to_waitpoint": ("counted; more signals are needed", "cyan"),
    "appended_to_waitpoint_duplicate": ("not counted: this sender was already counted", "yellow"),
    "signal_ignored_not_in_condition": ("stored, but this wait does not need it", "yellow"),
    "signal_ignored_matcher_failed": ("stored, but this wait does not accept it", "yellow"),
    "no_op": ("stored, but this wait does not accept it", "yellow"),
    "buffered_for_pending_waitpoint": ("stored until the handler waits for it", "cyan"),
}
_NOT_ACCEPTED = frozenset({"signal_ignored_matcher_failed", "no_op"})
_NO_SIGNAL = (
    "the execution waits for an operator to resume it and accepts no signal or payload",
    "omit the options to resume it, or end it with `flowfabric cancel`",
)
_TOKEN_HINTS = {
    "invalid_token": "pass the token of this waitpoint exactly as it was issued; `flowfabric "
    "waiting` shows its signing key and fingerprint",
    "token_expired": "its signing key was retired; get a new token from the application, or answer "
    "as an operator: `flowfabric approve`",
}

_Waitpoint = Annotated[str, argument("WAITPOINT", "The waitpoint's key or id.")]


async def waiting(
    target: Target,
    id_: options.OptionalId = None,
    *,
    lane: options.Lane = None,
    limit: options.Limit = 50,
) -> None:
    """List executions that wait for an answer.

    Shows what each execution waits for, since when and until when, soonest timeout first. Never
    shows a token, only its signing key and fingerprint. With --json, prints one JSON object per
    line.
    """
    if id_ is not None:
        async with session.open_execution(target, id_) as (backend, execution_id):
            wait, last = await read_wait(backend, execution_id)
            now = await backend.meta.server_time_ms()
        if target.as_json:
            print_json(wait)
        else:
            view.print_wait(wait, last, now)
        return
    waits, left_out, now = list[Wait](), 0, 0
    # Without data, nothing waits.
    with contextlib.suppress(session.NoDataYet):
        async with session.open_backend(target) as backend:
            now = await backend.meta.server_time_ms()
            waits, left_out = await list_waits(
                backend, lane=lane, namespace=target.namespace, limit=limit
            )
    if target.as_json:
        print_json(*waits)
    else:
        view.print_waits(waits, left_out, now)


async def approve(
    target: Target,
    id_: options.Id,
    waitpoint: Annotated[
        str | None,
        argument("WAITPOINT", "The waitpoint's key or id. Optional if only one is open."),
    ] = None,
    *,
    by: options.By = None,
    reject: Annotated[bool, flag("--reject", "Send `rejected` instead of `approved`.")] = False,
    name: Annotated[str | None, value("SIGNAL", "Send this signal instead.")] = None,
    payload: options.Payload = None,
) -> None:
    """Answer a wait as an operator, without a token.

    Your access to the server authorises you. Each person can send each signal once; a repeat
    changes nothing.
    """
    if reject and name is not None:
        raise typer.BadParameter("pass either --reject or --name, not both", param_hint="--reject")
    decision = name or ("rejected" if reject else "approved")
    async with _open_waitpoint(target, id_, waitpoint) as (backend, found):
        if found.required_signal_names == (OPERATOR_ONLY,):
            if decision != "approved" or payload is not None:
                raise CliError("not_asked", *_NO_SIGNAL)
            execution_id = found.execution_id
            done = await backend.suspensions.resume_execution(execution_id)
            fields = {
                "execution_id": execution_id,
                "outcome": "resumed",
                "public_state": done.public_state.value,
                "resumed": True,
            }
            effect = _EFFECTS["resume_condition_satisfied"]
            print_result(fields, f"{execution_id.compact}  ", effect, as_json=target.as_json)
            return
        _check_accepted(found, decision, explicit=name is not None)
        outcome = await backend.signals.deliver_approval_signal(
            found.execution_id,
            found.waitpoint_id,
            decision,
            decided_by=session.user_name() if by is None else by,
            payload=payload,
        )
    _print_outcome(target, found, decision, outcome)


async def signal(
    target: Target,
    id_: options.Id,
    waitpoint: _Waitpoint,
    name: Annotated[str, argument("NAME", "The signal's name.")],
    *,
    token: Annotated[
        str,
        value(
            "TOKEN",
            "The waitpoint's token. Prefer the variable: other users may see command lines.",
            envvar="FF_WAITPOINT_TOKEN",
            show_default=False,
        ),
    ] = "",
    payload: options.Payload = None,
    source: Annotated[str, value("IDENTITY", "The sender, stored with the signal.")] = "",
    idempotency_key: Annotated[
        str, value("KEY", "Sending twice with the same key counts once.")
    ] = "",
) -> None:
    """Answer a wait with the token of its waitpoint.

    For services and people without operator access. Operators use `flowfabric approve`.
    """
    if not token:
        hint = "set FF_WAITPOINT_TOKEN to it; operators need no token: `flowfabric approve`"
        raise UsageError("missing_token", "a signal needs the waitpoint's token", hint)
    async with _open_waitpoint(target, id_, waitpoint) as (backend, found):
        outcome = await backend.signals.deliver_signal(
            found.execution_id,
            found.waitpoint_id,
            token,
            name,
            payload=payload,
            source_identity=source,
            idempotency_key=idempotency_key,
        )
    _print_outcome(target, found, name, outcome)


async def close_waitpoint(
    target: Target,
    id_: options.Id,
    waitpoint: _Waitpoint,
    *,
    reason: Annotated[
        str, value("TEXT", "The reason to store with the waitpoint.")
    ] = "proactive_close",
    yes: options.Yes = False,
) -> None:
    """Close a waitpoint, so that its token stops working.

    An execution that waits only for this waitpoint stays suspended until it times out or you
    cancel it.
    """
    options.confirm("Close the waitpoint? It cannot be answered afterwards.", yes=yes)
    async with _open_waitpoint(target, id_, waitpoint) as (backend, found):
        closed = await backend.waitpoints.close_waitpoint(
            found.execution_id, found.waitpoint_id, reason
        )
    effect = "closed" if closed else "no change: it was already closed"
    _print_effect(target, found, {"closed": closed}, ": ", effect)


@contextlib.asynccontextmanager
async def _open_waitpoint(
    target: Target, id_: str, text: str | None
) -> AsyncGenerator[tuple[Backend, OpenWaitpoint]]:
    """A backend and the open waitpoint. Explains why a call was refused."""
    async with session.open_execution(target, id_) as (backend, execution_id):
        found = await _find_waitpoint(backend, execution_id, text)
        try:
            yield backend, found
        except EngineError as error:
            if error.code in _TOKEN_HINTS:
                hint = _TOKEN_HINTS[error.code]
                raise CliError(error.code, "the token was refused", hint) from error
            if error.code in _TOO_LATE:
                raise await _nothing_waiting(backend, execution_id) from error
            raise


async def _find_waitpoint(
    backend: Backend, execution_id: ExecutionId, text: str | None
) -> OpenWaitpoint:
    """The open waitpoint with this key, id or start of an id; for None, the only one."""
    found = await overview.read_open_waitpoints(backend, execution_id)
    if not found:
        raise await _nothing_waiting(backend, execution_id)
    if text is not None:
        chosen = overview.named(found, text)
        if not chosen and len(text) >= _MIN_PREFIX:
            chosen = [one for one in found if one.waitpoint_id.startswith(text.lower())]
        if not chosen:
            past = await backend.waitpoints.read_waits(execution_id)
            over = any(w.ended and text in (w.waitpoint_key, w.waitpoint_id) for w in past)
            problem = "is already closed" if over else "is not an open waitpoint"
            code = "already_answered" if over else "waitpoint_not_found"
            raise _choose(code, f"{text!r} {problem}; open on {execution_id}", found)
        found = chosen
    if len(found) > 1:
        count = plural(len(found), "open waitpoint")
        raise _choose("ambiguous_waitpoint", f"{execution_id} has {count}", found)
    return found[0]


def _choose(code: str, problem: str, found: Sequence[OpenWaitpoint]) -> CliError:
    listed = "".join(
        f"\n  {one.waitpoint_id}  {one.waitpoint_key}  ({view.accepted_signals(one)})"
        for one in found
    )
    ids = (one.waitpoint_id for one in found)
    return CliError(code, f"{problem}:{listed}", "name one by its key or id", *ids)


async def _nothing_waiting(backend: Backend, execution_id: ExecutionId) -> CliError:
    """The error if no waitpoint is open; if one was, it says how the wait ended."""
    state = (await backend.reads.read_execution_state(execution_id)).value
    last = await backend.waitpoints.read_last_wait(execution_id)
    code, problem = "nothing_waiting", f"{execution_id} is {state} and waits for no answer"
    if last is not None and last.closed_at is not None:
        end = view.describe_end(last, await backend.meta.server_time_ms())
        code = "already_answered" if last.answers else "nothing_waiting"
        problem = f"{execution_id} is {state}; its wait {end}"
    return CliError(code, problem, "`flowfabric waiting` lists open waits", state)


def _check_accepted(waitpoint: OpenWaitpoint, name: str, *, explicit: bool) -> None:
    """Reject a default name that the wait does not accept; one from --name is sent anyway."""
    key, names = waitpoint.waitpoint_key, waitpoint.required_signal_names
    if names == (TIMEOUT_ONLY,):
        problem = f"{key} only waits for its timeout and accepts no signal"
        raise CliError("not_asked", problem, "`flowfabric cancel` ends the execution")
    if names and name not in names and not explicit:
        problem = f"{key} does not accept {name!r}, only {view.accepted_signals(waitpoint)}"
        raise CliError("not_asked", problem, "choose one with --name", *names)


def _print_outcome(
    target: Target, waitpoint: OpenWaitpoint, name: str, outcome: SignalOutcome
) -> None:
    stored = isinstance(outcome, Accepted)
    fields = {
        "signal_name": name,
        "outcome": outcome.kind,
        "signal_id": outcome.signal_id if stored else outcome.existing_signal_id,
        "effect": outcome.effect if stored else None,
        "resumed": stored and outcome.resumed,
    }
    effect: Cell = ("no change: the same signal was sent before", "yellow")
    if stored:
        effect = _EFFECTS.get(outcome.effect, (outcome.effect, ""))
        if outcome.effect in _NOT_ACCEPTED and waitpoint.required_signal_names:
            accepted = view.accepted_signals(waitpoint)
            effect = f"stored, but this wait only accepts {accepted}", "yellow"
    _print_effect(target, waitpoint, fields, f"  {name}: ", effect)


def _print_effect(
    target: Target, waitpoint: OpenWaitpoint, fields: Mapping[str, object], *effect: Cell
) -> None:
    names = ("execution_id", "waitpoint_id", "waitpoint_key")
    plain = {name: getattr(waitpoint, name) for name in names}
    where = f"{waitpoint.execution_id.compact}  {waitpoint.waitpoint_key}"
    print_result(plain | dict(fields), where, *effect, as_json=target.as_json)
