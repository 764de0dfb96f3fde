"""What the demo promises, checked against the engine's own records."""

from __future__ import annotations

from collections.abc import Sequence

from examples.demo.watch import Row
from flowfabric.core.state import PublicState


def verify(rows: Sequence[Row], lost: Sequence[str], killed: str) -> list[str]:
    """Return each broken promise as a sentence; empty if all were kept.

    `lost` names the executions that `killed` held when it died.
    """
    broken: list[str] = []
    for row in rows:
        if row.state is not PublicState.COMPLETED or not row.result:
            broken.append(f"{row.label} has no result: it is {row.state.value}")
        good = [a for a in row.attempts if a.attempt_state == "ended_success"]
        if len(good) != 1:
            broken.append(f"{row.label} succeeded {len(good)} times, not once")
    if not lost:
        broken.append(f"{killed} held nothing when it was killed")
    reclaimed = [row.label for row in rows if was_reclaimed_from(row, killed)]
    if sorted(reclaimed) != sorted(lost):
        broken.append(f"{killed} lost {sorted(lost)}, but the engine reclaimed {sorted(reclaimed)}")
    return broken


def was_reclaimed_from(row: Row, worker: str) -> bool:
    """Whether this worker's attempt was cut off and another worker finished the execution."""
    cut_off = any(
        a.worker_id == worker and a.attempt_state == "interrupted_reclaimed" for a in row.attempts
    )
    last = row.attempts[-1] if row.attempts else None
    return (
        cut_off and last is not None and last.attempt_type == "reclaim" and last.worker_id != worker
    )
