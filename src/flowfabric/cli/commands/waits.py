"""`flowfabric waiting`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from flowfabric.cli.options import (
    ID_HELP,
    JsonOption,
    LaneOption,
    LimitOption,
    NamespaceOption,
    Target,
    UrlOption,
    parse_lane,
)
from flowfabric.cli.reads.waits import LastWait, Wait, read_last_wait, read_wait, read_waits
from flowfabric.cli.session import NoDataYet, find_execution, open_backend
from flowfabric.cli.views.screen import print_json
from flowfabric.cli.views.waits import print_wait, print_waits


def waiting(
    context: typer.Context,
    id_: Annotated[str | None, typer.Argument(metavar="ID", help=ID_HELP)] = None,
    *,
    lane: LaneOption = None,
    limit: LimitOption = 50,
    namespace: NamespaceOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """List executions that wait for an answer.

    Shows what each waits for, since when and until when; the soonest timeout comes first. A token
    is identified by its signing key and fingerprint; the token itself is never shown. With --json,
    prints one JSON object per line.
    """
    target = Target.of(context, url, namespace)
    if id_ is None:
        waits, left_out, now = _read_all(target, parse_lane(lane), limit)
    else:
        wait, last, now = asyncio.run(_read_one(target, id_))
        if not as_json:
            print_wait(wait, last, now)
            return
        waits, left_out = [wait], 0
    if not as_json:
        print_waits(waits, left_out, now)
        return
    for each in waits:
        print_json(each)


def _read_all(target: Target, lane: str | None, limit: int) -> tuple[list[Wait], int, int]:
    async def read() -> tuple[list[Wait], int, int]:
        async with open_backend(target.url) as backend:
            waits, left_out = await read_waits(
                backend, lane=lane, namespace=target.namespace, limit=limit
            )
            return waits, left_out, await backend.meta.server_time_ms()

    try:
        return asyncio.run(read())
    except NoDataYet:
        return [], 0, 0


async def _read_one(target: Target, text: str) -> tuple[Wait, LastWait | None, int]:
    async with open_backend(target.url) as backend:
        execution_id = await find_execution(backend, text, target.namespace)
        return await asyncio.gather(
            read_wait(backend, execution_id),
            read_last_wait(backend, execution_id),
            backend.meta.server_time_ms(),
        )
