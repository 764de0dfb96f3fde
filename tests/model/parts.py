"""The things the model is made of: policies, attempts, leases, executions."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import StateVector
from tests.support.state_rules import index_suffix

RETENTION_MS = 86_400_000

NEW, NEW_DELAYED = "ruewnf", "ruddnf"
LEASED, EXPIRED, REVOKED = "alnnnr", "axnwni", "avnwni"
PAUSED, PAUSED_UNTIL = "ruewni", "ruddni"
BACKING_OFF, REPLAYED = "rudbnt", "ruewnp"


@dataclass(frozen=True)
class Policy:
    """The parts of a policy that the model knows."""

    max_retries: int | None = None
    backoff_ms: int = 0
    retry_on_timeout: bool = False
    max_reclaims: int | None = None
    attempt_timeout_ms: int = 0
    lifetime_ms: int = 0
    max_replays: int | None = None
    needs_gpu: bool = False

    @property
    def empty(self) -> bool:
        """Whether nothing is asked for, so that no policy is stored."""
        return self == Policy()

    @property
    def reclaim_cap(self) -> int:
        """100 with a policy that does not say otherwise, 1000 without a policy."""
        if self.max_reclaims is not None:
            return self.max_reclaims
        return 1000 if self.empty else 100


@dataclass(frozen=True)
class Offer:
    """What a worker offers. One with tasks may leave all others to workers that know them."""

    gpu: bool = False
    tasks: tuple[str, ...] = ()
    no_others: bool = False
    serves: str = "default"
    """Its one namespace, which counts for claims without a grant."""


@dataclass
class Attempt:
    """One attempt. `epoch` is that of its last lease, `marker` what its last pause answered."""

    attempt_id: str
    kind: str
    epoch: int
    state: str = "started"
    ended_by: str = ""
    marker: tuple[str, str] | None = None
    retry: tuple[int, int] | None = None


@dataclass(frozen=True)
class Lease:
    """What a claim handed out: the caller's proof."""

    execution_id: ExecutionId
    lease_id: str
    epoch: int
    attempt_id: str
    index: int
    ttl: int


@dataclass
class Execution:
    """One execution and its whole past."""

    execution_id: ExecutionId
    created_at: int
    priority: int
    policy: Policy
    namespace: str = "default"
    code: str = NEW
    delay_until: int | None = None
    deadline: int | None = None
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    epoch: int = 0
    lease_id: str = ""
    worker: str = ""
    expires_at: int = 0
    timer: int | None = None
    remaining: int | None = None
    retries: int = 0
    reclaims: int = 0
    replays: int = 0
    completed_at: int | None = None
    result: bytes | None = None
    progress: int | None = None
    grant_until: int | None = None
    waits_for_task: bool = False
    """Whether a worker did not know its task, so that only those get it that do."""
    events: list[str] = field(default_factory=list[str])

    @property
    def vector(self) -> StateVector:
        return StateVector.from_code(self.code)

    @property
    def phase(self) -> str:
        return self.vector.lifecycle_phase.value

    @property
    def leased(self) -> bool:
        return self.code == LEASED

    @property
    def score(self) -> int:
        return self.created_at - self.priority * 10**12

    def indexes(self) -> dict[str, float | None]:
        """Every index that must hold it, with its score."""
        suffix = index_suffix(self.vector)
        scores = {
            "eligible": self.score,
            "delayed": self.delay_until,
            "active": self.expires_at,
            "terminal": (self.completed_at or 0) + RETENTION_MS,
        }
        tokens = ["gpu"] * self.policy.needs_gpu + ["task:job"] * self.waits_for_task
        prefix = "" if self.namespace == "default" else f"{self.namespace} "
        signature = prefix + ",".join(tokens)
        needs = f":{signature}" if signature else ""
        own = f"eligible{needs}" if suffix == "eligible" else suffix
        held: dict[str, float | None] = {f"lane:default:{own}": scores[suffix]}
        if self.leased:
            held["lease_expiry"] = self.expires_at
        elif self.phase == "active":
            held[f"lane:default:reclaimable{needs}"] = self.score
        if self.code in (LEASED, EXPIRED):
            held[f"worker:{self.worker}:leases"] = None
        if self.timer is not None:
            held["attempt_timeout"] = self.timer
        if self.deadline is not None and self.phase != "terminal":
            held["execution_deadline"] = self.deadline
        return held
