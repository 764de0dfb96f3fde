"""The event feeds as Valkey stores them: one stream per partition and per worker registry."""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from flowfabric.core.errors import CorruptionError, TransportError
from flowfabric.core.ids import ExecutionId, stored_id
from flowfabric.core.stored import Stored, corrupt
from flowfabric.core.text import lossless
from flowfabric.engine.api.events import Event
from flowfabric.engine.events.cursor import BEGINNING, Position, before, entry_id, position_of
from flowfabric.engine.events.source import FeedState, Pages, Stop
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls, text
from flowfabric.engine.valkey.library import read_primaries
from flowfabric.engine.valkey.places import ValkeyPlaces
from flowfabric.valkey.transport import Connection

_GRACE_S = 2.0
_POLL_S = 0.05
_ALL_AT_ONCE = 1024
_LIST_EVERY_S = 1.0
_WORKERS = "worker:"
_GROUPS = "{fp:0}"
"""Where the members of groups are registered."""
Entry = tuple[bytes, Sequence[bytes]]
_NAMES = {
    "f": "flow_id",
    "tg": "tags",
    "o": "outcome",
    "r": "reason",
    "s": "source",
    "c": "failure_category",
    "rr": "result_ref",
    "ty": "attempt_type",
    "du": "delay_until",
    "oe": "old_lease_epoch",
    "by": "requested_by",
    "b": "branch",
    "rc": "replay_count",
    "op": "old_priority",
    "np": "new_priority",
    "si": "signal_id",
    "sn": "signal_name",
    "wp": "waitpoint_id",
    "st": "source_type",
    "sr": "source_identity",
    "ef": "effect",
    "su": "suspension_id",
    "tr": "trigger",
    "cr": "close_reason",
    "fs": "state",
    "cp": "cancellation_policy",
    "rd": "reason_detail",
    "q": "quota_policy_id",
    "requests_per_window_seconds": "window_seconds",
    "active_concurrency_cap": "max_concurrent",
}
_ENDS = (b"completion", b"flow_finished")
_COMMON = frozenset({"t", "at", "id", "ns", "l", "k"})
_PAIRS = {"L": ("lease_id", "lease_epoch"), "A": ("attempt_id", "attempt_index")}
_NUMBERS = frozenset(
    {
        *("delay_until", "old_lease_epoch", "replay_count", "old_priority", "new_priority"),
        *("current_usage", "hard_limit", "next_reset_at", "reset_count"),
        *("window_seconds", "max_requests_per_window", "max_concurrent", "jitter_ms"),
    }
)


class _FeedLink:
    """Blocks on its own connection; polls if one read cannot cover the feeds."""

    def __init__(self, calls: FunctionCalls) -> None:
        self._calls = calls
        self._conn: Connection | None = None
        self._client_id = 0
        self._closed = False

    async def read(self, positions: Mapping[str, Position], count: int, wait_s: float) -> Pages:
        # In a cluster, only calls through the transport discover that a slot has moved.
        if self._calls.transport.is_cluster and (len(positions) > 1 or not wait_s):
            return await self._poll(positions, count, wait_s)
        try:
            return await self._block(positions, count, wait_s)
        except BaseException:
            # Close the connection: the reply to an abandoned read would answer the next one.
            self._drop("the read was given up")
            raise

    async def _block(self, positions: Mapping[str, Position], count: int, wait_s: float) -> Pages:
        conn = self._conn
        if conn is None or not conn.is_open:
            conn = self._conn = await self._calls.transport.blocking(_tag(next(iter(positions))))
            self._client_id = await conn.submit(("CLIENT", "ID"))
        if self._closed:
            raise TransportError("transport", "the subscription was closed")
        block = ("BLOCK", int(wait_s * 1000)) if wait_s else ()
        names = {_key(feed): feed for feed in positions}
        starts = map(entry_id, positions.values())
        command = ("XREAD", "COUNT", count, *block, "STREAMS", *names, *starts)
        reply: Any = await conn.submit(command, wait_s + _GRACE_S)
        return {} if not reply else {names[key.decode()]: page for key, page in reply.items()}

    async def _poll(self, positions: Mapping[str, Position], count: int, wait_s: float) -> Pages:
        async def read(feed: str, at: Position) -> Any:
            command = ("XREAD", "COUNT", count, "STREAMS", _key(feed), entry_id(at))
            return await self._calls.transport.call(*command, key=_key(feed))

        replies = await asyncio.gather(*(read(*each) for each in positions.items()))
        found = zip(positions, replies, strict=True)
        pages = {feed: next(iter(reply.values())) for feed, reply in found if reply}
        if not pages and wait_s:
            await asyncio.sleep(_POLL_S)
        return pages

    async def interrupt(self) -> None:
        if self._client_id:
            command = ("CLIENT", "UNBLOCK", self._client_id)
            await self._calls.transport.call(*command, key="", replay_safe=True)

    def _drop(self, why: str) -> None:
        conn, self._conn, self._client_id = self._conn, None, 0
        if conn is not None:
            conn.abort(why)

    def close(self) -> None:
        self._closed = True
        self._drop("the reader was closed")


class ValkeyFeeds:
    answers_in_order = True

    def __init__(self, calls: FunctionCalls, places: ValkeyPlaces) -> None:
        self._calls = calls
        self._places = places
        self._used: tuple[float, list[str]] | None = None
        self._others: tuple[float, list[str]] | None = None
        self._registries: tuple[float, list[str]] | None = None

    @property
    def waits_across_feeds(self) -> bool:
        # A blocking read cannot span the slots of a cluster.
        return not self._calls.transport.is_cluster

    async def partition_feeds(self, *, of_operators: bool = False) -> Sequence[str]:
        counts = self._calls.counts
        of_others = [f"b:{number}" for number in range(counts.budget)]
        of_others += [f"q:{number}" for number in range(counts.quota)]
        if counts.flow <= _ALL_AT_ONCE and self.waits_across_feeds:
            found = [f"fp:{number}" for number in range(counts.flow)]
            return found + of_others if of_operators else found
        if self._used is None or time.monotonic() - self._used[0] > _LIST_EVERY_S:
            used = [f"fp:{number}" for number in await self._places.partitions_in_use()]
            self._used = time.monotonic(), used
        return self._used[1] + (await self._written(of_others) if of_operators else [])

    async def _written(self, feeds: Sequence[str]) -> list[str]:
        """The feeds that have entries, because polling all would cost one command each."""
        if self._others is None or time.monotonic() - self._others[0] > _LIST_EVERY_S:
            states = await asyncio.gather(*map(self._info, feeds))
            found = [feed for feed, state in zip(feeds, states, strict=True) if state is not None]
            self._others = time.monotonic(), found
        return self._others[1]

    async def worker_feeds(self) -> Sequence[str]:
        if self._registries is None or time.monotonic() - self._registries[0] > _LIST_EVERY_S:
            names = await self._places.namespaces_in_use()
            self._registries = time.monotonic(), [f"{_WORKERS}{name}" for name in names]
        return self._registries[1]

    async def clock_ms(self) -> int:
        clocks: dict[str, Any] = await self._calls.transport.call_all_primaries("TIME")
        return min(int(s) * 1000 + int(us) // 1000 for s, us in clocks.values())

    async def last_position(self, feed: str) -> Position:
        key = _key(feed)
        last = await self._calls.read(key, "XREVRANGE", key, "+", "-", "COUNT", 1)
        return position_of(last[0][0].decode()) if last else BEGINNING

    async def states(self, feeds: Sequence[str]) -> list[FeedState | None]:
        found = await asyncio.gather(*(self._info(feed) for feed in feeds))
        maxlen = 0
        if any(raw and raw[b"max-deleted-entry-id"] != b"0-0" for raw in found):
            libraries = (await read_primaries(self._calls.transport)).values()
            maxlen = min((each.events_maxlen for each in libraries if each is not None), default=0)
        return [None if raw is None else _state(raw, maxlen) for raw in found]

    async def _info(self, feed: str) -> Any:
        key = _key(feed)
        try:
            return await self._calls.transport.call("XINFO", "STREAM", key, key=key)
        except TransportError as error:
            if "no such key" in error.message:
                return None
            raise

    def open(self) -> _FeedLink:
        return _FeedLink(self._calls)

    def position(self, entry: Entry) -> Position:
        return position_of(entry[0].decode())

    def stop(self, entry: Entry) -> Stop | None:
        # Every entry of a partition begins with its type and its execution or flow.
        flat = entry[1]
        if flat[1] in _ENDS:
            return flat[3].decode(), "ended"
        if flat[1] == b"released" and b"su" in flat[::2]:
            return flat[3].decode(), "suspended"
        return None

    def decode(self, feed: str, entry: Entry) -> Event:
        return decode_entry(feed, *entry)

    async def tagged(self, ids: Collection[str], tags: Mapping[str, str]) -> set[str]:
        wanted = [value.encode() for value in tags.values()]
        found = await asyncio.gather(*(self._tags(ExecutionId.trusted(i), tags) for i in ids))
        return {each for each, stored in zip(ids, found, strict=True) if stored == wanted}

    async def _tags(self, execution_id: ExecutionId, names: Collection[str]) -> list[bytes] | None:
        key = keys.tags(execution_id.tag, execution_id)
        try:
            return list(await self._calls.read(f"{execution_id}: tags", "HMGET", key, *names))
        except CorruptionError:
            return None

    async def join_group(
        self, group: str, member: str, lease_ms: int, start: str
    ) -> tuple[str, list[str]]:
        return await self._calls.ask(
            *("ff_group_join", _GROUPS, (group, member, lease_ms, start)),
            lambda reply: (text(reply[2]), [text(each) for each in reply[3]]),
            op="subscribe",
        )

    async def lease_feed(
        self, feed: str, group: str, member: str, lease_ms: int, done: Position | None
    ) -> tuple[bool, Position | None]:
        args = (group, member, lease_ms, *(("", "") if done is None else done))
        return await self._calls.ask(
            *("ff_group_lease", f"{{{feed}}}", args),
            lambda reply: (reply[2] == 1, position_of(text(reply[3])) if reply[3] else None),
            op="subscribe",
        )


def _tag(feed: str) -> str:
    return f"{{{feed.removeprefix(_WORKERS)}}}"


def _key(feed: str) -> str:
    return keys.worker_events(_tag(feed)) if feed.startswith(_WORKERS) else keys.events(_tag(feed))


def _state(raw: Mapping[bytes, Any], maxlen: int) -> FeedState:
    last = position_of(raw[b"last-generated-id"].decode())
    deleted = position_of(raw[b"max-deleted-entry-id"].decode())
    first = raw[b"first-entry"]
    oldest = before(position_of(first[0].decode())) if first else last
    if raw[b"entries-added"] == raw[b"length"]:
        trimmed = BEGINNING
    elif deleted > BEGINNING and raw[b"length"] < maxlen:
        # Trimming by age shows in the newest deleted entry. Trimming by length does not, but only
        # happens to full feeds.
        trimmed = deleted
    else:
        trimmed = oldest
    return FeedState(last, oldest, trimmed)


def decode_history(feed: str, stored: bytes, execution_id: str) -> Event:
    """An event from the history of an execution, where its entry id comes first."""
    try:
        _, entry_id, *flat = msgspec.msgpack.decode(stored, type=list[str])
    except (msgspec.MsgspecError, ValueError):
        raise corrupt(execution_id, "history", "has an unreadable entry") from None
    return decode_entry(feed, entry_id.encode(), [part.encode() for part in flat])


def decode_entry(feed: str, entry_id: bytes, flat: Sequence[bytes]) -> Event:
    """An event from the alternating names and values of a stream entry."""
    event_id = f"{feed}/{lossless(entry_id)}"
    stored = Stored.from_hash(f"event {event_id}", flat)
    fields: dict[str, Any] = {}
    for name in stored.fields:
        if name in _PAIRS:
            fields |= zip(_PAIRS[name], stored.pair(name) or (None, None), strict=True)
        elif name == "w":
            worker_id, _, fields["worker_instance_id"] = stored.text(name).partition(" ")
            fields["worker_id"] = worker_id or None
        elif name not in _COMMON:
            known = _NAMES.get(name, name)
            fields[known] = stored.number(name) if known in _NUMBERS else stored.text(name, "")
    kind = stored.text("t")
    if kind == "acquired":
        fields.setdefault("attempt_type", "initial")
    if kind == "revoked":
        fields["revoked_by"] = fields.pop("requested_by", "operator")
    if kind == "reclaimed":
        for part, names in _PAIRS.items():
            stored.text(part)
            fields |= {f"new_{name}": fields.pop(name) for name in names}
    if "result_ref" in fields:
        fields["result_ref"] = True
    if "tags" in fields:
        fields["tags"] = stored.parsed("tg", _tags)
    about = stored.maybe_text("id")
    default = None if about is None else "default"
    of_flow = "default" if "flow_id" in fields else None
    of_worker = feed.removeprefix(_WORKERS) if feed.startswith(_WORKERS) else None
    written_at = event_id.rpartition("/")[2].partition("-")[0].encode()
    return Event(
        event_id,
        kind,
        Stored(stored.context, {"at": stored.fields.get("at") or written_at}).number("at"),
        None if about is None else stored_id(about, stored.context),
        stored.maybe_text("ns") or default or of_flow or of_worker,
        stored.maybe_text("l") or default,
        None if about is None else stored.text("k"),
        fields,
    )


_tags = msgspec.json.Decoder(dict[str, str]).decode
