"""Completes tasks: one call per loop tick, which also claims the next ones."""

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from flowfabric.core.errors import EngineError, FlowFabricError, TransportError, ValidationError
from flowfabric.engine.api.executions import Completion
from flowfabric.sdk.endings import Endings
from flowfabric.sdk.failures import HandlerFailure
from flowfabric.sdk.task import ClaimedTask
from flowfabric.sdk.worker import Worker

log = logging.getLogger(__name__)

Encoded = tuple[bytes, str]
"""Result bytes and their encoding label."""
Finished = tuple[ClaimedTask, Completion]


class Results:
    """Completes tasks in batches and starts what the same trip claims."""

    def __init__(
        self, worker: Worker, endings: Endings, start: Callable[[ClaimedTask], None]
    ) -> None:
        self._claims = worker.claims
        self._batch = worker.config.batch
        self._endings = endings
        self._start = start
        self._done: dict[tuple[str, str], list[Finished]] = {}
        self._flush_planned = False
        self._calls: set[asyncio.Task[None]] = set()

    def add(self, task: ClaimedTask, result: bytes | Encoded | None) -> None:
        """Complete this task with the others of this loop tick.

        Refuses here what is no result, so that it fails one handler and not the whole batch.
        """
        handle = task.claim.handle
        if result is None or type(result) is bytes:
            completion = Completion(handle, result)
        else:
            completion = Completion(handle, *_encoded(result))
        self._done.setdefault((handle.lane_id, handle.execution_id.tag), []).append(
            (task, completion)
        )
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    @property
    def pending(self) -> bool:
        """Whether results are not answered yet."""
        return bool(self._done or self._calls)

    async def drain(self) -> None:
        """Wait until every result was answered or given up."""
        while self.pending:
            self._flush()
            await asyncio.wait(list(self._calls))

    def _flush(self) -> None:
        self._flush_planned = False
        done, self._done = self._done, {}
        for (lane_id, tag), finished in done.items():
            for first in range(0, len(finished), self._batch):
                call = asyncio.create_task(
                    self._send(lane_id, tag, finished[first : first + self._batch])
                )
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)

    async def _send(self, lane_id: str, tag: str, finished: list[Finished]) -> None:
        try:
            await self._deliver(lane_id, tag, finished)
        except BaseException as error:
            # Only a bug or the end of the loop leads here; no permit may be lost even then.
            for task, _ in finished:
                if task.finished_by is None:
                    self._endings.abandon(task, error)
            raise

    async def _deliver(self, lane_id: str, tag: str, finished: list[Finished]) -> None:
        items = [completion for _, completion in finished]
        try:
            # The same request is good while any of the leases may last.
            outcomes, claimed_tasks = await self._claims.complete(
                lane_id, tag, items, lambda: any(task.may_hold_lease for task, _ in finished)
            )
        except TransportError as error:
            for task, _ in finished:
                self._endings.abandon(task, error)
            return
        except EngineError as error:
            log.warning("batch not completed: %s", error, extra={"action": "complete_failed"})
            await asyncio.gather(*(self._alone(*one) for one in finished))
            return
        refused: list[tuple[ClaimedTask, ValidationError]] = []
        for (task, _), outcome in zip(finished, outcomes, strict=True):
            if outcome is None:
                self._endings.summary.completed += 1
                task.finish("complete")
            elif isinstance(outcome, ValidationError):
                refused.append((task, outcome))
            else:
                self._endings.abandon(task, outcome)
        for task in claimed_tasks():
            self._start(task)
        for task, problem in refused:
            await self._endings.refuse(task, problem)

    async def _alone(self, task: ClaimedTask, completion: Completion) -> None:
        """Complete one task of a batch that was refused as a whole."""
        try:
            await task.complete(completion.result_payload, completion.result_encoding)
            self._endings.summary.completed += 1
        except ValidationError as problem:
            await self._endings.refuse(task, problem)
        except FlowFabricError as problem:
            self._endings.abandon(task, problem)


def _encoded(result: object) -> Encoded:
    """Result bytes with their label; anything else is the failure of its handler."""
    match result:
        case (bytes() as data, str() as label) if label.encode(errors="replace").decode() == label:
            return data, label
        case (bytes(), str()):
            got = "a label that is not valid Unicode"
        case tuple():
            parts = cast("tuple[object, ...]", result)
            got = f"({', '.join(type(part).__name__ for part in parts)})"
        case _:
            got = f"a {type(result).__name__}"
    # A retry would return the same.
    raise HandlerFailure(
        f"a handler returns bytes, None, or (bytes, encoding label), not {got}", "permanent"
    )
