"""Whether a waitpoint accepts a signal with a forged token."""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence

from flowfabric.bench.arena import Arena, timed
from flowfabric.bench.report import Figures
from flowfabric.bench.workers import BenchApp, SignalTarget, worker_process
from flowfabric.core.contracts.suspension import Accepted
from flowfabric.core.errors import ConfigError, EngineError
from flowfabric.core.ids import new_uuid

_TARGETS = 16
_SENDERS = 64
_REPORT = 1000
_HEX = "0123456789abcdef"
_REFUSALS = frozenset({"invalid_token", "token_expired", "invalid_waitpoint_for_execution"})


def _altered(rng: random.Random, target: SignalTarget, _: SignalTarget) -> SignalTarget:
    token, at = target.token, rng.randrange(len(target.token))
    other = rng.choice([digit for digit in _HEX if digit != token[at]])
    return target._replace(token=f"{token[:at]}{other}{token[at + 1 :]}")


def _guessed(rng: random.Random, target: SignalTarget, _: SignalTarget) -> SignalTarget:
    kid = target.token.partition(":")[0]
    return target._replace(token=f"{kid}:{rng.getrandbits(160):040x}")


def _truncated(rng: random.Random, target: SignalTarget, _: SignalTarget) -> SignalTarget:
    return target._replace(token=target.token[: rng.randrange(1, len(target.token))])


def _extended(rng: random.Random, target: SignalTarget, _: SignalTarget) -> SignalTarget:
    more = rng.choices(_HEX + ":\0 ", k=rng.randrange(1, 9))
    return target._replace(token=target.token + "".join(more))


FORGERS: Sequence[Callable[[random.Random, SignalTarget, SignalTarget], SignalTarget]] = (
    *(_guessed, _altered, _truncated, _extended),
    # The token of another waitpoint, the waitpoint of another execution, and no waitpoint.
    lambda _, target, other: target._replace(token=other.token),
    lambda _, target, other: SignalTarget(target.execution_id, other.waitpoint_id, other.token),
    lambda _, target, __: SignalTarget(target.execution_id, new_uuid(), target.token),
)


def forgeries(
    rng: random.Random, targets: Sequence[SignalTarget], n: int
) -> Iterator[SignalTarget]:
    """`n` tokens that are valid for none of the targets."""
    for number in range(n):
        yield FORGERS[number % len(FORGERS)](rng, *rng.sample(targets, 2))


async def run(at: Arena) -> Figures:
    """Send `n` forged tokens to waitpoints that wait for any signal."""
    async with BenchApp(at.url) as app, worker_process(at.url, concurrency=_TARGETS):
        runs = await app.submit_many(app.ask, [()] * _TARGETS)
        targets = [await SignalTarget.of(at, run) for run in runs]
    forged = forgeries(random.Random(), targets, at.options.n)  # noqa: S311 - a test load
    at.progress.begin("tokens: forged", at.options.n)
    sending = (_send(at, forged) for _ in range(_SENDERS))
    seconds, counts = await timed(asyncio.gather(*sending))
    # The real tokens still work, so the others were refused because they were forged.
    for target in targets:
        outcome = await at.backend.signals.deliver_signal(*target, "go")
        if not (isinstance(outcome, Accepted) and outcome.resumed):
            raise ConfigError("bench", "a real token was refused, so the figures mean nothing")
    tried, accepted = map(sum, zip(*counts, strict=True))
    return {"tried": tried, "accepted": accepted, "per_s": tried / seconds}


async def _send(at: Arena, forged: Iterator[SignalTarget]) -> tuple[int, int]:
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
            at.progress.step(_REPORT)
    return tried, accepted
