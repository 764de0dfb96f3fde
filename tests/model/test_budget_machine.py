"""Random reports, spends, holds and resets of one budget, step by step against the model.

Run one seed again with `--hypothesis-seed=N`; run long with `FF_MODEL_EXAMPLES=2000`.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flowfabric.core.contracts.budgets import BudgetChange
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.ids import new_uuid
from flowfabric.engine.api.budgets import Budgets
from tests.model.budget_model import Amounts, BudgetModel
from tests.model.harness import Harness
from tests.model.running import live
from tests.support.budgets import budget
from tests.support.engine import Engine
from tests.support.server import TestServer

EXAMPLES = int(os.environ.get("FF_MODEL_EXAMPLES", "60"))
STEPS = int(os.environ.get("FF_MODEL_STEPS", "40"))

dimensions = st.sampled_from("abc")
amounts = st.dictionaries(dimensions, st.integers(0, 12), min_size=1, max_size=3)
some = st.dictionaries(dimensions, st.integers(1, 12), min_size=1, max_size=2)
limits = st.dictionaries(st.sampled_from("ab"), st.integers(0, 40))
owners = st.integers(0, 2)
keys = st.sampled_from(["", "", "k", "l"])
reservations = st.sampled_from(["r", "s", "t", "u"])


class BudgetLife(RuleBasedStateMachine):
    """The budget of the engine and that of the model, given the same calls."""

    harness: ClassVar[Harness]

    @initialize(hard=limits, soft=limits, strict=st.booleans())
    def create(self, hard: Amounts, soft: Amounts, strict: bool) -> None:
        self.harness.reset()
        self.model = BudgetModel(dict(hard), dict(soft), strict)
        new = budget(hard, soft, enforcement_mode="strict" if strict else "warn")
        self.id = new.budget_id
        self._ask(self.budgets.create_budget(new))
        self.handles: list[Handle] = [
            self._ask(Engine(self.harness.backend).running()) for _ in range(3)
        ]
        # With holds alone, usage and holds never pass a hard limit.
        self.by_holds_alone = True

    @property
    def budgets(self) -> Budgets:
        return self.harness.backend.budgets

    def _ask(self, work: Any) -> Any:
        return self.harness.answer(work)

    def _word(self, work: Any) -> str:
        answer = self._ask(work)
        return answer if isinstance(answer, str) else answer.kind

    @rule(spent=amounts, key=keys)
    def report(self, spent: Amounts, key: str) -> None:
        self.by_holds_alone = False
        answer = self._word(self.budgets.report_usage_admin(self.id, spent, dedup_key=key))
        assert answer == self.model.spend(spent, key, None)

    @rule(spent=amounts, key=keys, owner=owners)
    def record(self, spent: Amounts, key: str, owner: int) -> None:
        self.by_holds_alone = False
        execution_id = self.handles[owner].execution_id
        answer = self._word(self.budgets.record_spend(self.id, execution_id, spent, key))
        assert answer == self.model.spend(spent, key, owner)

    @rule(owner=owners)
    def release(self, owner: int) -> None:
        answer = self._word(self.budgets.release_budget(self.id, self.handles[owner].execution_id))
        assert answer == self.model.release(owner)

    @rule(name=reservations, owner=owners, wanted=some)
    def reserve(self, name: str, owner: int, wanted: Amounts) -> None:
        answer = self._word(self.budgets.reserve(self.handles[owner], self.id, wanted, name))
        assert answer == self.model.reserve(name, owner, wanted)

    @rule(name=reservations, actual=st.one_of(st.none(), amounts))
    def settle(self, name: str, actual: Amounts | None) -> None:
        answer = self._word(self.budgets.settle(self.id, name, actual))
        assert answer == self.model.settle(name, actual or {})

    @rule(name=reservations)
    def unreserve(self, name: str) -> None:
        answer = self._word(self.budgets.release_reservation(self.id, name))
        assert answer == self.model.unreserve(name)

    @rule(owner=owners)
    def give_back(self, owner: int) -> None:
        handle = self.handles[owner]
        back = self.budgets.return_holds(self.id, handle.execution_id, handle.lease_epoch)
        assert self._ask(back) == self.model.give_back(owner)

    @rule()
    def reset(self) -> None:
        # A hold that lasts over a reset may find more usage than before it.
        self._ask(self.budgets.reset_budget(self.id))
        self.model.reset()

    @rule(changed=limits)
    def change(self, changed: Amounts) -> None:
        if not changed:
            return
        self.by_holds_alone = False
        self._ask(self.budgets.update_budget_limits(self.id, BudgetChange(hard_limits=changed)))
        self.model.hard |= changed

    @rule()
    def unknown(self) -> None:
        assert self._word(self.budgets.settle(new_uuid(), "r")) == "budget_not_found"

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "model"):
            return
        status, model = self._ask(self.budgets.get_budget_status(self.id)), self.model
        assert status.usage == model.usage
        assert status.reserved == model.reserved
        assert (status.breach_count, status.soft_breach_count) == (
            model.breaches,
            model.soft_breaches,
        )
        assert status.reset_count == model.resets
        for name, limit in model.hard.items():
            if limit and model.strict and self.by_holds_alone:
                assert model.usage.get(name, 0) + model.reserved.get(name, 0) <= limit
        for name in model.usage:
            recorded = sum(ledger.get(name, 0) for ledger in model.ledgers.values())
            assert recorded <= model.usage[name]


@pytest.mark.timeout(180 if EXAMPLES <= 100 else 0)
def test_a_budget_lives_like_its_model(valkey: TestServer, request: pytest.FixtureRequest) -> None:
    live(BudgetLife, valkey.url, request, examples=EXAMPLES, steps=STEPS)
