"""Comparing the slots of a quota policy with the executions that hold them."""

import logging
from typing import Any

from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId, stored_id
from flowfabric.core.state import LifecyclePhase
from flowfabric.core.text import lossless, raw, shown
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls, at_once, text
from flowfabric.engine.valkey.pages import chunks
from flowfabric.engine.valkey.record import Record
from flowfabric.valkey.transport import Arg

log = logging.getLogger(__name__)
_CLAIMED = 10**13
"""From this score on, a slot belongs to a claimed execution."""
_PAGE = 1000
_READS = 64
_BATCH = 200

_FREE = ""


class SlotAudit:
    """One pass over one policy: reads, looks the executions up, then corrects in atomic steps.

    A step changes only slots that are as they were read, so it never undoes an admission.
    """

    def __init__(self, calls: FunctionCalls, tag: str, quota_policy_id: str) -> None:
        self._calls = calls
        self._tag = tag
        self.quota_policy_id = quota_policy_id
        self.shown_id = shown(quota_policy_id)
        self.errors = 0
        self.opening = (0, 0)
        """If some wait and a slot was freed: how many it admits now, and in how many ms if none."""

    async def run(self) -> int:
        """The number of changes."""
        slots = await self._slots()
        verdicts = await at_once(_READS, self._verdict, slots)
        wrong: list[tuple[Arg, ...]] = [
            (raw(member), repr(score), verdict)
            for (member, score), verdict in zip(slots, verdicts, strict=True)
            if verdict is not None
        ]
        # Without a wrong slot, one call drops what expired.
        return sum([await self._correct(part) for part in list(chunks(wrong, _BATCH)) or [()]])

    async def _slots(self) -> list[tuple[str, float]]:
        key = raw(keys.quota_slots(self._tag, self.quota_policy_id))
        found: list[tuple[str, float]] = []
        while True:
            page = ("ZRANGE", key, len(found), len(found) + _PAGE - 1, "WITHSCORES")
            rows: Any = await self._calls.read(f"quota {self.shown_id}: admitted_set", *page)
            found += [(lossless(member), score) for member, score in rows]
            if len(rows) < _PAGE:
                return found

    async def _verdict(self, slot: tuple[str, float]) -> int | str | None:
        """The run to confirm the slot for, `_FREE`, or None if it is right."""
        member, score = slot
        try:
            run = await self._active_run(stored_id(member, f"quota {self.shown_id}"))
        except EngineError as error:
            self.errors += 1
            log.warning(
                *("slot of %s under quota %s left alone: %s", shown(member), self.shown_id, error),
                extra={"action": "slot_unreadable", "quota_id": self.shown_id},
            )
            return None
        if run is not None:
            return None if score >= _CLAIMED + run else run
        # One without a claim ends by itself.
        return _FREE if score >= _CLAIMED else None

    async def _active_run(self, execution_id: ExecutionId) -> int | None:
        record = await Record.read(self._calls, execution_id)
        if record is None or record.state_vector.lifecycle_phase is not LifecyclePhase.ACTIVE:
            return None
        return record.run

    async def _correct(self, wrong: Any) -> int:
        args = (raw(self.quota_policy_id), *(part for slot in wrong for part in slot))

        def decode(reply: list[Any]) -> tuple[str, list[int]]:
            return text(reply[2]), [int(each) for each in reply[3:]]

        outcome, counts = await self._calls.ask(
            "ff_quota_reconcile", self._tag, args, decode, op="reconcile_quota_counters"
        )
        if outcome == "removed":
            log.info(
                *("quota %s has no definition: removed from the index", self.shown_id),
                extra={"action": "quota_removed", "quota_id": self.shown_id},
            )
            return 1
        freed, confirmed, stored, actual, _, *opening = counts
        self.opening = opening[0], opening[1]
        if freed or confirmed:
            log.info(
                "quota %s: corrected its slots: stored %d, actual %d",
                *(self.shown_id, stored, actual),
                extra={
                    "action": "quota_corrected",
                    "quota_id": self.shown_id,
                    "partition": self._tag,
                    "stored": stored,
                    "actual": actual,
                    "freed": freed,
                    "confirmed": confirmed,
                },
            )
        return freed + confirmed
