"""`flowfabric waiting`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from flowfabric.cli.options import ID_HELP, LaneOption, LimitOption, Target, parse_lane
from flowfabric.cli.session import NoDataYet, on_execution, open_backend
from flowfabric.cli.views.screen import print_json
from flowfabric.cli.views.waits import print_wait, print_waits
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.overview import Wait, list_waits, read_wait


def waiting(
    target: Target,
    id_: Annotated[str | None, typer.Argument(metavar="ID", help=ID_HELP)] = None,
    *,
    lane: LaneOption = None,
    limit: LimitOption = 50,
) -> None:
    """List executions that wait for an answer.

    Shows what each waits for, since when and until when; the soonest timeout comes first. A token
    is identified by its signing key and fingerprint; the token itself is never shown. With --json,
    prints one JSON object per line.
    """
    only_lane = parse_lane(lane)

    async def one(backend: Backend, execution_id: ExecutionId) -> list[Wait]:
        wait, last = await read_wait(backend, execution_id)
        if not target.as_json:
            print_wait(wait, last, await backend.meta.server_time_ms())
        return [wait]

    async def every() -> list[Wait]:
        waits, left_out, now = list[Wait](), 0, 0
        try:
            async with open_backend(target.url) as backend:
                waits, left_out = await list_waits(
                    backend, lane=only_lane, namespace=target.namespace, limit=limit
                )
                now = await backend.meta.server_time_ms()
        except NoDataYet:
            pass
        if not target.as_json:
            print_waits(waits, left_out, now)
        return waits

    waits = asyncio.run(every()) if id_ is None else on_execution(target, id_, one)
    if target.as_json:
        for wait in waits:
            print_json(wait)
