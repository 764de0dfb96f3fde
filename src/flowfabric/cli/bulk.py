"""Changing many executions: count, confirm, show progress, and summarise refusals."""

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import typer

from flowfabric.cli import options, session
from flowfabric.cli.errors import CliError, UsageError
from flowfabric.cli.options import Target
from flowfabric.cli.selection import Selection
from flowfabric.cli.views.screen import Screen, print_json
from flowfabric.core.contracts.executions import ExecutionInfo
from flowfabric.core.errors import EngineError, NotFoundError, TransportError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.text import plural
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.reads import Filter
from flowfabric.engine.overview import matching

_AT_ONCE = 32
_LISTED = 3
_LISTED_JSON = 100
_REASONS = {
    "execution_not_active": "it has finished",
    "execution_not_terminal": "it has not finished; cancel it first, or wait",
    "replay_not_allowed": "it has been replayed in the meantime",
}
_FINISHED = ("completed", "failed", "cancelled", "expired", "skipped")


class Change(msgspec.Struct, frozen=True):
    """A bulk change, and how messages describe it."""

    verb: str
    """`cancel`"""
    done: str
    """`cancelled`"""
    finished: bool
    """Whether it applies to finished executions or to unfinished ones."""
    apply: Callable[[Backend, ExecutionInfo], Awaitable[object]]
    warning: str = ""
    """What the confirmation says before the number."""

    def check(self, ids: Sequence[str], where: Selection) -> None:
        """Require either ids or options, and reject a state that the change does not apply to."""
        if ids and not where.is_empty:
            problem = "pass either IDs or options that select executions, not both"
            raise typer.BadParameter(problem, param_hint="ID")
        if not ids and where.is_empty:
            raise UsageError(
                "usage",
                f"nothing to {self.verb}: pass an ID, or options that select executions",
                "select with --lane, --task, --state, --tag or --older-than; `--older-than 0s` "
                "selects all",
            )
        if where.state is not None and (where.state in _FINISHED) != self.finished:
            kind = "finished" if self.finished else "unfinished"
            problem = f"{self.verb} is for {kind} executions, not for {where.state!r} ones"
            raise typer.BadParameter(problem, param_hint="--state")


class RefusedExecutions(msgspec.Struct):
    """Executions that could not be changed for the same reason."""

    code: str
    message: str
    count: int = 0
    execution_ids: list[ExecutionId] = []
    """The first of them."""


class Tally(msgspec.Struct):
    """The outcome for the selected executions."""

    changed: int = 0
    skipped: int = 0
    """Executions that no longer matched when it was their turn."""
    refused: dict[str, RefusedExecutions] = {}

    def refuse(self, execution_id: ExecutionId, error: EngineError) -> None:
        """Count a refusal."""
        kind = self.refused.setdefault(error.code, RefusedExecutions(error.code, _why(error)))
        kind.count += 1
        if kind.count <= _LISTED_JSON:
            kind.execution_ids.append(execution_id)


def _why(error: EngineError) -> str:
    known = _REASONS.get(error.code)
    return known or ". ".join(filter(None, (error.explanation.rstrip("."), error.hint)))


async def change_many(
    target: Target,
    ids: Sequence[str],
    where: Selection,
    change: Change,
    *,
    dry_run: bool,
    yes: bool,
) -> None:
    """Count the named or selected executions, ask, change them, and print a summary."""
    change.check(ids, where)
    async with session.open_backend(target) as backend:
        chosen, states = Filter(), Counter[str]()
        found = dict.fromkeys(
            [await session.find_execution(backend, text, target.namespace) for text in ids]
        )
        if not ids:
            chosen = await where.where(backend, target.namespace, finished=change.finished)
            with progress_bar("Counting", None) as advance:
                async for page in matching(backend, chosen):
                    found |= dict.fromkeys(row.execution_id for row in page.executions)
                    states.update(row.public_state.value for row in page.executions)
                    advance(len(page.executions))
        await _change(
            target, backend, list(found), change, chosen, states, dry_run=dry_run, yes=yes
        )


async def _change(
    target: Target,
    backend: Backend,
    found: Sequence[ExecutionId],
    change: Change,
    chosen: Filter,
    states: Counter[str],
    *,
    dry_run: bool,
    yes: bool,
) -> None:
    ordered = sorted(states.items(), key=lambda each: (-each[1], each[0]))
    by_state = ", ".join(f"{count:,} {state}" for state, count in ordered)
    many = plural(len(found), "execution") + (f" ({by_state})" if by_state else "")
    head = {"action": change.verb, "dry_run": dry_run, "matched": len(found), "states": states}
    if dry_run or not found:
        if target.as_json:
            print_json(head if dry_run else head | _counts(Tally()))
        else:
            Screen().line(f"Would {change.verb} {many}." if found else "No execution matches.")
        return
    options.confirm(
        f"{change.warning}{change.verb.capitalize()} {many}?",
        yes=yes,
        problem=f"this would {change.verb} {many}",
    )
    tally = Tally()
    try:
        with progress_bar(change.verb.capitalize(), len(found)) as advance:
            await _run(backend, iter(found), change, chosen, tally, advance)
    finally:
        if target.as_json:
            print_json(head | _counts(tally))
        else:
            _print_summary(len(found), change, tally)
    if tally.refused:
        raise typer.Exit(1)


async def _run(
    backend: Backend,
    left: Iterator[ExecutionId],
    change: Change,
    chosen: Filter,
    tally: Tally,
    advance: Callable[[int], None],
) -> None:
    async def work() -> None:
        for execution_id in left:
            try:
                # The confirmation may have been open for a long time.
                info = await backend.reads.read_execution_info(execution_id)
                if chosen.accepts(info):
                    await change.apply(backend, info)
                    tally.changed += 1
                else:
                    tally.skipped += 1
            except NotFoundError:
                tally.skipped += 1
            except TransportError:
                raise
            except EngineError as error:
                tally.refuse(execution_id, error)
            advance(1)

    failed: list[TransportError] = []
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(work())
    except* TransportError as errors:
        failed += (error for error in errors.exceptions if isinstance(error, TransportError))
    if failed:
        raise _stopped(failed[0]) from failed[0]


def _stopped(error: TransportError) -> CliError:
    hint = "run the same command again; it continues with the executions that are left"
    return CliError(error.code, error.message or error.kind, hint, error.kind)


def _counts(tally: Tally) -> dict[str, Any]:
    return {
        "changed": tally.changed,
        "skipped": tally.skipped,
        "refused": list(tally.refused.values()),
    }


def _print_summary(found: int, change: Change, tally: Tally) -> None:
    screen = Screen()
    screen.line(f"{change.done.capitalize()} {tally.changed:,} of {plural(found, 'execution')}.")
    if tally.skipped:
        screen.line(f"{tally.skipped:,} skipped: changed in the meantime, no longer matching.")
    for kind in tally.refused.values():
        screen.line((f"{kind.count:,} refused", "yellow"), f": {kind.code}: {kind.message}")
        for execution_id in kind.execution_ids[:_LISTED]:
            screen.line(f"  {execution_id.compact}")
        if kind.count > _LISTED:
            screen.line("  …")
    left = found - tally.changed - tally.skipped - sum(k.count for k in tally.refused.values())
    if left:
        screen.line(f"{left:,} left. Run the same command again to continue.")


@contextmanager
def progress_bar(label: str, total: int | None) -> Generator[Callable[[int], None]]:
    """A progress bar on a terminal; without a total, only a counter."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    # Loading it takes longer than most commands.
    from rich import progress  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)
