"""Calling the function library: reply envelopes, typed errors, reloading a missing library."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeVar, cast

from flowfabric.core import errors
from flowfabric.core.contracts.leases import Fence, Handle
from flowfabric.core.errors import EngineError, TransportError
from flowfabric.core.ids import ExecutionId, given_name, validate_lane
from flowfabric.core.partition import PartitionCounts
from flowfabric.core.text import lossless, raw, shown
from flowfabric.engine import metrics
from flowfabric.engine.api import check
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.effects import count_effects
from flowfabric.engine.valkey.library import ensure_library
from flowfabric.valkey.link import READ_FUNCTIONS
from flowfabric.valkey.transport import Arg, Transport

log = logging.getLogger(__name__)
_ACCEPTED = (b"OK", b"DUPLICATE", b"ALREADY_SATISFIED")
# May be followed by the partitions with returns (`RETURNS`), and by the effects of the call.
_TELLING = (b"RETURNS ", b"OK ")
MISFITS = (LookupError, TypeError, ValueError, AttributeError)
"""The exceptions that decoding a malformed reply may raise."""
_SHOWN = 12
_MAX_WARNED = 1000
_U16_DIGITS = 5
_PROMPT_S = 0.5
_APART_S = 1.0
"""How long the calls of one batch to several nodes wait for a node that may be away."""
_IN_FLIGHT = 16
"""How many calls to have in flight at a time, so that other work is not delayed."""
_FIELDS_AT_ONCE = 500
S = TypeVar("S", int, str)
Item = TypeVar("Item")
T = TypeVar("T")
Tagged = TypeVar("Tagged", bound=tuple[Any, ...])
Answer = TypeVar("Answer")


def text(value: object) -> str:
    """A reply's text, whatever the server's type for it."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, str | int | float):
        return str(value)
    raise TypeError(f"no text: {type(value).__name__}")


def as_stored(names: Iterable[Arg]) -> list[Arg]:
    """Arguments that may name something malformed, as stored bytes."""
    return [raw(n) if isinstance(n, str) and not n.isascii() else n for n in names]


def _readable(value: object) -> str:
    return shown(lossless(value)) if isinstance(value, bytes) else text(value)


def unreadable(answer: object, function: str, op: str, execution_id: str = "") -> errors.ReplyError:
    """The error for a malformed reply. It only shows types and sizes: a reply may hold secrets."""
    changes = function not in READ_FUNCTIONS
    return errors.ReplyError(function, _shape(answer), execution_id, op=op, ambiguous=changes)


def _shape(answer: object) -> str:
    """Types and sizes: `[1, 2 bytes, [36 bytes, nothing]]`."""
    if isinstance(answer, list | tuple):
        parts = cast("Sequence[object]", answer)
        shapes = [_shape(part) if i < _SHOWN else "…" for i, part in enumerate(parts[: _SHOWN + 1])]
        return f"[{', '.join(shapes)}]"
    if isinstance(answer, bytes | str):
        return f"{len(answer)} bytes"
    return "nothing" if answer is None else type(answer).__name__


def refused(answer: Any, function: str, op: str, execution_id: str = "") -> EngineError:
    """The typed error that an engine function answered with, for a call or one item of a batch."""
    match answer:
        case [0, bytes(code), *details]:
            # Details may quote damaged bytes.
            shown_details = [_readable(part) for part in details]
            word = code.decode(errors="replace")
            return errors.engine_error(
                word, shown_details, op, function=function, execution_id=execution_id
            )
        case _:
            return unreadable(answer, function, op, execution_id)


@contextlib.contextmanager
def naming_missing(limit_id: str) -> Generator[None]:
    """Adds the name to an error about a missing budget or quota policy."""
    try:
        yield
    except errors.NotFoundError as error:
        if error.details:
            raise
        raise errors.NotFoundError(error.code, given_name(limit_id), op=error.op) from None


def is_accepted(status: bytes) -> bool:
    """Whether the status of a reply means that the call succeeded."""
    return status in _ACCEPTED or status.startswith(_TELLING)


class decoding:  # noqa: N801 - reads as a statement: with decoding(reply, …)
    """Turns errors while decoding a malformed reply into `ReplyError`."""

    __slots__ = ("_about",)

    def __init__(self, reply: object, function: str, op: str, execution_id: str = "") -> None:
        self._about = (reply, function, op, execution_id)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, MISFITS):
            # Drop the cause, which may quote the reply.
            raise unreadable(*self._about) from None


def proof(holder: Handle | Fence) -> str:
    """The fence in the form that functions compare; rejects handles of other backends."""
    if not isinstance(holder, Handle):
        return check.fence(holder)
    if holder.backend != "valkey":
        raise errors.ValidationError(
            "handle_from_other_backend", f"expected=valkey actual={holder.backend}"
        )
    wire = holder.wire
    if not wire.isascii():
        raise errors.invalid_input("handle", "is not a handle that a claim returned")
    return wire


async def at_once(
    limit: int, call: Callable[[Item], Awaitable[T]], items: Iterable[Item]
) -> list[T]:
    """The results of a call for each item, in order; at most `limit` run at a time."""
    gate = asyncio.Semaphore(limit)

    async def passing(item: Item) -> T:
        async with gate:
            return await call(item)

    return await asyncio.gather(*map(passing, items))


async def finished(
    limit: int, call: Callable[[Item], Awaitable[T]], items: Iterable[Item]
) -> list[T]:
    """`at_once`, but raises the first error only after all calls have ended."""

    async def outcome(item: Item) -> tuple[Item, T | EngineError]:
        try:
            return item, await call(item)
        except EngineError as error:
            return item, error

    return list(raised(await at_once(limit, outcome, items)))


class FunctionCalls:
    """What all concerns share: the transport, the partition counts, the payload limit."""

    def __init__(
        self, transport: Transport, counts: PartitionCounts, max_payload_bytes: int = 1 << 20
    ) -> None:
        self.transport = transport
        self.counts = counts
        self.max_payload_bytes = max_payload_bytes
        self._warned: set[tuple[str, str]] = set()
        self.on_returns: Callable[[Sequence[str]], None] = lambda _: None
        """Called with partitions whose runs returned something to budgets or quotas."""

    async def fcall(
        self, function: str, tag: str, args: Sequence[Arg], *, op: str, replay_safe: bool = True
    ) -> list[Any]:
        """The reply with its envelope; raises the typed error of a refusal.

        `replay_safe`: the function recognises a repeat, so the transport may repeat the call after
        a lost reply.
        """
        try:
            reply: Any = await self.transport.fcall(function, tag, args, replay_safe=replay_safe)
        except TransportError as error:
            if error.kind != "script_not_loaded":
                error.op = op
                raise _typed(error, f"{_subject(args) or function}: stored keys") from None
            extra = {"action": "library_missing", "function": function}
            text = "function %s is missing on the server, loading the library"
            log.warning(text, function, extra=extra)
            await ensure_library(self.transport)
            reply = await self.transport.fcall(function, tag, args, replay_safe=replay_safe)
        if type(reply) is not list:
            raise unreadable(reply, function, op, _subject(args))
        envelope = cast("list[Any]", reply)
        if len(envelope) > 1 and envelope[0] == 1:
            status = envelope[1]
            if status in _ACCEPTED:
                return envelope
            if isinstance(status, bytes) and is_accepted(status):
                self._hear(status)
                envelope[1] = b"OK"
                return envelope
        raise refused(envelope, function, op, _subject(args))

    def _hear(self, status: bytes) -> None:
        notes = [word.decode() for word in status.split()[1:]]
        if tags := [word for word in notes if word.startswith("{")]:
            self.on_returns(tags)
        if len(notes) > len(tags) and (meter := metrics.active()) is not None:
            count_effects(meter, notes[len(tags) :])

    async def promptly(self, answer: Awaitable[T]) -> T:
        """The answer to a read, with a timeout, so that a lost node does not delay others."""
        if not self.transport.is_cluster:
            return await answer
        try:
            async with asyncio.timeout(_PROMPT_S):
                return await answer
        except TimeoutError:
            raise TransportError("timeout", f"no answer within {_PROMPT_S:g} s") from None

    async def by_partition(
        self, batches: Mapping[str, T], call: Callable[[str, T], Awaitable[object]]
    ) -> dict[str, TransportError]:
        """Call with each partition's batch; returns the errors of nodes of a cluster that are away.

        They do not hold up the others. If no partition answers, the first error is raised.
        """
        if len(batches) < 2 or not self.transport.is_cluster:
            for tag, batch in batches.items():
                await call(tag, batch)
            return {}

        async def fault(item: tuple[str, T]) -> TransportError | None:
            try:
                async with asyncio.timeout(_APART_S):
                    await call(*item)
            except TimeoutError:
                late = f"no answer within {_APART_S:g} s"
                return TransportError("timeout", late, ambiguous=True)
            except TransportError as error:
                return error
            return None

        found = await at_once(_IN_FLIGHT, fault, batches.items())
        faults = {tag: error for tag, error in zip(batches, found, strict=True) if error}
        if len(faults) == len(batches):
            raise next(iter(faults.values()))
        return faults

    async def read(self, place: str, command: str, key: str | bytes, *args: Arg) -> Any:
        """The reply to a reading command; raises `corruption` of `place` for a wrong key type."""
        try:
            return await self.transport.call(command, key, *args, key=key)
        except TransportError as error:
            raise _typed(error, place) from None

    async def existing(self, names: Sequence[str]) -> list[str]:
        """The keys that exist; on a single server, one command checks whether any does."""
        call = self.transport.call
        if not self.transport.is_cluster and not await call("EXISTS", *names, key=names[0]):
            return []
        found = await asyncio.gather(*(call("EXISTS", name, key=name) for name in names))
        return [name for name, exists in zip(names, found, strict=True) if exists]

    async def scan(self, place: str, key: str, match: str = "*") -> dict[bytes, bytes]:
        """The fields of a hash of any size, read in pages; `match`: a pattern of their names."""
        found: dict[bytes, bytes] = {}
        cursor: Any = b"0"
        while True:
            page = ("HSCAN", key, cursor, "MATCH", match, "COUNT", _FIELDS_AT_ONCE)
            cursor, flat = await self.read(place, *page)
            found |= zip(flat[::2], flat[1::2], strict=True)
            if cursor == b"0":
                return found

    async def ask(
        self,
        function: str,
        tag: str,
        args: Sequence[Arg],
        decode: Callable[[list[Any]], T],
        *,
        op: str = "",
        replay_safe: bool = True,
    ) -> T:
        """The decoded reply; raises `ReplyError` if `decode` fails."""
        op = op or function.removeprefix("ff_")
        reply = await self.fcall(function, tag, args, op=op, replay_safe=replay_safe)
        with decoding(reply, function, op, _subject(args)):
            return decode(reply)

    async def ask_about(
        self,
        execution_id: ExecutionId,
        function: str,
        args: Sequence[Arg],
        decode: Callable[[list[Any]], T],
        *,
        op: str = "",
        replay_safe: bool = True,
    ) -> T:
        """`ask` about one execution, whose id is checked and sent as the first argument."""
        known = self.checked(execution_id)
        return await self.ask(
            function, known.tag, (known, *args), decode, op=op, replay_safe=replay_safe
        )

    async def ask_each(
        self,
        function: str,
        tag: str,
        *args: Arg,
        on_rest: Callable[[str, Sequence[Any]], None] | None = None,
    ) -> list[str]:
        """One word per item, from functions that scanners call; items may be malformed.

        `on_rest` receives the rest of the reply.
        """

        def decode(reply: list[Any]) -> list[str]:
            if on_rest is not None:
                on_rest(tag, reply[3:])
            return [_readable(answer) for answer in reply[2]]

        return await self.ask(function, tag, as_stored(args), decode)

    async def server_time_ms(self) -> int:
        """The engine's clock; in a cluster, any other node is asked if the usual one is away."""
        usual = "{fp:0}"
        try:
            return await self.promptly(self._time_at(usual))
        except TransportError:
            peer = self.transport.peer_of(usual)
            tags = [f"{{fp:{number}}}" for number in range(1, self.counts.flow)]
            other = next((tag for tag in tags if self.transport.peer_of(tag) != peer), None)
            if other is None:
                raise
            return await self._time_at(other)

    async def _time_at(self, tag: str) -> int:
        return await self.ask(
            "ff_scan_due", tag, (1, 0), lambda reply: int(reply[2]), op="server_time_ms"
        )

    async def signatures(self, tag: str, lane_id: str) -> list[str]:
        """The sets of required capabilities that executions of a lane have in a partition."""
        key = keys.lane(self.checked_tag(tag), validate_lane(lane_id), "sigs")
        return await self.registered(key, _printable)

    def partition(self, stored: str) -> int:
        """The number of a registered partition; anything else is a ValueError."""
        known = len(stored) <= _U16_DIGITS and stored.isdecimal() and stored == str(int(stored))
        if not known or int(stored) >= self.counts.flow:
            raise ValueError(stored)
        return int(stored)

    async def registered(self, registry: str, parse: Callable[[str], S]) -> list[S]:
        """The members of a registry in order; malformed ones are logged once and left out."""
        found: list[S] = []
        for member in await self.read(f"{registry}: registry", "SMEMBERS", registry):
            entry = lossless(member)
            try:
                found.append(parse(entry))
            except (EngineError, ValueError):
                self.warn_of(registry, entry)
        return sorted(found)

    def warn_of(self, registry: str, entry: str) -> None:
        """Log a malformed entry of a registry, once."""
        if (registry, entry) in self._warned or len(self._warned) == _MAX_WARNED:
            return
        self._warned.add((registry, entry))
        log.warning(
            "%s holds the malformed entry %r: left out",
            registry,
            shown(entry),
            extra={"action": "registry_malformed", "registry": registry, "entry": shown(entry)},
        )

    def checked(self, execution_id: str, field: str = "execution_id") -> ExecutionId:
        """The id in its canonical form and in range, or `invalid_input`."""
        if not isinstance(execution_id, ExecutionId):
            execution_id = ExecutionId.parse(execution_id, field)
        return execution_id.check_partition(self.counts)

    def checked_tag(self, tag: Any, field: str = "tag") -> str:
        """The tag of one of this deployment's partitions, or `invalid_input`."""
        return check.tag(tag, self.counts, field)


def _typed(error: TransportError, place: str) -> EngineError:
    """The error, or `corruption` if the key at `place` (`<context>: <field>`) has another type."""
    if not error.message.startswith("WRONGTYPE"):
        return error
    return errors.CorruptionError("corruption", f"{place}: has the wrong type", op=error.op)


def _printable(stored: str) -> str:
    if not stored.isprintable():
        raise ValueError(stored)
    return stored


def _subject(args: Sequence[Arg]) -> str:
    """The one execution that a call is about; empty when there are several or none."""
    named = {arg for arg in args if isinstance(arg, ExecutionId)}
    return named.pop() if len(named) == 1 else ""


def split(items: Iterable[Tagged], size: int, *, apart: bool) -> list[list[Tagged]]:
    """Groups of at most `size` items; with `apart`, as in clusters, one partition per group."""
    groups: list[list[Tagged]] = []
    for item in sorted(items, key=itemgetter(0)) if apart else items:
        if not groups or len(groups[-1]) >= size or (apart and groups[-1][0][0] != item[0]):
            groups.append([])
        groups[-1].append(item)
    return groups


async def call_each(
    groups: list[list[Tagged]], call: Callable[[list[Tagged]], Awaitable[Answer]]
) -> list[tuple[list[Tagged], Answer | EngineError]]:
    """Each group with the answer to its call, or its error."""

    async def outcome(group: list[Tagged]) -> tuple[list[Tagged], Answer | EngineError]:
        try:
            return group, await call(group)
        except EngineError as error:
            return group, error

    return await at_once(_IN_FLIGHT, outcome, groups)


def raised(outcomes: Iterable[tuple[object, Answer | EngineError]]) -> Iterator[Answer]:
    """The answers of calls; raises the first error."""
    for _, answer in outcomes:
        if isinstance(answer, EngineError):
            raise answer
        yield answer


def places_of(pairs: Iterable[tuple[str, str]]) -> list[str | int]:
    """Names per partition as arguments: tag, number of names, then the names."""
    names: dict[str, list[str]] = {}
    for tag, name in pairs:
        names.setdefault(tag, []).append(name)
    return [arg for tag, own in names.items() for arg in (tag, len(own), *own)]
