"""Stored entries of the event feeds under the names that subscribers see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from flowfabric.core.ids import stored_id
from flowfabric.core.stored import Stored, corrupt
from flowfabric.core.text import lossless
from flowfabric.engine.api.events import Event

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
}
_COMMON = frozenset({"t", "at", "id", "ns", "l", "k"})
_PAIRS = {"L": ("lease_id", "lease_epoch"), "A": ("attempt_id", "attempt_index")}
_NUMBERS = frozenset(
    {"delay_until", "old_lease_epoch", "replay_count", "old_priority", "new_priority"}
)


def decode_entry(feed: str, entry_id: bytes, flat: Sequence[bytes]) -> Event:
    """An event from the alternating names and values of a stream entry."""
    event_id = f"{feed}/{lossless(entry_id)}"
    return _event(event_id, Stored.from_hash(f"event {event_id}", flat))


def decode_history(feed: str, stored: bytes, execution_id: str) -> Event:
    """An event from the history of an execution, where its entry id comes first."""
    try:
        _, entry_id, *flat = msgspec.msgpack.decode(stored, type=list[str])
    except (msgspec.MsgspecError, ValueError):
        raise corrupt(execution_id, "history", "has an unreadable entry") from None
    return decode_entry(feed, entry_id.encode(), [part.encode() for part in flat])


def _event(event_id: str, stored: Stored) -> Event:
    fields: dict[str, Any] = {}
    for name in stored.fields:
        if name in _PAIRS:
            fields |= zip(_PAIRS[name], stored.pair(name) or (None, None), strict=True)
        elif name == "w":
            worker_id, _, fields["worker_instance_id"] = stored.text(name).partition(" ")
            fields["worker_id"] = worker_id or None
        elif name not in _COMMON:
            known = _NAMES.get(name, name)
            numeric = known in _NUMBERS
            fields[known] = stored.number(name) if numeric else stored.text(name, "")
    kind = stored.text("t")
    if kind == "acquired":
        fields.setdefault("attempt_type", "initial")
    if kind == "revoked":
        fields["revoked_by"] = fields.pop("requested_by", "operator")
    if kind == "reclaimed":
        for part in _PAIRS:
            stored.text(part)
        for part in ("lease_id", "lease_epoch", "attempt_id", "attempt_index"):
            fields[f"new_{part}"] = fields.pop(part)
    if "result_ref" in fields:
        fields["result_ref"] = True
    if "tags" in fields:
        fields["tags"] = stored.parsed("tg", _tags)
    about = stored.maybe_text("id")
    default = None if about is None else "default"
    written_at = event_id.rpartition("/")[2].partition("-")[0].encode()
    return Event(
        event_id,
        kind,
        Stored(stored.context, {"at": stored.fields.get("at") or written_at}).number("at"),
        None if about is None else stored_id(about, stored.context),
        stored.maybe_text("ns") or default,
        stored.maybe_text("l") or default,
        None if about is None else stored.text("k"),
        fields,
    )


_tags = msgspec.json.Decoder(dict[str, str]).decode
