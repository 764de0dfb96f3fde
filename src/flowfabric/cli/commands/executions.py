"""`flowfabric ps`, `show`, `cancel`, `replay`, `purge` and `revoke-lease`."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

import msgspec
import typer

from flowfabric.cli import options, session
from flowfabric.cli.bulk import Change, change_many
from flowfabric.cli.errors import CliError, report
from flowfabric.cli.options import Target, flag, value
from flowfabric.cli.selection import Selection
from flowfabric.cli.views.detail import print_detail, print_explanation
from flowfabric.cli.views.listing import change_printer, live_table, print_listing
from flowfabric.cli.views.screen import Cell, Screen, print_json, print_result, state_cell
from flowfabric.core.contracts.leases import Revoked
from flowfabric.core.contracts.steps import StepPage, StepRecord
from flowfabric.core.errors import EngineError, FlowFabricError, TransportError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import PublicState
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.overview import ExecutionListing, list_newest, read_detail
from flowfabric.sdk import diagnosis

_REFRESH_S = 1.0
_STEPS = 50
_HINTS = {
    "execution_not_active": "it has finished, so there is nothing to cancel; `flowfabric replay` "
    "reruns it",
    "execution_not_terminal": "only a finished execution can be replayed; cancel it first, or wait",
}


async def ps(
    target: Target,
    *,
    where: Selection,
    limit: options.Limit = 50,
    everything: Annotated[bool, flag("--all", "Show all executions.")] = False,
    watch: Annotated[bool, flag("--watch", "Keep running and show changes.")] = False,
) -> None:
    """List executions, newest first.

    With --json, prints one JSON object per line. With --watch and without a terminal, prints an
    execution again whenever it changes.
    """
    most = None if everything else limit
    if watch:
        # Ctrl-C is the normal way to stop.
        with contextlib.suppress(asyncio.CancelledError):
            await _watch(target, where, most)
        return
    try:
        async with session.open_backend(target) as backend:
            listing = await _list(target, backend, where, most)
    except session.NoDataYet as nothing:
        if not target.as_json:
            Screen().line("No executions: ", nothing.message, ".")
            Screen().line(("hint: ", "cyan"), nothing.hint)
        return
    if target.as_json:
        print_json(*listing.rows)
    else:
        print_listing(listing, filtered=not where.is_empty or target.namespace is not None)


async def _list(
    target: Target, backend: Backend, where: Selection, limit: int | None
) -> ExecutionListing:
    return await list_newest(backend, await where.where(backend, target.namespace), limit)


async def _watch(target: Target, where: Selection, limit: int | None) -> None:
    screen = Screen()
    live = screen.terminal and not target.as_json
    changes = contextlib.nullcontext(change_printer(as_json=target.as_json))
    async with session.open_backend(target) as backend:
        with live_table(screen) if live else changes as show_listing:
            while True:
                show_listing(await _list(target, backend, where, limit))
                await asyncio.sleep(_REFRESH_S)


async def show(
    target: Target,
    id_: options.Id,
    *,
    full: Annotated[
        bool, flag("--full", "Print payload, result, policy and steps in full.")
    ] = False,
) -> None:
    """Show everything about one execution.

    Prints its state, recorded steps, attempts, history, tags, policy, payload and result. If it is
    not running, also prints why.
    """
    async with session.open_execution(target, id_) as (backend, execution_id):
        detail = await read_detail(backend, execution_id)
        steps = await _read_steps(backend, execution_id, full=full)
    print_detail(detail, steps, full=full, as_json=target.as_json)


async def _read_steps(backend: Backend, execution_id: ExecutionId, *, full: bool) -> StepPage:
    """The first recorded steps; all of them if `full`."""
    if not full:
        return await backend.steps.read_steps(execution_id, limit=_STEPS)
    found: list[StepRecord] = []
    after: int | None = 0
    while after is not None:
        page = await backend.steps.read_steps(execution_id, after)
        found += page.steps
        after = page.next_after_seq
    return StepPage(tuple(found))


async def explain(target: Target, id_: options.Id) -> None:
    """Explain why an execution is not running.

    Names what it waits for: a worker with the right capabilities or namespace, a paused lane, a
    budget or quota and when it allows more, other executions of its flow, an answer, or a time.
    """
    async with session.open_execution(target, id_) as (backend, execution_id):
        found = diagnosis.explain(await read_detail(backend, execution_id))
    print_explanation(found, as_json=target.as_json)


async def cancel(
    target: Target,
    ids: options.OptionalIds = None,
    *,
    where: Selection,
    reason: Annotated[str, value("TEXT", "The reason to store with the execution.")] = "",
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
) -> None:
    """Cancel executions that have not finished.

    Pass ids, or options that select executions. With options, the command counts the executions
    that match all of them, and asks before it cancels them. The worker cancels a running handler
    when it next renews the lease. If an execution cannot be cancelled, the others still are.
    """
    change = Change(
        *("cancel", "cancelled"),
        finished=False,
        apply=lambda backend, info: backend.executions.cancel_execution(info.execution_id, reason),
    )
    if dry_run or not ids or not where.is_empty:
        await change_many(target, ids or (), where, change, dry_run=dry_run, yes=yes)
        return

    async def run(backend: Backend, execution_id: ExecutionId) -> PublicState:
        try:
            return (await backend.executions.cancel_execution(execution_id, reason)).public_state
        except EngineError as error:
            raise await _with_state(backend, execution_id, error) from error

    await _change_each(target, ids, run)


async def _change_each(
    target: Target,
    ids: Sequence[str],
    run: Callable[[Backend, ExecutionId], Awaitable[PublicState]],
) -> None:
    """Change the named executions one by one; a refusal does not stop the others."""
    code = 0
    async with session.open_backend(target) as backend:
        for text in dict.fromkeys(ids):
            try:
                execution_id = await session.find_execution(backend, text, target.namespace)
                _print_state(target, execution_id, await run(backend, execution_id))
            except TransportError:
                raise
            except FlowFabricError as error:
                code = max(code, report(error, as_json=target.as_json))
    raise typer.Exit(code)


async def _with_state(
    backend: Backend, execution_id: ExecutionId, error: EngineError
) -> FlowFabricError:
    """Add the execution's state to the error if that is why the call was refused."""
    hint = _HINTS.get(error.code)
    if hint is None:
        return error
    state = (await backend.reads.read_execution_state(execution_id)).value
    return CliError(error.code, f"{execution_id} is {state}", hint, *error.details)


async def replay(
    target: Target,
    ids: options.OptionalIds = None,
    *,
    where: Selection,
    reason: Annotated[str, value("TEXT", "The reason to store with the new attempt.")] = "",
    expected_replay_count: Annotated[
        int | None,
        value("N", "Replay only if it has been replayed N times, so a repeat is safe.", min=0),
    ] = None,
    keep_steps: Annotated[bool, flag("--keep-steps", "Keep the stored results of steps.")] = False,
    by: options.By = None,
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
) -> None:
    """Rerun finished executions under the same ids.

    Pass ids, or options that select executions. With options, the command counts the executions
    that match all of them, and asks before it reruns them. If an execution cannot be rerun, the
    others still are.
    """
    requested_by = session.user_name() if by is None else by

    async def replay_one(
        backend: Backend, execution_id: ExecutionId, expected: int | None
    ) -> PublicState:
        done = await backend.executions.replay_execution(
            execution_id,
            reason=reason,
            requested_by=requested_by,
            expected_replay_count=expected,
            keep_steps=keep_steps,
        )
        return done.public_state

    if expected_replay_count is not None and (dry_run or not where.is_empty or len(ids or ()) != 1):
        raise typer.BadParameter("needs one ID", param_hint="--expected-replay-count")
    change = Change(
        *("replay", "replayed"),
        finished=True,
        # The expected count ensures that no other replay happened since the execution was read.
        apply=lambda backend, info: replay_one(backend, info.execution_id, info.replay_count),
    )
    if dry_run or not ids or not where.is_empty:
        await change_many(target, ids or (), where, change, dry_run=dry_run, yes=yes)
        return

    async def run(backend: Backend, execution_id: ExecutionId) -> PublicState:
        try:
            return await replay_one(backend, execution_id, expected_replay_count)
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

    await _change_each(target, ids, run)


async def purge(
    target: Target,
    ids: options.OptionalIds = None,
    *,
    where: Selection,
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
) -> None:
    """Delete finished executions and all their data.

    Otherwise, an execution is deleted when its retention ends. Pass ids, or options that select
    executions. The command counts them and asks before it deletes them.
    """
    change = Change(
        *("purge", "purged"),
        finished=True,
        apply=lambda backend, info: backend.executions.purge_execution(info.execution_id),
        warning="This deletes payloads, results and output. ",
    )
    await change_many(target, ids or (), where, change, dry_run=dry_run, yes=yes)


async def revoke_lease(
    target: Target,
    id_: options.Id,
    *,
    lease: Annotated[str, value("ID", "Revoke only this lease. `show --json` prints its id.")] = "",
    reason: Annotated[str, value("TEXT", "The reason to store with the execution.")] = "operator",
    by: options.By = None,
    yes: options.Yes = False,
) -> None:
    """Revoke the lease of a running execution.

    The next free worker continues the attempt. The old worker cancels the handler when it next
    renews the lease; until then, both may run.
    """
    options.confirm("Revoke the lease, so that another worker takes over?", yes=yes)
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
    print_result(fields, f"{execution_id.compact}  ", effect, as_json=target.as_json)


def _print_state(target: Target, execution_id: ExecutionId, state: PublicState) -> None:
    fields = {"execution_id": execution_id, "public_state": state.value}
    where = f"{execution_id.compact}  "
    print_result(fields, where, state_cell(state.value), as_json=target.as_json)
