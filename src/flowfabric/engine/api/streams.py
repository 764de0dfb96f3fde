"""Attempt output: appending, reading, following, summaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.streams import (
    AppendOutcome,
    BestEffort,
    Frame,
    FrameMode,
    StreamFrames,
    SummaryDocument,
    Visibility,
)
from flowfabric.core.cursors import START
from flowfabric.core.ids import ExecutionId
from flowfabric.core.merge_patch import PATCH_KIND
from flowfabric.engine.api.concern import Concern
from flowfabric.engine.api.frames import MAX_FRAME_BYTES
from flowfabric.engine.api.stream_follow import StreamFollower

SUMMARY_MAX_BYTES = 262_144


class Streams(Concern, Protocol):
    """Attempt output: appending, reading, following, summaries."""

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
        ...

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
        ...

    async def read_summary(
        self, execution_id: ExecutionId, attempt_index: int
    ) -> SummaryDocument | None:
        """The rolling summary document, or None when no patch was ever appended."""
        ...

    async def read_stream(
        self,
        execution_id: ExecutionId,
        attempt_index: int,
        *,
        from_: str = "start",
        to: str = "end",
        count_limit: int = 100,
        visibility: Visibility = "all",
    ) -> StreamFrames:
        """Frames of a closed range, both ends included, and whether the stream is closed."""
        ...

    async def tail_stream(
        self,
        execution_id: ExecutionId,
        attempt_index: int,
        *,
        after: str = START.text,
        block_ms: int = 0,
        count_limit: int = 50,
        visibility: Visibility = "all",
    ) -> StreamFrames:
        """Frames behind `after`; waits for some, or for the close, up to `block_ms`."""
        ...

    def follow_stream(
        self,
        execution_id: ExecutionId,
        attempt_index: int,
        *,
        after: str = START.text,
        visibility: Visibility = "all",
    ) -> StreamFollower:
        """Every frame from `after` on, live, until the stream is closed.

        >>> async for frame in backend.follow_stream(execution_id, 0):  # doctest: +SKIP
        ...     print(frame.payload)
        """
        ...
