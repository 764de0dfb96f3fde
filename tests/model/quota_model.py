"""One quota policy as plain Python: what admissions, confirms and releases do (07 §10)."""

from __future__ import annotations

from dataclasses import dataclass, field

SLACK_MS = 500
SHARED = "shared"


@dataclass
class Slot:
    """A slot; without an end it belongs to a claimed execution."""

    ends_at: int | None


@dataclass
class QuotaModel:
    """The policy and everything it remembers."""

    window_ms: int
    rate: int
    cap: int
    now: int = 0
    entries: dict[str, int] = field(default_factory=dict[str, int])
    """When each execution was last admitted."""
    guards: dict[str, str] = field(default_factory=dict[str, str])
    """The request that admitted it, unless released; or that another call relies on it."""
    before: dict[str, int | None] = field(default_factory=dict[str, "int | None"])
    """The time in the window that its admission replaced."""
    slots: dict[str, Slot] = field(default_factory=dict[str, Slot])
    starts: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """Every admission that a call recorded and nobody undid."""

    def in_window(self) -> dict[str, int]:
        return {each: at for each, at in self.entries.items() if at > self.now - self.window_ms}

    def held(self) -> dict[str, Slot]:
        return {
            each: slot
            for each, slot in self.slots.items()
            if slot.ends_at is None or slot.ends_at > self.now
        }

    def _forget_expired(self) -> None:
        self.entries = self.in_window()
        self.slots = self.held()
        kept = self.entries.keys() | self.slots.keys()
        self.guards = {each: by for each, by in self.guards.items() if each in kept}

    def admit(self, name: str, request: str, ttl: int) -> str:
        if self.rate == 0 and self.cap == 0:
            return "unlimited"
        self._forget_expired()
        window, own = self.entries, self.slots.get(name) if self.cap else None
        if own is not None and own.ends_at is None:
            return "already"
        guard = self.guards.get(name) if name in window or own else None
        counted = guard is not None and name in window
        admitted = guard is not None and (own is not None or self.cap == 0)
        answer = self._full(name, counted=counted, admitted=admitted)
        if answer is not None:
            return answer
        before = window.get(name)
        if not counted:
            self.entries[name] = self.now
            self.starts.append((self.now, name))
        if self.cap:
            ends_at = self.now + ttl + SLACK_MS
            self.slots[name] = Slot(max(ends_at, (own and own.ends_at) or 0))
        if not admitted:
            self.before[name] = before
            self.guards[name] = request
        elif guard != request:
            self.guards[name] = SHARED
            return "already"
        return "admitted"

    def _full(self, name: str, *, counted: bool, admitted: bool) -> str | None:
        if not counted and self.rate and len(self.entries) >= self.rate:
            return "rate"
        if not admitted and self.cap and len(self.slots.keys() - {name}) >= self.cap:
            return "concurrency"
        return None

    def worded(self, answer: str) -> str:
        """The answer with the time until the next try, as of the end of its batch."""
        if answer == "rate":
            return f"rate {min(self.in_window().values()) + self.window_ms - self.now}"
        ends = [slot.ends_at for slot in self.held().values() if slot.ends_at is not None]
        if answer == "concurrency" and ends:
            return f"concurrency {min(ends) - self.now}"
        return answer

    def confirm(self, name: str) -> None:
        if self.cap:
            self.slots[name] = Slot(None)

    def release(self, name: str) -> None:
        self.slots.pop(name, None)
        self.guards.pop(name, None)

    def roll_back(self, name: str, request: str) -> None:
        if self.guards.get(name) != request:
            return
        del self.guards[name]
        if name in self.slots and self.slots[name].ends_at is not None:
            # The slot of a claimed execution belongs to its run.
            del self.slots[name]
        at, before = self.entries.pop(name, None), self.before[name]
        if before is not None and before > self.now - self.window_ms:
            self.entries[name] = before
        if at != before:
            self.starts = [start for start in self.starts if start != (at, name)]

    def reconcile(self, active: set[str]) -> None:
        for name, slot in list(self.slots.items()):
            # Running work counts, even if its slot has ended.
            if name in active:
                slot.ends_at = None
            elif slot.ends_at is None:
                self.release(name)
        self._forget_expired()

    def most_in_any_window(self) -> int:
        """The most different executions that started within one window."""
        return max(
            len({each for at, each in self.starts if end - self.window_ms < at <= end})
            for end, _ in self.starts
        )
