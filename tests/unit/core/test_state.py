"""The state vector: storage form, derived public state, constraints, index placement."""

from __future__ import annotations

from enum import StrEnum
from itertools import product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core.errors import CorruptionError
from flowfabric.core.state import (
    CODE_LETTERS,
    AttemptRecordState,
    AttemptState,
    BlockingReason,
    EligibilityState,
    ExpireReason,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    StateVector,
    TerminalOutcome,
)
from tests.support.state_rules import index_suffix, violations

# name=letter, in the order of the stored code.
SPECIFIED_LETTERS: dict[type[StrEnum], str] = {
    LifecyclePhase: "submitted=s runnable=r active=a suspended=p terminal=t",
    OwnershipState: "unowned=u leased=l lease_expired_reclaimable=x lease_revoked=v",
    EligibilityState: (
        "eligible_now=e not_eligible_until_time=d blocked_by_dependencies=c blocked_by_budget=b "
        "blocked_by_quota=q blocked_by_route=r blocked_by_lane_state=l blocked_by_operator=o "
        "not_applicable=n"
    ),
    BlockingReason: (
        "none=n waiting_for_worker=w waiting_for_retry_backoff=b waiting_for_resume_delay=r "
        "waiting_for_delay=d waiting_for_signal=s waiting_for_approval=a waiting_for_callback=k "
        "waiting_for_tool_result=t waiting_for_children=c waiting_for_budget=u "
        "waiting_for_quota=q waiting_for_capable_worker=g waiting_for_locality_match=y "
        "paused_by_operator=o paused_by_policy=p paused_by_flow_cancel=f"
    ),
    TerminalOutcome: "none=n success=s failed=f cancelled=c expired=x skipped=k",
    AttemptState: (
        "none=n pending_first_attempt=f running_attempt=r attempt_interrupted=i "
        "pending_retry_attempt=t pending_replay_attempt=p attempt_terminal=z"
    ),
}
WAITING = StateVector.from_code("ruewnf")


def test_letters_are_the_specified_ones() -> None:
    for (dimension, spec), letters in zip(
        SPECIFIED_LETTERS.items(), CODE_LETTERS.values(), strict=True
    ):
        wanted = {pair.split("=")[1]: pair.split("=")[0] for pair in spec.split()}
        assert {letter: value.value for letter, value in letters.items()} == wanted
        assert set(letters.values()) == set(dimension)


def test_every_code_round_trips() -> None:
    codes = ["".join(code) for code in product(*CODE_LETTERS.values())]
    assert len(codes) == 5 * 4 * 9 * 17 * 6 * 7
    for code in codes[::11]:  # coprime with every dimension, so all letters meet
        vector = StateVector.from_code(code)
        assert vector.code == code
        expected = [letters[code[i]] for i, letters in enumerate(CODE_LETTERS.values())]
        assert list(msgspec.structs.astuple(vector)) == expected


@pytest.mark.parametrize("position", range(6))
def test_every_letter_of_every_dimension_round_trips(position: int) -> None:
    for letter, value in list(CODE_LETTERS.values())[position].items():
        code = "ruewnf"[:position] + letter + "ruewnf"[position + 1 :]
        vector = StateVector.from_code(code)
        assert vector.code == code
        assert msgspec.structs.astuple(vector)[position] is value


def test_codes_are_cached() -> None:
    assert StateVector.from_code("ruewnf") is WAITING


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("", "expected six letters, got ''"),
        ("ruewn", "expected six letters, got 'ruewn'"),
        ("ruewnfx", "expected six letters, got 'ruewnfx'"),
        ("Xuewnf", "unknown lifecycle_phase letter 'X' in 'Xuewnf'"),
        ("rXewnf", "unknown ownership_state letter 'X' in 'rXewnf'"),
        ("ruXwnf", "unknown eligibility_state letter 'X' in 'ruXwnf'"),
        ("rueXnf", "unknown blocking_reason letter 'X' in 'rueXnf'"),
        ("ruewXf", "unknown terminal_outcome letter 'X' in 'ruewXf'"),
        ("ruewnX", "unknown attempt_state letter 'X' in 'ruewnX'"),
    ],
)
def test_an_unreadable_code_is_corruption(code: str, message: str) -> None:
    for _ in range(2):
        with pytest.raises(CorruptionError) as error:
            StateVector.from_code(code, "{fp:1}:x")
        assert error.value.code == "corruption"
        assert error.value.detail == f"{{fp:1}}:x: state: {message}"


TABLE: dict[tuple[str, str], str] = {
    ("terminal", "success"): "completed",
    ("terminal", "failed"): "failed",
    ("terminal", "cancelled"): "cancelled",
    ("terminal", "expired"): "expired",
    ("terminal", "skipped"): "skipped",
    ("terminal", "none"): "failed",
    ("runnable", "eligible_now"): "waiting",
    ("runnable", "not_eligible_until_time"): "delayed",
    ("runnable", "blocked_by_dependencies"): "waiting_children",
    ("runnable", "blocked_by_budget"): "rate_limited",
    ("runnable", "blocked_by_quota"): "rate_limited",
    ("runnable", "blocked_by_route"): "waiting",
    ("runnable", "blocked_by_lane_state"): "waiting",
    ("runnable", "blocked_by_operator"): "waiting",
    ("runnable", "not_applicable"): "waiting",
}
BY_PHASE = {"suspended": "suspended", "active": "active", "submitted": "waiting"}


def test_the_public_state_follows_the_table_for_every_vector() -> None:
    seen: set[str] = set()
    for phase, ownership, eligibility, outcome in product(
        LifecyclePhase, OwnershipState, EligibilityState, TerminalOutcome
    ):
        vector = StateVector(
            phase, ownership, eligibility, BlockingReason.NONE, outcome, AttemptState.NONE
        )
        key = outcome if phase == "terminal" else eligibility
        expected = BY_PHASE.get(phase) or TABLE[phase.value, key.value]
        assert vector.public_state == expected
        seen.add(vector.public_state)
    assert seen == set(PublicState) - {PublicState.RESUMABLE}


# Every "to" row of the state-transition table.
REACHABLE = """
runnable unowned eligible_now waiting_for_worker none pending_first_attempt
runnable unowned not_eligible_until_time waiting_for_delay none pending_first_attempt
runnable unowned blocked_by_dependencies waiting_for_children none pending_first_attempt
runnable unowned blocked_by_budget waiting_for_budget none pending_first_attempt
runnable unowned blocked_by_quota waiting_for_quota none pending_retry_attempt
runnable unowned blocked_by_route waiting_for_capable_worker none pending_first_attempt
runnable unowned blocked_by_operator paused_by_operator none pending_first_attempt
runnable unowned blocked_by_lane_state paused_by_policy none pending_first_attempt
active leased not_applicable none none running_attempt
active lease_expired_reclaimable not_applicable waiting_for_worker none attempt_interrupted
active lease_revoked not_applicable waiting_for_worker none attempt_interrupted
terminal unowned not_applicable none failed attempt_terminal
terminal unowned not_applicable none success attempt_terminal
runnable unowned not_eligible_until_time waiting_for_retry_backoff none pending_retry_attempt
runnable unowned not_eligible_until_time waiting_for_delay none attempt_interrupted
runnable unowned blocked_by_dependencies waiting_for_children none attempt_interrupted
suspended unowned not_applicable waiting_for_signal none attempt_interrupted
runnable unowned eligible_now waiting_for_worker none attempt_interrupted
runnable unowned not_eligible_until_time waiting_for_resume_delay none attempt_interrupted
suspended unowned not_applicable paused_by_operator none attempt_interrupted
terminal unowned not_applicable none cancelled attempt_terminal
terminal unowned not_applicable none cancelled pending_first_attempt
terminal unowned not_applicable none cancelled pending_replay_attempt
terminal unowned not_applicable none expired pending_first_attempt
terminal unowned not_applicable none skipped none
terminal unowned not_applicable none skipped attempt_terminal
runnable unowned eligible_now waiting_for_worker none pending_replay_attempt
runnable unowned blocked_by_dependencies waiting_for_children none pending_replay_attempt
"""


def vector_of(row: str) -> StateVector:
    return msgspec.convert(dict(zip(CODE_LETTERS, row.split(), strict=True)), StateVector)


@pytest.mark.parametrize("row", REACHABLE.strip().splitlines())
def test_every_specified_state_is_valid(row: str) -> None:
    assert violations(vector_of(row)) == []


@pytest.mark.parametrize(
    ("code", "broken"),
    [
        ("tunnnz", ["V1"]),
        ("ruewsf", ["V1"]),
        ("aunnni", ["V2"]),
        ("rlewnf", ["V2"]),
        ("runwnf", ["V3"]),
        ("alennr", ["V3"]),
        ("punsnr", ["V4", "V5"]),
        ("alnnni", ["V4"]),
        ("axnwnr", ["V4"]),
        ("avnwnz", ["V4"]),
        ("ruewnr", ["V4"]),
        ("punsnf", ["V5"]),
        ("tunnsi", ["V6"]),
        ("tunnst", ["V6"]),
        ("tunncn", ["V6"]),
        ("tunnsn", ["V6"]),
        ("tunwsz", ["V7"]),
        ("alnwnr", ["V7"]),
        ("sunnnn", []),
    ],
)
def test_broken_constraints_are_named(code: str, broken: list[str]) -> None:
    found = [message.split(":")[0] for message in violations(StateVector.from_code(code))]
    assert found == broken


@pytest.mark.parametrize(
    ("code", "suffix"),
    [
        ("ruewnf", "eligible"),
        ("ruddnf", "delayed"),
        ("ruccnf", "blocked:dependencies"),
        ("rubunf", "blocked:budget"),
        ("ruqqnf", "blocked:quota"),
        ("rurgnf", "blocked:route"),
        ("rulpnf", "blocked:lane"),
        ("ruoonf", "blocked:operator"),
        ("runwnf", ""),
        ("alnnnr", "active"),
        ("axnwni", "active"),
        ("avnwni", "active"),
        ("punsni", "suspended"),
        ("tunnsz", "terminal"),
        ("sunnnn", ""),
    ],
)
def test_index_placement(code: str, suffix: str) -> None:
    assert index_suffix(StateVector.from_code(code)) == suffix


@given(st.tuples(*(st.sampled_from(sorted(letters)) for letters in CODE_LETTERS.values())))
def test_vectors_are_json(letters: tuple[str, ...]) -> None:
    vector = StateVector.from_code("".join(letters))
    assert msgspec.json.decode(msgspec.json.encode(vector), type=StateVector) == vector


def test_small_enums() -> None:
    assert set(ExpireReason) == {"attempt_timeout", "execution_deadline"}
    assert len(AttemptRecordState) == 7
