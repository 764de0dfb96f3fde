"""`flowfabric ps`, `show`, `cancel`, `replay` and `revoke-lease`."""

import asyncio
import contextlib
from typing import Annotated

import msgspec
import typer

from flowfabric.cli import options, session
from flowfabric.cli.errors import CliError, report
from flowfabric.cli.options import Target, flag, value
from flowfabric.cli.views.detail import print_detail
from flowfabric.cli.views.listing import change_printer, live_table, print_listing
from flowfabric.cli.views.screen import Cell, Screen, print_json, print_result, state_cell
from flowfabric.core.contracts.leases import Revoked
from flowfabric.core.errors import EngineError, FlowFabricError, TransportError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import PublicState
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.reads import Filter
from flowfabric.engine.overview import list_newest, read_detail

_REFRESH_S = 1.0
_HINTS = {
    "execution_not_active": "it has finished, so there is nothing to cancel; `flowfabric replay` "
    "reruns it",
    "execution_not_terminal": "only a finished execution can be replayed; cancel it first, or wait",
}


def _parse_state(text: str) -> str:
    known = [state.value for state in PublicState if state is not PublicState.RESUMABLE]
    if text not in known:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(known)}")
    return text


def _check_tag(text: str) -> str:
    if text.find("=") < 1:
        raise typer.BadParameter(f"expected key=value, got {text!r}")
    return text


async def ps(
    target: Target,
    *,
    lane: options.Lane = None,
    state: Annotated[
        str | None,
        value("NAME", "Only this state, such as active, waiting or failed.", parser=_parse_state),
    ] = None,
    kind: Annotated[str | None, value("NAME", "Only this task.")] = None,
    tag: Annotated[
        list[str] | None,
        value("KEY=VALUE", "Only with this tag. Repeat it for several tags.", parser=_check_tag),
    ] = None,
    limit: options.Limit = 50,
    everything: Annotated[bool, flag("--all", "Show all executions.")] = False,
    watch: Annotated[bool, flag("--watch", "Keep running and show changes.")] = False,
) -> None:
    """List executions, newest first.

    With --json, prints one JSON object per line. With --watch and without a terminal, prints an
    execution again whenever it changes.
    """
    tags = dict(text.split("=", 1) for text in tag or ())
    where = Filter(namespace=target.namespace, lane=lane, kind=kind, state=state, tags=tags)
    most = None if everything else limit
    if watch:
        # Ctrl-C is the normal way to stop.
        with contextlib.suppress(asyncio.CancelledError):
            await _watch(target, where, most)
        return
    try:
        async with session.open_backend(target) as backend:
            listing = await list_newest(backend, where, most)
    except session.NoDataYet as nothing:
        if not target.as_json:
            Screen().line("No executions: ", nothing.message, ".")
            Screen().line(("hint: ", "cyan"), nothing.hint)
        return
    if target.as_json:
        print_json(*listing.rows)
    else:
        print_listing(listing, filtered=where != Filter())


async def _watch(target: Target, where: Filter, limit: int | None) -> None:
    screen = Screen()
    live = screen.terminal and not target.as_json
    changes = contextlib.nullcontext(change_printer(as_json=target.as_json))
    async with session.open_backend(target) as backend:
        with live_table(screen) if live else changes as show_listing:
            while True:
                show_listing(await list_newest(backend, where, limit))
                await asyncio.sleep(_REFRESH_S)


async def show(
    target: Target,
    id_: options.Id,
    *,
    full: Annotated[bool, flag("--full", "Print payload, result and policy in full.")] = False,
) -> None:
    """Show everything about one execution.

    Prints its state, attempts, history, tags, policy, payload and result. If it is not running,
    also prints why.
    """
    async with session.open_execution(target, id_) as (backend, execution_id):
        detail = await read_detail(backend, execution_id)
    print_detail(detail, full=full, as_json=target.as_json)


async def cancel(
    target: Target,
    ids: options.Ids,
    *,
    reason: Annotated[str, value("TEXT", "Stored with the execution.")] = "",
) -> None:
    """Cancel executions that have not finished.

    The worker cancels a running handler when it next renews the lease. If one execution has
    already finished, the command still cancels the others.
    """
    code = 0
    async with session.open_backend(target) as backend:
        for text in dict.fromkeys(ids):
            try:
                await _cancel(target, backend, text, reason)
            except TransportError:
                raise
            except FlowFabricError as error:
                code = max(code, report(error, as_json=target.as_json))
    raise typer.Exit(code)


async def _cancel(target: Target, backend: Backend, text: str, reason: str) -> None:
    execution_id = await session.find_execution(backend, text, target.namespace)
    try:
        done = await backend.executions.cancel_execution(execution_id, reason)
    except EngineError as error:
        raise await _with_state(backend, execution_id, error) from error
    _print_state(target, execution_id, done.public_state)


async def _with_state(
    backend: Backend, execution_id: ExecutionId, error: EngineError
) -> FlowFabricError:
    """Name the execution's state when that is why the call was refused."""
    hint = _HINTS.get(error.code)
    if hint is None:
        return error
    state = (await backend.reads.read_execution_state(execution_id)).value
    return CliError(error.code, f"{execution_id} is {state}", hint, *error.details)


async def replay(
    target: Target,
    id_: options.Id,
    *,
    reason: Annotated[str, value("TEXT", "Stored with the new attempt.")] = "",
    expected_replay_count: Annotated[
        int | None,
        value("N", "Replay only if it was replayed N times so far. Makes repeats safe.", min=0),
    ] = None,
    keep_steps: Annotated[bool, flag("--keep-steps", "Keep the results of its steps.")] = False,
    by: options.By = None,
) -> None:
    """Rerun a finished execution under the same id."""
    async with session.open_execution(target, id_) as (backend, execution_id):
        try:
            done = await backend.executions.replay_execution(
                execution_id,
                reason=reason,
                requested_by=session.user_name() if by is None else by,
                expected_replay_count=expected_replay_count,
                keep_steps=keep_steps,
            )
        except EngineError as error:
            if error.code != "replay_not_allowed":
                raise await _with_state(backend, execution_id, error) from error
            raise CliError(
                error.code,
                f"{execution_id} was replayed {error.detail} times, not {expected_replay_count}; "
                "nothing changed",
                f"to replay it once more, pass --expected-replay-count {error.detail}",
                *error.details,
            ) from error
    _print_state(target, execution_id, done.public_state)


async def revoke_lease(
    target: Target,
    id_: options.Id,
    *,
    lease: Annotated[str, value("ID", "Revoke only this lease. `show --json` prints its id.")] = "",
    reason: Annotated[str, value("TEXT", "Stored with the execution.")] = "operator",
    by: options.By = None,
    yes: options.Yes = False,
) -> None:
    """Take an execution from the worker that runs it.

    The next free worker continues the attempt. The old worker cancels the handler when it next
    renews the lease; until then, both may run.
    """
    options.confirm("Take the execution from its worker?", yes=yes)
    revoked_by = session.user_name() or "operator" if by is None else by
    async with session.open_execution(target, id_) as (backend, execution_id):
        outcome = await backend.leases.revoke_lease(
            execution_id, expected_lease_id=lease, reason=reason, revoked_by=revoked_by
        )
    if isinstance(outcome, Revoked):
        effect: Cell = (f"lease {outcome.lease_id} revoked", "yellow")
    else:
        effect = f"no change: {outcome.reason.replace('_', ' ')}"
    fields: dict[str, object] = {"execution_id": execution_id, "outcome": outcome.kind}
    fields |= msgspec.structs.asdict(outcome)
    print_result(fields, f"{execution_id}  ", effect, as_json=target.as_json)


def _print_state(target: Target, execution_id: ExecutionId, state: PublicState) -> None:
    fields = {"execution_id": execution_id, "public_state": state.value}
    print_result(fields, f"{execution_id}  ", state_cell(state.value), as_json=target.as_json)
