"""Live output of a handler, as frames that others can follow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import msgspec

from flowfabric.app import codec
from flowfabric.core.contracts.streams import Frame, FrameMode
from flowfabric.core.forks import generation
from flowfabric.sdk.blocking import SyncTwin, blocking
from flowfabric.sdk.loop_thread import refuse_after_fork
from flowfabric.sdk.task import ClaimedTask

_FRAME_BYTES = 65_536
_NUMBER_BYTES = 64
"""Room for the metadata of a part, which counts towards the size of its frame."""
_CONTINUES = 0b1000_0000
_CONTINUES_MASK = 0b1100_0000


async def write_output(task: ClaimedTask, data: Any, frame_type: str, mode: FrameMode) -> None:
    """Write bytes, text or any value that JSON can represent. Large data takes several frames.

    Such frames carry `{"part": 1, "of": 3}` as metadata. Waits only while much output is unsent.
    """
    if isinstance(data, bytes):
        raw, encoding = data, "binary"
    elif isinstance(data, str):
        raw, encoding = data.encode(errors="replace"), "utf8"
    else:
        raw, encoding = codec.encode(data, "data")[0], codec.JSON
    if len(raw) <= _FRAME_BYTES or mode == "summary":
        frame = Frame(payload=raw, frame_type=frame_type, encoding=encoding)
        await task.write_frame(frame, mode=mode)
        return
    parts = list(_parts(raw, whole_characters=encoding != "binary"))
    for number, part in enumerate(parts, 1):
        about = msgspec.json.encode({"part": number, "of": len(parts)}).decode()
        frame = Frame(payload=part, frame_type=frame_type, encoding=encoding, metadata_json=about)
        await task.write_frame(frame, mode=mode)


def _parts(raw: bytes, *, whole_characters: bool) -> Iterator[bytes]:
    """Pieces that fit a frame; text is cut between characters."""
    start = 0
    while start < len(raw):
        end = start + _FRAME_BYTES - _NUMBER_BYTES
        while whole_characters and end < len(raw) and raw[end] & _CONTINUES_MASK == _CONTINUES:
            end -= 1
        yield raw[start:end]
        start = end


class OutputStream:
    """Output of one mode and type; leaving the block waits until it is stored.

    If the block raises, the output is stored at the end of the run instead.
    """

    def __init__(self, task: ClaimedTask, frame_type: str, mode: FrameMode) -> None:
        self._task = task
        self._frame_type = frame_type
        self._mode: FrameMode = mode
        self._generation = generation()

    async def write(self, data: Any) -> None:
        """Add bytes, text, or any value that JSON can represent."""
        refuse_after_fork(self._generation)
        await write_output(self._task, data, self._frame_type, self._mode)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self._task.flush_output()


class SyncOutputStream(SyncTwin[OutputStream]):
    """`OutputStream` without `await`, for `def` handlers."""

    write = blocking(OutputStream.write)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._call(lambda stream: stream.__aexit__(kind))
