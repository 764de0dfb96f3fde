"""`flowfabric ps`, `show`, `cancel`, `replay` and `revoke-lease`."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated

import msgspec
import typer

from flowfabric.cli.errors import CliError, report
from flowfabric.cli.options import (
    ID_HELP,
    ByOption,
    IdArgument,
    LaneOption,
    LimitOption,
    Target,
    YesOption,
    confirm,
    parse_lane,
    parse_tags,
)
from flowfabric.cli.session import (
    NoDataYet,
    find_execution,
    on_execution,
    open_backend,
    user_name,
)
from flowfabric.cli.views.detail import print_detail
from flowfabric.cli.views.listing import ChangePrinter, LiveTable, print_listing, print_no_data
from flowfabric.cli.views.screen import Screen, print_json, state_style
from flowfabric.core.contracts.executions import Replayed
from flowfabric.core.contracts.leases import Revoked, RevokeOutcome
from flowfabric.core.errors import EngineError, FlowFabricError, TransportError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import PublicState
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.listings import Filter
from flowfabric.engine.overview import list_newest, read_detail

_REFRESH_S = 1.0
_HINTS = {
    "execution_not_active": "it has finished, so there is nothing to cancel; `flowfabric replay` "
    "reruns it",
    "execution_not_terminal": "only a finished execution can be replayed; cancel it first, or wait",
}


def ps(
    target: Target,
    *,
    lane: LaneOption = None,
    state: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only this state, such as active, waiting or failed."),
    ] = None,
    kind: Annotated[str | None, typer.Option(metavar="NAME", help="Only this task.")] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option("--tag", metavar="KEY=VALUE", help="Only with this tag. Repeat for more."),
    ] = None,
    limit: LimitOption = 50,
    everything: Annotated[bool, typer.Option("--all", help="Show all executions.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing changes.")] = False,
) -> None:
    """List executions, newest first.

    With --json, prints one JSON object per line. With --watch and without a terminal, prints an
    execution again whenever it changes.
    """
    where = Filter(
        namespace=target.namespace,
        lane=parse_lane(lane),
        kind=kind,
        state=None if state is None else _parse_state(state),
        tags=parse_tags(tag),
    )
    most = None if everything else limit
    if watch:
        # Ctrl-C is the normal way to stop.
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_watch(target, where, most))
        return
    try:
        asyncio.run(_list(target, where, most))
    except NoDataYet as nothing:
        if not target.as_json:
            print_no_data(nothing)


def _parse_state(text: str) -> str:
    known = [state.value for state in PublicState if state is not PublicState.RESUMABLE]
    if text not in known:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(known)}", param_hint="--state")
    return text


async def _list(target: Target, where: Filter, limit: int | None) -> None:
    async with open_backend(target.url) as backend:
        listing = await list_newest(backend, where, limit)
    if not target.as_json:
        print_listing(listing, filtered=where != Filter())
        return
    for row in listing.rows:
        print_json(row)


async def _watch(target: Target, where: Filter, limit: int | None) -> None:
    screen = Screen()
    async with open_backend(target.url) as backend:
        live = screen.terminal and not target.as_json
        with LiveTable(screen) if live else ChangePrinter(as_json=target.as_json) as view:
            while True:
                view.update(await list_newest(backend, where, limit))
                await asyncio.sleep(_REFRESH_S)


def show(
    target: Target,
    id_: IdArgument,
    *,
    full: Annotated[
        bool, typer.Option("--full", help="Print payload, result and policy in full.")
    ] = False,
) -> None:
    """Show everything about one execution.

    State, attempts, history, tags, policy, payload and result. If it is not running, also why.
    """
    print_detail(on_execution(target, id_, read_detail), full=full, as_json=target.as_json)


def cancel(
    target: Target,
    ids: Annotated[list[str], typer.Argument(metavar="ID", help=ID_HELP, show_default=False)],
    *,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Stored with the execution.")] = "",
) -> None:
    """Cancel executions that have not finished.

    A running handler is cancelled when its worker next renews the lease. If one execution has
    already finished, the others are still cancelled.
    """
    raise typer.Exit(asyncio.run(_cancel_all(target, ids, reason)))


async def _cancel_all(target: Target, ids: list[str], reason: str) -> int:
    code = 0
    async with open_backend(target.url) as backend:
        for text in dict.fromkeys(ids):
            try:
                execution_id = await find_execution(backend, text, target.namespace)
                try:
                    done = await backend.executions.cancel_execution(execution_id, reason)
                except EngineError as error:
                    raise await _with_state(backend, execution_id, error) from error
            except TransportError:
                raise
            except FlowFabricError as error:
                code = max(code, report(error, as_json=target.as_json))
            else:
                _print_state(target, execution_id, done.public_state)
    return code


async def _with_state(
    backend: Backend, execution_id: ExecutionId, error: EngineError
) -> FlowFabricError:
    """Name the execution's state when that is why the call was refused."""
    hint = _HINTS.get(error.code)
    if hint is None:
        return error
    state = (await backend.reads.read_execution_state(execution_id)).value
    return CliError(error.code, f"{execution_id} is {state}", hint, *error.details)


def replay(
    target: Target,
    id_: IdArgument,
    *,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Stored with the new attempt.")] = "",
    expected_replay_count: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="Only if it was replayed N times so far. Makes repeats safe."
        ),
    ] = None,
    keep_steps: Annotated[
        bool, typer.Option("--keep-steps", help="Keep the results of its steps.")
    ] = False,
    by: ByOption = None,
) -> None:
    """Rerun a finished execution under the same id."""

    async def rerun(backend: Backend, execution_id: ExecutionId) -> tuple[ExecutionId, Replayed]:
        try:
            return execution_id, await backend.executions.replay_execution(
                execution_id,
                reason=reason,
                requested_by=user_name() if by is None else by,
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

    execution_id, done = on_execution(target, id_, rerun)
    _print_state(target, execution_id, done.public_state)


def revoke_lease(
    target: Target,
    id_: IdArgument,
    *,
    lease: Annotated[
        str, typer.Option(metavar="ID", help="Only if this lease is held. See `show --json`.")
    ] = "",
    reason: Annotated[
        str, typer.Option(metavar="TEXT", help="Stored with the execution.")
    ] = "operator",
    by: ByOption = None,
    yes: YesOption = False,
) -> None:
    """Take an execution from the worker that runs it.

    The next free worker continues the attempt. The old worker cancels the handler when it next
    renews the lease; until then, both may run.
    """
    confirm("Take the execution from its worker?", yes=yes)

    async def revoke(
        backend: Backend, execution_id: ExecutionId
    ) -> tuple[ExecutionId, RevokeOutcome]:
        revoked_by = user_name() or "operator" if by is None else by
        return execution_id, await backend.leases.revoke_lease(
            execution_id, expected_lease_id=lease, reason=reason, revoked_by=revoked_by
        )

    execution_id, outcome = on_execution(target, id_, revoke)
    if target.as_json:
        fields: dict[str, object] = msgspec.structs.asdict(outcome)
        print_json({"execution_id": execution_id, "outcome": outcome.kind} | fields)
    elif isinstance(outcome, Revoked):
        Screen().line(f"{execution_id}  ", (f"lease {outcome.lease_id} revoked", "yellow"))
    else:
        Screen().line(f"{execution_id}  no change: ", outcome.reason.replace("_", " "))


def _print_state(target: Target, execution_id: ExecutionId, state: PublicState) -> None:
    if target.as_json:
        print_json({"execution_id": execution_id, "public_state": state.value})
    else:
        Screen().line(f"{execution_id}  ", (state.value, state_style(state.value)))
