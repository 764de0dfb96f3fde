"""The transition table: every listed row, and every pair that is not listed changes nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flowfabric.core.errors import EngineError
from flowfabric.core.state import (
    CODE_LETTERS,
    AttemptState,
    StateVector,
)
from tests.support.engine import TTL, Engine, unchanged
from tests.support.executions import (
    ACTIVE,
    ATTEMPT_TIMEOUT,
    CODES,
    DEADLINE,
    RUNNABLE,
    TERMINAL,
    Case,
    expire_attempt,
    expire_deadline,
    mark,
    promote,
)

Operation = Callable[[Case], Awaitable[Any]]


async def _claim(case: Case) -> Any:
    claims = await case.engine.claim_all(5)
    return claims or "none"


async def _wait_children(case: Case) -> Any:
    return await case.backend.executions.move_to_waiting_children(case.execution_id, case.fence)


async def _delay(case: Case) -> Any:
    until = await case.engine.now() + 7000
    return await case.backend.executions.delay_execution(
        case.execution_id, case.fence, delay_until=until
    )


def _fail(category: str) -> Operation:
    def fail(case: Case) -> Awaitable[Any]:
        return case.backend.executions.fail_execution(
            case.execution_id, case.fence, failure_reason="r", failure_category=category
        )

    return fail


OPERATIONS: dict[str, Operation] = {
    "claim": _claim,
    "complete": lambda case: case.backend.executions.complete_execution(
        case.execution_id, case.fence
    ),
    "fail_retry": _fail("transient"),
    "fail_final": _fail("permanent"),
    "delay": _delay,
    "delay_due": lambda case: case.backend.executions.delay_execution(
        case.execution_id, case.fence, delay_until=1
    ),
    "wait_children": _wait_children,
    "cancel": lambda case: case.backend.executions.cancel_execution(case.execution_id, "why"),
    "cancel_by_worker": lambda case: case.backend.executions.cancel_execution(
        case.execution_id, "why", source="worker", fence=case.fence
    ),
    "expire_attempt": lambda case: expire_attempt(case.engine, case.execution_id),
    "expire_deadline": lambda case: expire_deadline(case.engine, case.execution_id),
    "mark_expired": lambda case: mark(case.engine, case.execution_id),
    "revoke": lambda case: case.backend.leases.revoke_lease(case.execution_id),
    "promote": lambda case: promote(case.engine, case.execution_id),
    "replay": lambda case: case.backend.executions.replay_execution(case.execution_id),
    "progress": lambda case: case.backend.executions.update_progress(
        case.execution_id, case.fence, progress_pct=1
    ),
    "change_priority": lambda case: case.backend.executions.change_priority(case.execution_id, 7),
}
PREPARATION: dict[str, int] = {
    "expire_attempt": ATTEMPT_TIMEOUT,
    "expire_deadline": DEADLINE,
    "mark_expired": TTL,
    "promote": 5000,
}


def _table() -> dict[tuple[str, str], str]:
    eligible = [name for name in RUNNABLE if CODES[name][2] == "e"]
    table = {
        ("active", "complete"): "tunnsz",
        ("active", "fail_retry"): "rudbnt",
        ("active", "fail_final"): "tunnfz",
        ("active", "delay"): "ruddni",
        ("active", "delay_due"): "ruewni",
        ("active", "wait_children"): "ruccni",
        ("active", "cancel_by_worker"): "tunncz",
        ("active", "mark_expired"): "axnwni",
        ("active", "revoke"): "avnwni",
        ("active", "progress"): "alnnnr",
        ("delayed", "promote"): "ruewnf",
        ("retry_delayed", "promote"): "ruewnt",
        ("paused_delayed", "promote"): "ruewni",
    }
    table |= {(start, "claim"): "alnnnr" for start in [*eligible, "lease_expired", "revoked"]}
    table |= {(start, "expire_attempt"): "tunnxz" for start in ACTIVE}
    table |= {(start, "replay"): "ruewnp" for start in TERMINAL}
    table |= {(start, "change_priority"): CODES[start] for start in RUNNABLE}
    for start in [*RUNNABLE, *ACTIVE]:
        attempted = start not in {"waiting", "delayed", "replayed_early"}
        letter = "z" if attempted else CODES[start][5]
        table[start, "cancel"] = f"tunnc{letter}"
        table[start, "expire_deadline"] = f"tunnx{letter}"
    return table


TABLE = _table()


async def start(engine: Engine, state: str, operation: str) -> Case:
    case = await Case.make(engine, state)
    assert await engine.vector(case.execution_id) == StateVector.from_code(CODES[state])
    if operation == "wait_children" and state == "active":
        await engine.block(case.execution_id)
    await engine.advance(PREPARATION.get(operation, 10))
    return case


REFUSALS = {
    "complete": {"*": "execution_not_active"},
    "fail_retry": {"*": "execution_not_active"},
    "fail_final": {"*": "execution_not_active"},
    "delay": {"*": "execution_not_active"},
    "delay_due": {"*": "execution_not_active"},
    "wait_children": {"*": "execution_not_active"},
    "cancel_by_worker": {"*": "execution_not_active"},
    "progress": {"*": "execution_not_active"},
    "change_priority": {"*": "execution_not_eligible"},
    "replay": {"*": "execution_not_terminal"},
    "cancel": {"*": "execution_not_active"},
}
for _operation in (
    *("complete", "fail_retry", "fail_final", "delay", "delay_due", "wait_children"),
    *("cancel_by_worker", "progress"),
):
    REFUSALS[_operation] |= {"lease_expired": "lease_expired", "revoked": "lease_revoked"}
NO_OPS = {
    "claim": {"*": "none"},
    "promote": dict.fromkeys([*ACTIVE, *TERMINAL], "not_runnable_cleaned")
    | {"*": "not_delayed_cleaned"},
    "expire_attempt": dict.fromkeys(TERMINAL, "already_terminal") | {"*": "not_yet_due"},
    "expire_deadline": {"*": "already_terminal"},
    "mark_expired": {
        "lease_expired": "already_expired",
        "revoked": "already_revoked",
        "*": "not_active",
    },
    "revoke": {
        "lease_expired": "already_expired",
        "revoked": "already_revoked",
        "*": "no_active_lease",
    },
}
# The same operation repeated by the lease it ended: answered as before (covered in its own tests).
REPEATS = {
    ("completed", "complete"),
    ("failed", "fail_retry"),
    ("failed", "fail_final"),
    ("retry_delayed", "fail_retry"),
    ("retry_delayed", "fail_final"),
    ("retry_waiting", "fail_retry"),
    ("retry_waiting", "fail_final"),
    ("paused_delayed", "delay"),
    ("paused_delayed", "delay_due"),
    ("paused_waiting", "delay"),
    ("paused_waiting", "delay_due"),
    ("waiting_children", "wait_children"),
    ("cancelled", "cancel_by_worker"),
    ("cancelled", "cancel"),
    ("cancelled_early", "cancel"),
    ("replayed", "complete"),
}
UNLISTED = sorted(
    (state, operation)
    for state in CODES
    for operation in OPERATIONS
    if (state, operation) not in TABLE
)


@pytest.mark.parametrize(("state", "operation"), UNLISTED)
async def test_unlisted_pair_changes_nothing(engine: Engine, state: str, operation: str) -> None:
    case = await start(engine, state, operation)
    answer = await unchanged(engine, lambda: OPERATIONS[operation](case))
    if (state, operation) in REPEATS:
        assert not isinstance(answer, EngineError)
    elif operation in REFUSALS:
        expected = REFUSALS[operation]
        assert isinstance(answer, EngineError)
        assert answer.code == expected.get(state, expected["*"])
    else:
        expected = NO_OPS[operation]
        reason: Any = getattr(answer, "reason", answer)
        assert reason == expected.get(state, expected["*"])


def test_every_pair_is_covered() -> None:
    assert len(TABLE) + len(UNLISTED) == len(CODES) * len(OPERATIONS)


@pytest.mark.parametrize("state", sorted({*CODES} - {*ACTIVE}))
async def test_not_active_details(engine: Engine, state: str) -> None:
    case = await Case.make(engine, state)
    foreign = Case(engine)
    foreign.execution_id = case.execution_id
    answer = await unchanged(engine, lambda: OPERATIONS["complete"](foreign))
    assert isinstance(answer, EngineError)
    vector = StateVector.from_code(CODES[state])
    attempt = "" if case.handle is None else case.handle.attempt_id
    epoch = "0" if case.handle is None else "1"
    if vector.attempt_state in {
        AttemptState.PENDING_RETRY_ATTEMPT,
        AttemptState.PENDING_REPLAY_ATTEMPT,
    }:
        attempt = ""
    assert answer.details == (
        vector.terminal_outcome.value,
        epoch,
        vector.lifecycle_phase.value,
        attempt,
    )


def test_letters_used_here_exist() -> None:
    for code in {*CODES.values(), *TABLE.values()}:
        for letter, letters in zip(code, CODE_LETTERS.values(), strict=True):
            assert letter in letters
