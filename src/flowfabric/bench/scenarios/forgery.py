"""Whether a waitpoint can be signalled with a token that is not its own."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from flowfabric.bench.arena import LANE, Arena, arena
from flowfabric.bench.options import Figures, Options, Progress
from flowfabric.core.conditions import Single
from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.suspension import Accepted, Suspended
from flowfabric.core.errors import ConfigError, EngineError
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.engine.api.claims import ClaimRequest

_TARGETS = 16
_SENDERS = 64
_REPORT = 1000
_HEX = "0123456789abcdef"
_REFUSALS = frozenset({"invalid_token", "token_expired", "invalid_waitpoint_for_execution"})


class _Target(msgspec.Struct, frozen=True):
    """A waitpoint somebody may want to signal without being allowed to."""

    execution_id: ExecutionId
    waitpoint_id: str
    token: str


Forged = tuple[ExecutionId, str, str]
_Forger = Callable[[random.Random, _Target, _Target], Forged]


def _guessed(rng: random.Random, target: _Target, _: _Target) -> Forged:
    kid = target.token.partition(":")[0]
    return target.execution_id, target.waitpoint_id, f"{kid}:{rng.getrandbits(160):040x}"


def _altered(rng: random.Random, target: _Target, _: _Target) -> Forged:
    at = rng.randrange(len(target.token))
    other = rng.choice([digit for digit in _HEX if digit != target.token[at]])
    token = f"{target.token[:at]}{other}{target.token[at + 1 :]}"
    return target.execution_id, target.waitpoint_id, token


def _truncated(rng: random.Random, target: _Target, _: _Target) -> Forged:
    return (
        target.execution_id,
        target.waitpoint_id,
        target.token[: rng.randrange(1, len(target.token))],
    )


def _extended(rng: random.Random, target: _Target, _: _Target) -> Forged:
    token = target.token + "".join(rng.choices(_HEX + ":\0 ", k=rng.randrange(1, 9)))
    return target.execution_id, target.waitpoint_id, token


def _cross_waitpoint(_: random.Random, target: _Target, other: _Target) -> Forged:
    return target.execution_id, target.waitpoint_id, other.token


def _cross_execution(_: random.Random, target: _Target, other: _Target) -> Forged:
    return target.execution_id, other.waitpoint_id, other.token


def _no_waitpoint(_: random.Random, target: _Target, __: _Target) -> Forged:
    return target.execution_id, new_uuid(), target.token


_FORGERS: Sequence[_Forger] = (
    _guessed,
    _altered,
    _truncated,
    _extended,
    _cross_waitpoint,
    _cross_execution,
    _no_waitpoint,
)


async def run(options: Options, progress: Progress) -> Figures:
    """Send `n` forged tokens to waitpoints that wait for any signal."""
    async with arena(options.aof) as at:
        await at.seed_secret()
        targets = [await _target(at) for _ in range(_TARGETS)]
        forged = _forgeries(random.Random(), targets, options.n)  # noqa: S311 - a test load
        progress.begin("tokens: forged", options.n)
        start = time.perf_counter()
        counts = await asyncio.gather(*(_send(at, forged, progress) for _ in range(_SENDERS)))
        seconds = time.perf_counter() - start
        await _check(at, targets)
    tried = sum(count for count, _ in counts)
    return {
        "tried": tried,
        "accepted": sum(accepted for _, accepted in counts),
        "per_s": tried / seconds,
    }


def _forgeries(rng: random.Random, targets: Sequence[_Target], n: int) -> Iterator[Forged]:
    for number in range(n):
        target, other = rng.sample(targets, 2)
        yield _FORGERS[number % len(_FORGERS)](rng, target, other)


async def _target(at: Arena) -> _Target:
    """An execution that waits for any signal."""
    backend = at.backend
    new = NewExecution(
        execution_id=ExecutionId.solo(LANE, backend.counts), execution_kind="ask", lane_id=LANE
    )
    await backend.executions.create_execution(new)
    claimed = await backend.claims.claim_many(
        ClaimRequest(LANE, "bench", f"bench-{new_uuid()}"), at.tag, 1
    )
    handle = claimed.claims[0].handle
    outcome = await backend.suspensions.suspend(handle, condition=Single("go"))
    assert isinstance(outcome, Suspended)
    details = outcome.details
    return _Target(handle.execution_id, details.waitpoint_id, details.waitpoint_token.reveal())


async def _send(at: Arena, forged: Iterator[Forged], progress: Progress) -> tuple[int, int]:
    tried = accepted = 0
    for forgery in forged:
        try:
            await at.backend.signals.deliver_signal(*forgery, "go")
            accepted += 1
        except EngineError as error:
            if error.code not in _REFUSALS:
                raise
        tried += 1
        if tried % _REPORT == 0:
            progress.advance(_REPORT)
    return tried, accepted


async def _check(at: Arena, targets: Sequence[_Target]) -> None:
    """The real tokens still work: the forged ones were refused for being forged."""
    for target in targets:
        outcome = await at.backend.signals.deliver_signal(
            target.execution_id, target.waitpoint_id, target.token, "go"
        )
        if not (isinstance(outcome, Accepted) and outcome.resumed):
            raise ConfigError("bench", "a real token was refused, so the figures mean nothing")
