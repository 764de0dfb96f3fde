"""Delivers what runs give back to budgets and quotas, which are on other partitions.

The step that ends a run writes an entry to its own partition. It stays until it was delivered, so a
crash loses none; delivering one twice changes nothing.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from flowfabric.core.errors import EngineError, TransportError
from flowfabric.core.ids import ExecutionId, is_execution_id, is_uuid
from flowfabric.core.text import lossless, raw, shown
from flowfabric.engine.api.budgets import Budgets
from flowfabric.engine.api.quotas import Quotas
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls, at_once

log = logging.getLogger(__name__)
_PAGE = 256
_AT_ONCE = 16
_HOLD, _KINDS = "b", ("q", "b", "nq", "nb")


class _Return(NamedTuple):
    """The slot of a run (`q`), what the leases up to an epoch held of a budget (`b`), or the note
    at a quota (`nq`) or budget (`nb`) that an execution waits for it."""

    entry: str
    kind: str
    limit_id: str
    number: int
    """The number of the run, or the epoch; 0 for a note."""
    execution_id: ExecutionId


class Returns:
    """What the runs of a partition give back."""

    def __init__(self, calls: FunctionCalls, budgets: Budgets, quotas: Quotas) -> None:
        self._calls = calls
        self._budgets = budgets
        self._quotas = quotas

    async def deliver(self, tag: str) -> int:
        """Deliver up to a page of entries; returns how many remain, known failures aside."""
        key = keys.index(tag, "returns")
        page = await self._calls.read(f"{tag}: returns", "ZRANGE", key, 0, _PAGE - 1)
        if not page:
            return 0
        entries = [lossless(member) for member in page]
        parsed = {entry: _parsed(tag, entry) for entry in entries}
        for entry in (entry for entry, found in parsed.items() if found is None):
            log.error(
                "removed a malformed entry from the returns of %s: %s",
                *(tag, shown(entry)),
                extra={"action": "return_malformed", "partition": tag},
            )
        returns = [found for found in parsed.values() if found is not None]
        failed = await self._send(returns)
        done = [entry for entry in entries if entry not in failed]
        args = (len(done), *map(raw, done), *map(raw, failed))
        await self._calls.fcall("ff_ack_returns", tag, args, op="deliver_returns")
        return len(entries) if len(entries) == _PAGE and done else 0

    async def _send(self, returns: Sequence[_Return]) -> list[str]:
        """Give back; returns the entries that could not be delivered."""
        together: dict[tuple[str, str], list[_Return]] = {}
        for each in returns:
            if each.kind != _HOLD:
                together.setdefault((each.kind, each.limit_id), []).append(each)
        calls: list[Sequence[_Return]] = list(together.values())
        calls += ([each] for each in returns if each.kind == _HOLD)

        async def send(group: Sequence[_Return]) -> list[str]:
            first, ids = group[0], [each.execution_id for each in group]
            limit_id = first.limit_id
            try:
                match first.kind:
                    case "q":
                        runs = [each.number for each in group]
                        await self._quotas.release_many(limit_id, ids, runs=runs)
                    case "nq":
                        await self._quotas.forget_blocked(limit_id, ids)
                    case "nb":
                        await self._budgets.forget_blocked(limit_id, ids)
                    case _:
                        await self._budgets.return_holds(limit_id, ids[0], first.number)
            except EngineError as error:
                level = logging.DEBUG if isinstance(error, TransportError) else logging.WARNING
                log.log(
                    *(level, "could not return a slot or hold to %s: %s", first.limit_id, error),
                    extra={"action": "return_failed", "execution_id": str(first.execution_id)},
                )
                return [each.entry for each in group]
            return []

        return [entry for part in await at_once(_AT_ONCE, send, calls) for entry in part]


def _parsed(tag: str, entry: str) -> _Return | None:
    kind, limit_id, number, member = (*entry.split("|", 3), "", "", "")[:4]
    if kind not in _KINDS or not is_uuid(limit_id) or not is_execution_id(member, tag):
        return None
    if not (number.isascii() and number.isdecimal()):
        return None
    return _Return(entry, kind, limit_id, int(number), ExecutionId.trusted(member))
