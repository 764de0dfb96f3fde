"""What budgets and quotas do with a few executions, in plain Python."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowfabric.core.ids import ExecutionId

WINDOW_MS = 60_000


@dataclass
class BudgetModel:
    limit: int
    used: int = 0

    @property
    def exhausted(self) -> bool:
        return self.used >= self.limit


@dataclass
class QuotaModel:
    rate: int
    cap: int
    window: dict[ExecutionId, int] = field(default_factory=dict[ExecutionId, int])
    slots: set[ExecutionId] = field(default_factory=set[ExecutionId])

    def trim(self, now: int) -> None:
        self.window = {each: at for each, at in self.window.items() if at > now - WINDOW_MS}

    def headroom(self, now: int) -> int | None:
        self.trim(now)
        room = [self.rate - len(self.window)] if self.rate else []
        room += [self.cap - len(self.slots)] if self.cap else []
        return max(0, min(room)) if room else None

    def admit(self, execution_id: ExecutionId, now: int) -> tuple[str, int | None]:
        """`admitted`, `rate` or `concurrency`, and when a refused execution may try again."""
        self.trim(now)
        if not self.rate and not self.cap:
            return "admitted", None
        if self.rate and len(self.window) >= self.rate:
            return "rate", min(self.window.values()) + WINDOW_MS
        if self.cap and len(self.slots - {execution_id}) >= self.cap:
            return "concurrency", None
        self.window[execution_id] = now
        if self.cap:
            self.slots.add(execution_id)
        return "admitted", None


@dataclass
class LimitedRun:
    """One execution: `waiting`, `held`, `active`, `delayed` or an end."""

    execution_id: ExecutionId
    score: int
    budgets: tuple[str, ...]
    quota: str | None
    state: str = "waiting"
    reason: str = ""
    waits_for: str = ""
    noted: bool = False
    """Whether what it waits for knows of it."""
    retry_at: int | None = None
    due: int = 0

    @property
    def place(self) -> tuple[int, str]:
        return self.score, self.execution_id

    @property
    def public_state(self) -> str:
        return "rate_limited" if self.state == "held" else self.state

    def hold(self, reason: str, waits_for: str, retry_at: int | None = None) -> None:
        self.state, self.reason, self.waits_for = "held", reason, waits_for
        self.noted, self.retry_at = True, retry_at

    def let_go(self) -> None:
        self.state, self.reason, self.waits_for = "waiting", "", ""
        self.noted, self.retry_at = False, None


class Limits:
    """All budgets, quotas and executions of one life."""

    def __init__(self) -> None:
        self.budgets: dict[str, BudgetModel] = {}
        self.quotas: dict[str, QuotaModel] = {}
        self.runs: dict[ExecutionId, LimitedRun] = {}
        self.owed: list[ExecutionId] = []

    def in_state(self, *states: str) -> list[LimitedRun]:
        found = (run for run in self.runs.values() if run.state in states)
        return sorted(found, key=lambda run: run.place)

    def claim(self, count: int, now: int) -> list[ExecutionId]:
        """A worker's whole claim: it looks again while all that it found was held back."""
        taken: list[ExecutionId] = []
        while not taken and (found := self.in_state("waiting")[:count]):
            taken = self._decide(found, now)
        return taken

    def _decide(self, found: list[LimitedRun], now: int) -> list[ExecutionId]:
        taken: list[ExecutionId] = []
        for run in found:
            closed = next((each for each in run.budgets if self.budgets[each].exhausted), None)
            if closed is not None:
                run.hold("waiting_for_budget", closed)
                continue
            if run.quota is not None:
                verdict, retry = self.quotas[run.quota].admit(run.execution_id, now)
                if verdict != "admitted":
                    run.hold("waiting_for_quota", run.quota, retry)
                    continue
            run.state = "active"
            taken.append(run.execution_id)
        return taken

    def leave(self, run: LimitedRun, state: str, now: int, *, crash: bool) -> None:
        was_active = run.state == "active"
        run.state = state
        if was_active and run.quota is not None:
            if crash:
                self.owed.append(run.execution_id)
            else:
                self.give_back([*self.owed, run.execution_id], now)

    def give_back(self, ids: list[ExecutionId], now: int) -> None:
        """Deliver what runs gave back, policy by policy; that lets others go."""
        self.owed.clear()
        by_policy: dict[str, list[ExecutionId]] = {}
        for each in ids:
            by_policy.setdefault(self.runs[each].quota or "", []).append(each)
        for policy, members in by_policy.items():
            quota = self.quotas[policy]
            # A slot that a later run took over stays.
            freed = quota.slots & {each for each in members if self.runs[each].state != "active"}
            quota.slots -= freed
            if freed:
                self.open_quota(policy, now)

    def open_quota(self, policy: str, now: int) -> None:
        room = self.quotas[policy].headroom(now)
        waiting = [run for run in self.in_state("held") if run.noted and run.waits_for == policy]
        for run in waiting if room is None else waiting[:room]:
            run.let_go()

    def open_budget(self, budget: str) -> None:
        for run in self.in_state("held"):
            if run.noted and run.waits_for == budget:
                run.let_go()

    def scan(self, now: int) -> None:
        self.give_back(list(self.owed), now)
        for run in self.in_state("held"):
            exhausted = any(self.budgets[each].exhausted for each in run.budgets)
            if run.reason == "waiting_for_budget" and not exhausted:
                run.let_go()
        for policy, quota in self.quotas.items():
            room = quota.headroom(now)
            due = [
                run
                for run in self.in_state("held")
                if run.reason == "waiting_for_quota"
                and run.quota == policy
                and (run.retry_at is None or run.retry_at <= now)
            ]
            for run in due if room is None else due[:room]:
                run.let_go()
