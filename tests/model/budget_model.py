"""One budget as a pure model: usage, holds, ledgers, marks and breaches."""

from __future__ import annotations

from dataclasses import dataclass, field

Amounts = dict[str, int]


@dataclass
class Hold:
    """What one execution reserved."""

    owner: int
    amounts: Amounts
    answer: str


@dataclass
class BudgetModel:
    """What a budget must answer and show."""

    hard: Amounts
    soft: Amounts
    strict: bool
    usage: Amounts = field(default_factory=dict[str, int])
    holds: dict[str, Hold] = field(default_factory=dict[str, Hold])
    ended: dict[str, tuple[str, Hold]] = field(default_factory=dict[str, tuple[str, Hold]])
    ledgers: dict[int, Amounts] = field(default_factory=dict[int, Amounts])
    marks: set[str] = field(default_factory=set[str])
    breaches: int = 0
    soft_breaches: int = 0
    resets: int = 0

    @property
    def reserved(self) -> Amounts:
        total: Amounts = {}
        for hold in self.holds.values():
            for name, amount in hold.amounts.items():
                total[name] = total.get(name, 0) + amount
        return total

    def _above(self, amounts: Amounts, held: Amounts) -> bool:
        return any(
            self.hard.get(name, 0)
            and self.usage.get(name, 0) + held.get(name, 0) + amount > self.hard[name]
            for name, amount in amounts.items()
        )

    def _apply(self, amounts: Amounts, *, above: bool) -> str:
        for name, amount in amounts.items():
            self.usage[name] = self.usage.get(name, 0) + amount
        if above:
            self.breaches += 1
            return "soft_breach"
        if any(self.soft.get(name, 0) and self.usage[name] > self.soft[name] for name in amounts):
            self.soft_breaches += 1
            return "soft_breach"
        return "ok"

    def spend(self, amounts: Amounts, key: str, owner: int | None) -> str:
        if key and key in self.marks:
            return "already_applied"
        above = self._above(amounts, {})
        if above and self.strict:
            self.breaches += 1
            return "hard_breach"
        if key:
            self.marks.add(key)
        if owner is not None:
            ledger = self.ledgers.setdefault(owner, {})
            for name, amount in amounts.items():
                ledger[name] = ledger.get(name, 0) + amount
        return self._apply(amounts, above=above)

    def release(self, owner: int) -> str:
        ledger = self.ledgers.pop(owner, None)
        if not ledger:
            return "noop"
        for name, amount in ledger.items():
            self.usage[name] = max(0, self.usage.get(name, 0) - amount)
        return "released"

    def reserve(self, name: str, owner: int, amounts: Amounts) -> str:
        before = self.holds.get(name) or self.ended.get(name, ("", None))[1]
        if before is not None:
            return before.answer if before.owner == owner else "invalid_input"
        above = self._above(amounts, self.reserved)
        if above and self.strict:
            self.breaches += 1
            return "hard_breach"
        self.holds[name] = hold = Hold(owner, amounts, "reserved")
        held = self.reserved
        if above:
            self.breaches += 1
            hold.answer = "soft_breach"
        elif any(
            self.soft.get(each, 0) and self.usage.get(each, 0) + held[each] > self.soft[each]
            for each in amounts
        ):
            self.soft_breaches += 1
            hold.answer = "soft_breach"
        return hold.answer

    def settle(self, name: str, actual: Amounts) -> str:
        hold = self.holds.pop(name, None)
        if hold is None:
            ended = self.ended.get(name, ("", None))[0]
            return "already_applied" if ended == "settled" else "reservation_not_found"
        self.ended[name] = ("settled", hold)
        whole = {**hold.amounts, **actual}
        covered = {each: min(a, hold.amounts.get(each, 0)) for each, a in whole.items()}
        excess = {each: a - covered[each] for each, a in whole.items() if a > covered[each]}
        others = self.reserved
        taken = {each: others.get(each, 0) + covered[each] for each in whole}
        above = self._above(excess, taken)
        if above and self.strict:
            self._apply(covered, above=False)
            self.breaches += 1
            return "hard_breach"
        return self._apply(whole, above=above)

    def unreserve(self, name: str) -> str:
        hold = self.holds.pop(name, None)
        if hold is None:
            return "noop"
        self.ended[name] = ("released", hold)
        return "released"

    def give_back(self, owner: int) -> int:
        lost = [name for name, hold in self.holds.items() if hold.owner == owner]
        for name in lost:
            del self.holds[name]
        return len(lost)

    def reset(self) -> None:
        self.usage = dict.fromkeys(self.usage, 0)
        self.ledgers.clear()
        self.resets += 1
