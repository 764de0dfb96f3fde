"""Submitting executions: their ids, and where they are created."""

from collections.abc import Iterable
from typing import Any, Unpack

import msgspec

from flowfabric.core.closing import ClosedOnce
from flowfabric.core.contracts import executions
from flowfabric.core.ids import ExecutionId, validate_lane
from flowfabric.engine.api import check
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.executions import Executions
from flowfabric.sdk.engine_calls import engine_call
from flowfabric.sdk.options import ExecutionOptions


class Submissions(ClosedOnce):
    """The client's methods that submit executions."""

    backend: Backend
    namespace: str

    def new_execution(
        self, kind: str, payload: bytes = b"", **options: Unpack[ExecutionOptions]
    ) -> executions.NewExecution:
        """One execution to submit, with an id minted for its lane unless one is given."""
        fields: dict[str, Any] = dict(options)
        lane = fields.pop("lane", "default")
        execution_id = fields.pop("execution_id", None)
        if fields.get("tags", ()) is None:
            del fields["tags"]
        if execution_id is None:
            fields["shards"] = shards = self.backend.places.shards(validate_lane(lane, "lane"))
            idem = fields.get("idempotency_key")
            key = (self.namespace, idem) if isinstance(idem, str) and idem else None
            execution_id = ExecutionId.solo(lane, self.backend.counts, shards, key)
        return executions.NewExecution(
            execution_id=ExecutionId.parse(execution_id).check_partition(self.backend.counts),
            execution_kind=kind,
            input_payload=payload,
            lane_id=lane,
            namespace=self.namespace,
            **fields,
        )

    async def submit(
        self, kind: str, payload: bytes = b"", **options: Unpack[ExecutionOptions]
    ) -> executions.CreateOutcome:
        """Submit one execution; with an idempotency key or a fixed id at most once."""
        if options.get("execution_id") is None:
            lane = check.text(options.get("lane", "default"), "lane")
            await self.backend.places.learn_lane(lane)
        new = self.new_execution(kind, payload, **options)
        return await self.backend.executions.create_execution(new)

    submit_many = engine_call(Executions.create_many)

    def mint(self, lane: str, count: int) -> Iterable[ExecutionId]:
        """New ids for executions of a lane."""
        shards = self.backend.places.shards(lane)
        return ExecutionId.mint_solo_many(lane, self.backend.counts, count, shards)

    def place(self, new: executions.NewExecution) -> executions.NewExecution:
        """The execution with an id derived from its idempotency key, so that a repeat finds it."""
        shards = self.backend.places.shards(new.lane_id)
        if shards != 1:
            key = (new.namespace, new.idempotency_key)
            minted = ExecutionId.solo(new.lane_id, self.backend.counts, shards, key)
            new = msgspec.structs.replace(new, execution_id=minted)
        return msgspec.structs.replace(new, shards=shards)
