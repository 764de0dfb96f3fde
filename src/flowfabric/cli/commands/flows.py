"""`flowfabric flows`, and `flow show`, `cancel`, `replay`, `release`, `delete` and `retry`."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Annotated, Any, get_args

import msgspec
import typer

from flowfabric.cli import options, session
from flowfabric.cli.bulk import progress_bar
from flowfabric.cli.errors import CliError
from flowfabric.cli.options import Deployment, Target, flag, value
from flowfabric.cli.views.flows import (
    count_states,
    flow_state,
    live_flow,
    member_changes,
    print_flow,
    print_flows,
)
from flowfabric.cli.views.screen import Cell, Screen, print_json, print_result
from flowfabric.core.contracts.flows import (
    CancellationPolicy,
    CancellationScheduled,
    FlowStatus,
    PartiallyCancelled,
)
from flowfabric.core.ids import PartitionKey
from flowfabric.core.text import plural
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.flows import FlowFilter
from flowfabric.engine.flow_overview import list_newest_flows, read_flow

_REFRESH_S = 0.5
_WAIT_S = 60.0
_GRACE_MS = 30_000
_LISTED = 3
_STATUSES: tuple[str, ...] = get_args(FlowStatus)
_POLICIES: tuple[str, ...] = get_args(CancellationPolicy)


def _choice(names: tuple[str, ...], text: str) -> Any:
    """An option that takes one of these names."""

    def parse(given: str) -> str:
        if given not in names:
            raise typer.BadParameter(f"{given!r} is not one of {', '.join(names)}")
        return given

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return value("NAME", text, parser=parse, autocompletion=complete)


async def flows(
    target: Target,
    *,
    status: Annotated[
        str | None,
        _choice(_STATUSES, "Only this status: active, completed, failed or cancelled."),
    ] = None,
    tag: Annotated[
        list[str] | None,
        value("KEY=VALUE", "Only flows with this tag. Repeatable.", parser=options.parse_tag),
    ] = None,
    limit: Annotated[int, value("N", "Show at most N flows.", min=1)] = 50,
    everything: Annotated[bool, flag("--all", "Show all flows.")] = False,
) -> None:
    """List flows, newest first.

    DONE shows how many members have ended, and how many there are. With --json, prints one JSON
    object per line.
    """
    where = FlowFilter(
        namespace=target.namespace,
        status=status,  # pyright: ignore[reportArgumentType]
        tags=options.pairs(tag),
    )
    try:
        async with session.open_backend(target) as backend:
            found = await list_newest_flows(backend, where, None if everything else limit)
    except session.NoDataYet as nothing:
        if not target.as_json:
            Screen().line("No flows: ", nothing.message, ".")
            Screen().line(("hint: ", "cyan"), nothing.hint)
        return
    if target.as_json:
        print_json(*found.rows)
    else:
        print_flows(found, filtered=where != FlowFilter())


async def _show(
    target: Target,
    id_: options.FlowId,
    *,
    full: Annotated[bool, flag("--full", "Print every member on its own line.")] = False,
    watch: Annotated[
        bool, flag("--watch", "Keep running and show changes until the flow finishes.")
    ] = False,
) -> None:
    """Show one flow and its graph.

    Prints the graph as a tree, with the state of each member and what it waits for. Four or more
    equal branches share one line. With --watch, if the output is not a terminal, prints one line
    per change of a member.
    """
    async with session.open_flow(target, id_) as (backend, flow_id):
        if watch:
            # Ctrl-C is the normal way to stop.
            with contextlib.suppress(asyncio.CancelledError):
                await _watch(target, backend, flow_id, full=full)
            if target.as_json or not Screen().terminal:
                return
        detail = await read_flow(backend, flow_id)
    print_flow(detail, full=full, as_json=target.as_json)


async def _watch(target: Target, backend: Backend, flow_id: str, *, full: bool) -> None:
    screen = Screen()
    live = screen.terminal and not target.as_json
    changes = contextlib.nullcontext(member_changes(as_json=target.as_json))
    detail = None
    with live_flow(screen, full=full) if live else changes as show_changes:
        while True:
            detail = await read_flow(backend, flow_id, detail)
            show_changes(detail)
            if detail.flow.finished_at is not None:
                return
            await asyncio.sleep(_REFRESH_S)


async def _cancel(
    target: Target,
    id_: options.FlowId,
    *,
    policy: Annotated[
        str,
        _choice(
            _POLICIES,
            "cancel_all: every member that has not ended. cancel_pending: only members that wait "
            "to run. flow_only: no members, but the flow takes no new ones.",
        ),
    ] = "cancel_all",
    reason: Annotated[
        str, value("TEXT", "The reason to store with the flow and its members.")
    ] = "",
    wait: Annotated[
        bool, flag("--wait", "Return when every member that the policy includes has ended.")
    ] = False,
    timeout: Annotated[
        float | None,
        options.duration("Wait, but at most this long. Default with --wait: 1m.", "100ms", "1h"),
    ] = None,
) -> None:
    """Cancel a flow and its members.

    Without --wait or --timeout, the engine cancels the members of a large flow in the background.
    To cancel more members, repeat the command with a stronger policy. Exits with status 1 if
    members cannot be cancelled, or after the timeout; the engine then continues in the background.
    """
    wait = wait or timeout is not None
    async with session.open_flow(target, id_) as (backend, flow_id):
        # This process does not cancel members itself, so let scanners begin at once.
        grace_ms = _GRACE_MS if wait else 0
        outcome = await backend.flows.cancel_flow(
            flow_id, reason, cancellation_policy=policy, grace_ms=grace_ms
        )
        if wait:
            await _drain(backend, flow_id, timeout or _WAIT_S)
            # Repeat the call: its answer names the members that could not be cancelled.
            outcome = await backend.flows.cancel_flow(
                flow_id, reason, cancellation_policy=policy, wait_timeout_ms=1000
            )
        flow = await backend.flows.describe_flow(flow_id, edge_groups=False)
    members: Mapping[str, int] = {} if flow is None else flow.members
    fields: dict[str, object] = {"flow_id": flow_id, "outcome": outcome.kind, "members": members}
    fields |= msgspec.structs.asdict(outcome)
    head: list[Cell] = [f"{flow_id}  ", ("cancelled", "bright_black")]
    text = f"  {count_states(members)}"
    if isinstance(outcome, CancellationScheduled):
        text += "; the engine cancels the rest in the background"
    print_result(fields, *head, text, as_json=target.as_json)
    if isinstance(outcome, PartiallyCancelled):
        failed = outcome.failed_member_execution_ids
        listed = "".join(f"\n  {each.compact}" for each in failed[:_LISTED])
        more = "\n  …" if len(failed) > _LISTED else ""
        raise CliError(
            "partially_cancelled",
            f"{plural(len(failed), 'member')} could not be cancelled:{listed}{more}",
            "the engine keeps trying; `flowfabric show ID` shows what is wrong with a member",
            *map(str, failed),
        )


async def _drain(backend: Backend, flow_id: str, timeout: float) -> None:
    """Cancel the remaining members, some per call, and show the progress."""
    try:
        async with asyncio.timeout(timeout):
            cancelled, settled, left = await backend.flows.drain_flow_cancel(flow_id)
            if not left:
                return
            with progress_bar("Cancel", cancelled + settled + left) as advance:
                advance(cancelled + settled)
                while left:
                    cancelled, settled, left = await backend.flows.drain_flow_cancel(flow_id)
                    advance(cancelled + settled)
    except TimeoutError:
        raise CliError(
            "timeout",
            f"the flow is cancelled, but some members did not end within {timeout:g} s",
            "the engine continues in the background; `flowfabric flow show ID` shows the progress",
        ) from None


async def _replay(
    target: Target,
    id_: options.FlowId,
    *,
    cancelled: Annotated[bool, flag("--cancelled", "Rerun cancelled members, too.")] = False,
) -> None:
    """Rerun the failed and expired members of a flow.

    Members that were skipped because of them wait again. If the flow is large, the engine continues
    in the background.
    """
    async with session.open_flow(target, id_) as (backend, flow_id):
        done = await backend.flows.replay_flow(flow_id, failed_only=not cancelled)
    fields = {"flow_id": flow_id, **msgspec.structs.asdict(done)}
    text = f"replayed {plural(done.replayed, 'member')}, waiting for them again: {done.reopened:,}"
    more = "; the engine replays the rest in the background" if done.pending else ""
    print_result(fields, f"{flow_id}  ", text, more, as_json=target.as_json)


async def _release(target: Target, id_: options.FlowId) -> None:
    """Let the members of a held flow run."""
    async with session.open_flow(target, id_) as (backend, flow_id):
        done = await backend.flows.release_flow(flow_id)
        flow = await backend.flows.describe_flow(flow_id, edge_groups=False)
    state: Cell = "released" if flow is None else flow_state(flow)
    fields = {
        "flow_id": flow_id,
        "outcome": done.kind,
        "eligible": done.eligible,
        "pending": done.pending,
    }
    text = f"  {plural(done.eligible, 'member')} can run"
    more = "; the engine releases the rest in the background" if done.pending else ""
    print_result(fields, f"{flow_id}  ", state, text, more, as_json=target.as_json)


async def _delete(target: Target, id_: options.FlowId, *, yes: options.Yes = False) -> None:
    """Delete a finished or cancelled flow with all its members.

    The engine deletes its subflows in the background. If you do not delete a flow, the engine does
    so when its retention is over.
    """
    async with session.open_flow(target, id_) as (backend, flow_id):
        flow = await backend.flows.describe_flow(flow_id, edge_groups=False)
        count = 0 if flow is None else flow.node_count
        what = f"the flow and {plural(count, 'member')}"
        options.confirm(
            f"Payloads, results and output are deleted. Delete {what}?",
            yes=yes,
            problem=f"this would delete {what}",
        )
        await backend.flows.delete_flow(flow_id)
    fields = {"flow_id": flow_id, "outcome": "deleted", "members": count}
    print_result(fields, f"{flow_id}  ", "deleted", as_json=target.as_json)


async def _retry(target: Deployment) -> None:
    """Retry flow updates that failed too often.

    The engine stops retrying an update that has failed six times because a record is damaged.
    `flowfabric doctor` shows such updates. Repair the record first. Exits with status 1 if an
    update fails again.
    """
    async with session.open_backend(target) as backend:
        tags = await backend.places.used_partitions()
        before = await backend.upkeep.flow_backlog(tags)
        for tag in tags if before.parked else ():
            partition, parked = PartitionKey.trusted(tag).index_number, True
            while (await backend.flows.drain_cascade(partition, parked=parked)).pending:
                parked = False
        after = await backend.upkeep.flow_backlog(tags)
    failed = after.queued.get("cascade_failed", 0) + len(after.parked)
    fields = {"retried": len(before.parked), "failed": failed}
    text = (
        f"retried {plural(len(before.parked), 'update')}" if before.parked else "nothing to retry"
    )
    print_result(fields, text, as_json=target.as_json)
    if failed:
        raise CliError(
            "retry_failed",
            f"{plural(failed, 'update')} failed again",
            "the engine retries five times; after that, `flowfabric doctor` shows what is wrong",
        )


flow = {
    "show": _show,
    "cancel": _cancel,
    "replay": _replay,
    "release": _release,
    "delete": _delete,
    "retry": _retry,
}
"""The commands of `flowfabric flow`."""
