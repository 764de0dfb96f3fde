"""Forged waitpoint tokens: every way we know to be wrong, without end, from a seed.

`attack` sends them at an engine. A few thousand run with the tests; a benchmark may ask for a
million.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import msgspec

from flowfabric.core.contracts.suspension import SuspensionDetails
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.engine.valkey.backend import ValkeyBackend

HEX = "0123456789abcdef"
REFUSALS = frozenset({"invalid_token", "token_expired", "invalid_waitpoint_for_execution"})
"""All that a forger may ever read."""


class Target(msgspec.Struct, frozen=True):
    """An open waitpoint with its real token, and what an outsider may know of it."""

    execution_id: ExecutionId
    waitpoint_id: str
    waitpoint_key: str
    created_at: int
    token: str

    @property
    def kid(self) -> str:
        return self.token.partition(":")[0]

    @property
    def digest(self) -> str:
        return self.token.partition(":")[2]

    @classmethod
    def of(cls, execution_id: ExecutionId, details: SuspensionDetails, created_at: int) -> Target:
        return cls(
            execution_id,
            details.waitpoint_id,
            details.waitpoint_key,
            created_at,
            details.waitpoint_token.reveal(),
        )


class Forgery(msgspec.Struct, frozen=True):
    """A token that must not be accepted where it is sent."""

    kind: str
    execution_id: ExecutionId
    waitpoint_id: str
    token: str


Forger = Callable[[random.Random, Target, Target], str]
"""A wrong token for the first target; the second one is another waitpoint."""


def _random(rng: random.Random, target: Target, _: Target) -> str:
    return f"{target.kid}:{''.join(rng.choices(HEX, k=40))}"


def _one_digit(rng: random.Random, target: Target, _: Target) -> str:
    at = rng.randrange(40)
    other = rng.choice([d for d in HEX if d != target.digest[at]])
    return f"{target.kid}:{target.digest[:at]}{other}{target.digest[at + 1 :]}"


def _one_bit(rng: random.Random, target: Target, _: Target) -> str:
    raw = bytearray(target.token.encode("latin-1"))
    raw[rng.randrange(len(target.kid) + 1, len(raw))] ^= 1 << rng.randrange(7)
    return raw.decode("latin-1")


def _truncated(rng: random.Random, target: Target, _: Target) -> str:
    return target.token[: rng.randrange(1, len(target.token))]


def _extended(rng: random.Random, target: Target, _: Target) -> str:
    return target.token + "".join(rng.choices(HEX + " \n\0:", k=rng.randint(1, 8)))


def _prefix_kept(rng: random.Random, target: Target, _: Target) -> str:
    kept = rng.randrange(40)
    rest = "".join(rng.choices(HEX, k=40 - kept))
    forged = target.digest[:kept] + rest
    return f"{target.kid}:{forged}" if forged != target.digest else f"{target.kid}:{'0' * 40}"


def _other_kid(rng: random.Random, target: Target, _: Target) -> str:
    kid = rng.choice(["k0", "K1", "k1 ", " k1", "k1\0", "", "current_kid", "secret", "x" * 64, "*"])
    return f"{kid}:{target.digest}"


def _retired_kid(_: random.Random, target: Target, __: Target) -> str:
    return f"retired:{target.digest}"


def _other_waitpoint(_: random.Random, __: Target, other: Target) -> str:
    return other.token


def _upper_case(_: random.Random, target: Target, __: Target) -> str:
    # An all-digit digest has no case; it does not happen by chance.
    return f"{target.kid}:{target.digest.upper()}"


def _shuffled(rng: random.Random, target: Target, _: Target) -> str:
    digits = list(target.digest)
    while "".join(digits) == target.digest:
        rng.shuffle(digits)
    return f"{target.kid}:{''.join(digits)}"


def _guessed_secret(rng: random.Random, target: Target, _: Target) -> str:
    """What a forger with the whole message and a wrong secret would make."""
    secret = rng.choice([b"", b"\0" * 32, b"secret", rng.randbytes(32)])
    message = f"{target.waitpoint_id}|{target.waitpoint_key}|{target.created_at}".encode()
    return f"{target.kid}:{hmac.new(secret, message, hashlib.sha1).hexdigest()}"


def _unkeyed(_: random.Random, target: Target, __: Target) -> str:
    message = f"{target.waitpoint_id}|{target.waitpoint_key}|{target.created_at}".encode()
    return f"{target.kid}:{hashlib.sha1(message).hexdigest()}"


def _nonsense(rng: random.Random, _: Target, __: Target) -> str:
    letters = [chr(rng.choice([*range(1, 128), 0xFF, 0x20AC])) for _ in range(rng.randint(1, 60))]
    return "".join(letters)


FORGERS: dict[str, Forger] = {
    "random": _random,
    "one_digit": _one_digit,
    "one_bit": _one_bit,
    "truncated": _truncated,
    "extended": _extended,
    "prefix_kept": _prefix_kept,
    "other_kid": _other_kid,
    "retired_kid": _retired_kid,
    "other_waitpoint": _other_waitpoint,
    "upper_case": _upper_case,
    "shuffled": _shuffled,
    "guessed_secret": _guessed_secret,
    "unkeyed": _unkeyed,
    "nonsense": _nonsense,
}


def forgeries(targets: Sequence[Target], seed: int) -> Iterator[Forgery]:
    """Forged deliveries without end; the same seed gives the same ones. Needs two targets."""
    rng = random.Random(seed)
    kinds = [*FORGERS, "other_execution", "unknown_waitpoint"]
    while True:
        target, other = rng.sample(targets, 2)
        kind = rng.choice(kinds)
        if kind == "other_execution":
            yield Forgery(kind, other.execution_id, target.waitpoint_id, target.token)
        elif kind == "unknown_waitpoint":
            yield Forgery(kind, target.execution_id, new_uuid(), target.token)
        else:
            token = FORGERS[kind](rng, target, other)
            yield Forgery(kind, target.execution_id, target.waitpoint_id, token)


async def attack(
    backend: ValkeyBackend, targets: Sequence[Target], count: int, seed: int, *, at_once: int = 64
) -> Counter[tuple[str, str]]:
    """Send this many forgeries; how often each kind got each code. One accepted is an error."""
    seen: Counter[tuple[str, str]] = Counter()
    forged = islice(forgeries(targets, seed), count)

    async def worker() -> None:
        for one in forged:
            try:
                outcome = await backend.signals.deliver_signal(
                    one.execution_id, one.waitpoint_id, one.token, "go"
                )
            except EngineError as error:
                seen[one.kind, error.code] += 1
                if error.code not in REFUSALS:
                    raise AssertionError(f"seed {seed}: {one!r}: {error}") from error
            else:
                raise AssertionError(f"seed {seed}: accepted: {one!r}: {outcome}")

    await asyncio.gather(*(worker() for _ in range(at_once)))
    return seen
