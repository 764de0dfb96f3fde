"""How `flowfabric waiting` looks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from flowfabric.cli.options import Target
from flowfabric.cli.resolve import resolve
from flowfabric.cli.screen import Cell, Screen, print_json
from flowfabric.cli.session import NoDataYet, opened
from flowfabric.cli.waiting_read import LastWait, Wait, collect, read_last_wait, read_wait
from flowfabric.cli.waiting_words import ended, until, wanted
from flowfabric.cli.words import age, clean, plural, short_length
from flowfabric.core.contracts.suspension import OpenWaitpoint

__all__ = ["all_of_them", "one"]


def all_of_them(target: Target, lane: str | None, limit: int, *, as_json: bool) -> None:
    """Print every suspended execution with its open waitpoints."""
    try:
        waits, left_out, now = asyncio.run(_collect(target, lane, limit))
    except NoDataYet:
        # Looking at nothing is no mistake.
        waits, left_out, now = [], 0, 0
    if as_json:
        for wait in waits:
            print_json(wait)
        return
    screen = Screen()
    if not waits:
        screen.line("Nobody waits for an answer.")
        return
    _table(screen, waits, now)
    if screen.terminal:
        screen.line()
        screen.line((_footer(waits, left_out), "bright_black"))


async def _collect(target: Target, lane: str | None, limit: int) -> tuple[list[Wait], int, int]:
    async with opened(target.url) as backend:
        waits, left_out = await collect(backend, lane=lane, namespace=target.namespace, limit=limit)
        return waits, left_out, await backend.server_time_ms()


def _footer(waits: Sequence[Wait], left_out: int) -> str:
    more = f" The soonest {len(waits)} are shown, --limit for more." if left_out else ""
    total = plural(len(waits) + left_out, "execution")
    return f"{total} waiting. `flowfabric approve ID` answers one.{more}"


def one(target: Target, text: str, *, as_json: bool) -> None:
    """Print what one execution waits for, or that it does not."""
    wait, last, now = asyncio.run(_one(target, text))
    if as_json:
        print_json(wait)
        return
    screen = Screen()
    if wait.waitpoints:
        _table(screen, [wait], now)
        return
    screen.line(f"{wait.execution_id} is {wait.public_state.value} and waits for no answer.")
    if last is not None and last.closed_at is not None:
        screen.line(f"Its last wait {ended(last, now)}.")


async def _one(target: Target, text: str) -> tuple[Wait, LastWait | None, int]:
    async with opened(target.url) as backend:
        execution_id = await resolve(backend, text, target.namespace)
        wait, last, now = await asyncio.gather(
            read_wait(backend, execution_id),
            read_last_wait(backend, execution_id),
            backend.server_time_ms(),
        )
        return wait, last, now


def _table(screen: Screen, waits: Sequence[Wait], now_ms: int) -> None:
    """One row for each open waitpoint; ids are shortened where people look at them."""
    lanes = any(wait.lane_id != "default" for wait in waits)
    short = short_length(wait.execution_id.uuid for wait in waits) if screen.terminal else None
    inner = (
        short_length(each.waitpoint_id for wait in waits for each in wait.waitpoints)
        if screen.terminal
        else None
    )
    headers = ["ID", "KIND", "WAITS FOR", "SIGNALS", "SINCE", "UNTIL", "WAITPOINT", "TOKEN"]
    if lanes:
        headers.insert(2, "LANE")
    rows: list[list[Cell]] = []
    for wait in waits:
        shown = str(wait.execution_id) if short is None else wait.execution_id.uuid[:short]
        for each in wait.waitpoints or [None]:
            row = _row(wait, each, now_ms, shown, inner)
            if lanes:
                row.insert(2, clean(wait.lane_id))
            rows.append(row)
    screen.table(headers, rows)


def _row(
    wait: Wait, waitpoint: OpenWaitpoint | None, now_ms: int, shown: str, inner: int | None
) -> list[Cell]:
    since = wait.since if waitpoint is None else waitpoint.activated_at or waitpoint.created_at
    pending = waitpoint is not None and waitpoint.state == "pending"
    ends = waitpoint.expires_at if waitpoint is not None and pending else wait.until
    what: list[Cell] = ["-", "-"]
    which: list[Cell] = ["-", "-"]
    if waitpoint is not None:
        what = [(clean(waitpoint.waitpoint_key), "magenta"), wanted(waitpoint)]
        token = f"{clean(waitpoint.token_kid)} {waitpoint.token_fingerprint}"
        which = [waitpoint.waitpoint_id[:inner], (token, "bright_black")]
    return [
        (shown, "bold"),
        clean(wait.execution_kind),
        *what,
        "-" if since is None else age(now_ms - since),
        until(ends, now_ms),
        *which,
    ]
