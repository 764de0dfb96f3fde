"""Step records: what the handlers of an execution have done, so that it is not done again."""

from typing import Literal

import msgspec

from flowfabric.core.contracts import NamedOutcome
from flowfabric.core.ids import ExecutionId

StepKind = Literal["step", "timer", "child", "signal", "value"]
StepStatus = Literal["done", "failed", "pending"]


class StepError(msgspec.Struct, frozen=True):
    """Why a step failed."""

    reason: str
    category: str = ""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded step of an execution."""

    step_key: str
    seq: int
    """Its number: 1 for the first record of the execution."""
    kind: StepKind
    status: StepStatus
    codec: str
    """The label of the result bytes."""
    result: bytes | None
    error: StepError | None
    attempt_index: int
    """The attempt that recorded it last."""
    lease_epoch: int
    started_at: int
    finished_at: int | None
    """None while it is pending."""
    fire_at: int | None
    """When a timer is due."""
    child_execution_id: ExecutionId | None

    def belongs_to(self, lease_epoch: int, attempt_index: int) -> bool:
        """Whether this lease recorded it: after a lost reply, that counts as success."""
        return (self.lease_epoch, self.attempt_index) == (lease_epoch, attempt_index)


class StepPage(msgspec.Struct, frozen=True):
    """Records in the order in which they were made."""

    steps: tuple[StepRecord, ...] = ()
    next_after_seq: int | None = None
    """Pass it as `after_seq` to get the next page; None on the last one."""


NO_STEPS = StepPage()


class Recorded(NamedOutcome[Literal["recorded"]], frozen=True):
    """The step is recorded."""

    seq: int
    fire_at: int | None = None
    """When a timer is due."""


class AlreadyRecorded(NamedOutcome[Literal["already_recorded"]], frozen=True):
    """There is a record with this key; nothing was written."""

    record: StepRecord


StepOutcome = Recorded | AlreadyRecorded
