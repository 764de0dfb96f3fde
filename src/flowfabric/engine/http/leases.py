"""Renewing leases through a server: one request for leases of any partitions."""

from base64 import b64encode
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from flowfabric.core.contracts.leases import Handle, Renewed
from flowfabric.core.errors import EngineError
from flowfabric.engine.api import check
from flowfabric.engine.api.leases import Leases
from flowfabric.engine.http import faults
from flowfabric.engine.http.faults import Answer
from flowfabric.engine.http.link import HttpLink
from flowfabric.engine.http.proxies import proxied

if TYPE_CHECKING:
    _Leases = Leases
else:
    _Leases = proxied("leases")

_PART = 500
Row = dict[str, Any]


class Rows(msgspec.Struct, frozen=True):
    """One row per item, with the status and body of a single call."""

    results: list[Row]


def handle_text(handle: Handle) -> str:
    """A handle in the form that the server accepts."""
    return b64encode(check.handle(handle).opaque).decode()


def row_error(row: Row, link: HttpLink, op: str) -> EngineError | None:
    """The error of a row, or None if its item succeeded."""
    if row["status"] < 400:
        return None
    return faults.refused(Answer(row["status"], {}, msgspec.json.encode(row)), link.address, op)


class HttpLeases(_Leases):
    """Leases; renewals of a worker are sent together, and show that it is alive."""

    def __init__(self, link: HttpLink) -> None:
        self._link = link

    async def renew_many(self, handles: Sequence[Handle]) -> list[Renewed | EngineError]:
        found: list[Renewed | EngineError] = []
        handles = check.listed(handles, "handles")
        for start in range(0, len(handles), _PART):
            items = [{"handle": handle_text(each)} for each in handles[start : start + _PART]]
            answer = await self._link.call(
                *("POST", "/v1/remote/renew", {"items": items}),
                answer=Rows,
                op="renew_many",
                repeatable=True,
            )
            for row in answer.results:
                error = row_error(row, self._link, "renew_many")
                found.append(Renewed(**row["result"]["Renewed"]) if error is None else error)
        return found
