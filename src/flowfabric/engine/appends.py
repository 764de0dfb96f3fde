"""Writing attempt output: frames and the patches of the rolling summary."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from flowfabric.core import keys
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.streams import (
    AppendOutcome,
    BestEffort,
    Frame,
    FrameMode,
    SummaryDocument,
)
from flowfabric.core.errors import EngineError, ValidationError, invalid_input
from flowfabric.core.ids import ExecutionId
from flowfabric.core.merge_patch import EMPTY, PATCH_KIND, merge, parse_patch
from flowfabric.engine.arguments import checked_text, instance, listed, whole
from flowfabric.engine.calls import Calls
from flowfabric.engine.frames import (
    MAX_FRAME_BYTES,
    U32,
    append_args,
    append_outcome,
    check_frames,
    knobs,
    summary_of,
)

__all__ = ["Appends", "Summaries"]

SUMMARY_MAX_BYTES = 262_144
_MERGE_TRIES = 8
# Parts of the reply that tells of another document; every other reply is longer.
_MOVED_PARTS = 5
_pack = msgspec.msgpack.Encoder().encode
T = TypeVar("T")


class _Summary:
    """The summary of one attempt as this process last wrote it."""

    def __init__(self) -> None:
        self.version = 0
        self.document = EMPTY
        self.lock = asyncio.Lock()


class Summaries:
    """Summaries that this process writes, the latest ones. The store decides whether they hold."""

    def __init__(self, size: int = 64) -> None:
        self._size = size
        self._known: OrderedDict[str, _Summary] = OrderedDict()

    def of(self, handle: Handle) -> _Summary:
        """What is known of the attempt's summary; at first that it is empty."""
        known = self._known.pop(handle.attempt, None) or _Summary()
        self._known[handle.attempt] = known
        while len(self._known) > self._size:
            self._known.popitem(last=False)
        return known


class Appends(Calls):
    """Adding frames to the stream of an attempt that the caller owns."""

    summaries: Summaries

    async def append_frame(
        self,
        handle: Handle,
        frame: Frame,
        *,
        mode: FrameMode = "durable",
        best_effort: BestEffort | None = None,
        retention_maxlen: int | None = None,
        max_payload_bytes: int = MAX_FRAME_BYTES,
        patch_kind: str = PATCH_KIND,
        summary_max_bytes: int = SUMMARY_MAX_BYTES,
        seq: int | None = None,
    ) -> AppendOutcome:
        """Add one frame; see `append_frames`."""
        return await self.append_frames(
            handle,
            (frame,),
            mode=mode,
            best_effort=best_effort,
            retention_maxlen=retention_maxlen,
            max_payload_bytes=max_payload_bytes,
            patch_kind=patch_kind,
            summary_max_bytes=summary_max_bytes,
            seq=seq,
        )

    async def append_frames(
        self,
        handle: Handle,
        frames: Sequence[Frame],
        *,
        mode: FrameMode = "durable",
        best_effort: BestEffort | None = None,
        retention_maxlen: int | None = None,
        max_payload_bytes: int = MAX_FRAME_BYTES,
        patch_kind: str = PATCH_KIND,
        summary_max_bytes: int = SUMMARY_MAX_BYTES,
        seq: int | None = None,
    ) -> AppendOutcome:
        """Add frames, all or nothing, in one step that also proves the lease.

        `seq` numbers the last frame: an append whose seq is not higher than the highest accepted
        one is not written again, so send the next only when the one before was answered.
        `retention_maxlen` keeps exactly that many newest frames; 0 keeps about 10 000, and
        without one the execution's policy decides.
        """
        whole(max_payload_bytes, "max_payload_bytes", 0, U32)
        whole(summary_max_bytes, "summary_max_bytes", 0, U32)
        checked_text(patch_kind, "patch_kind")
        effort = BestEffort()
        if best_effort is not None:
            effort = instance(best_effort, BestEffort, "best_effort")
        frames = listed(frames, "frames")
        check_frames(frames, mode, max_payload_bytes)
        if mode == "summary":
            args = append_args(handle, frames, mode, retention_maxlen, b"", seq)
            return await self._append_patches(handle, frames, args, patch_kind, summary_max_bytes)
        settings = b"" if mode == "durable" else _pack(knobs(effort))
        args = append_args(handle, frames, mode, retention_maxlen, settings, seq)
        return await self._append(handle, args, append_outcome)

    async def _append(
        self, handle: Handle, args: Sequence[Any], decode: Callable[[list[Any]], T]
    ) -> T:
        return await self.ask(
            *("ff_append", handle.execution_id.tag, args, decode),
            op="append_frame",
            replay_safe=args[6] != "",
        )

    async def _append_patches(
        self,
        handle: Handle,
        frames: Sequence[Frame],
        args: list[Any],
        patch_kind: str,
        max_bytes: int,
    ) -> AppendOutcome:
        """Merges here, where integers stay exact, and commits against the version it merged on."""
        known = self.summaries.of(handle)
        async with known.lock:
            for _ in range(_MERGE_TRIES):
                try:
                    merged = _patched(known.document, frames, patch_kind, max_bytes)
                except EngineError as error:
                    await self._refuse(handle, known, args, error)
                    continue
                args[5] = _pack({"version": known.version, "document": merged.decode()})
                outcome = await self._append(handle, args, _patch_outcome)
                if isinstance(outcome, AppendOutcome):
                    if not outcome.duplicate and outcome.summary_version is not None:
                        known.version, known.document = outcome.summary_version, merged
                    return outcome
                known.version, known.document = outcome
        raise ValidationError("invalid_input", "the summary is written by too many at once")

    async def _refuse(
        self, handle: Handle, known: _Summary, args: Sequence[Any], error: EngineError
    ) -> None:
        """Raise why the patches cannot be merged, unless the document was not the latest.

        Whoever may not write at all is told that first.
        """
        await self._append(handle, [*args[:5], "", ""], append_outcome)
        stored = await self.read_summary(handle.execution_id, handle.attempt_index)
        if stored is None or stored.version == known.version:
            raise error
        known.version, known.document = stored.version, stored.document_json

    async def read_summary(
        self, execution_id: ExecutionId, attempt_index: int
    ) -> SummaryDocument | None:
        """The rolling summary document, or None when no patch was ever appended."""
        execution_id = self.checked(execution_id)
        whole(attempt_index, "attempt_index", 0, U32)
        key = keys.summary(execution_id.tag, execution_id, attempt_index)
        context = f"summary of {execution_id}"
        return summary_of(context, await self.read(f"{context}: record", "HGETALL", key))


def _patch_outcome(reply: list[Any]) -> AppendOutcome | tuple[int, bytes]:
    """What was appended, or the version and document that the patches have to be merged on."""
    if len(reply) > _MOVED_PARTS:
        return append_outcome(reply)
    return int(reply[3]), bytes(reply[4])


def _patched(document: bytes, frames: Sequence[Frame], patch_kind: str, max_bytes: int) -> bytes:
    if patch_kind != PATCH_KIND:
        raise invalid_input("patch_kind", f"unsupported patch_kind {patch_kind!r}")
    merged = merge(document, *(parse_patch(frame.payload) for frame in frames))
    if len(merged) > max_bytes:
        raise ValidationError(
            "retention_limit_exceeded", f"the summary is limited to {max_bytes} bytes"
        )
    return merged
