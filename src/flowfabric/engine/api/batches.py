"""The size of one engine call."""

from __future__ import annotations

BATCH = 256
"""The most items one engine call takes; longer batches are sent in pieces."""
BATCH_BYTES = 4_194_304
"""The most bytes of payloads and options it takes, unless a single item is larger."""


def in_parts(positions: list[int], sizes: list[int]) -> list[list[int]]:
    """Consecutive parts of a batch; the server runs nothing else during one call."""
    if len(positions) <= BATCH and sum(sizes) <= BATCH_BYTES:
        return [positions]
    parts: list[list[int]] = [[]]
    total = 0
    for position, size in zip(positions, sizes, strict=True):
        if parts[-1] and (len(parts[-1]) == BATCH or total + size > BATCH_BYTES):
            parts.append([])
            total = 0
        parts[-1].append(position)
        total += size
    return parts
