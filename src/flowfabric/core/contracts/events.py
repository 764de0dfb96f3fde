"""Entries of the event feed under the names subscribers see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from flowfabric.core.errors import CorruptionError

__all__ = ["Event", "decode_entry", "decode_history"]

_NAMES = {
    "t": "type",
    "at": "at",
    "id": "execution_id",
    "ns": "namespace",
    "l": "lane_id",
    "k": "execution_kind",
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
_PAIRS = {"L": ("lease_id", "lease_epoch"), "A": ("attempt_id", "attempt_index")}
_NUMBERS = frozenset(
    {"delay_until", "old_lease_epoch", "replay_count", "old_priority", "new_priority"}
)


class Event(msgspec.Struct, frozen=True):
    """One entry of a feed. `fields` holds what the type adds (12 §11.2).

    An entry about a flow, a worker or a budget names no execution, and none of its properties.
    """

    event_id: str
    type: str
    at: int
    execution_id: str | None
    namespace: str | None
    lane_id: str | None
    execution_kind: str | None
    fields: Mapping[str, Any]

    @property
    def tags(self) -> Mapping[str, str] | None:
        """The execution's tags, if the entry carries them: a completion does."""
        return self.fields.get("tags")

    def get(self, name: str, default: Any = None) -> Any:
        """A field the type adds, or the default."""
        return self.fields.get(name, default)


def decode_entry(partition: int, entry_id: bytes, flat: Sequence[bytes]) -> Event:
    """An event from a stream entry's alternating names and values."""
    return _decode(partition, entry_id.decode(), [part.decode() for part in flat])


def decode_history(partition: int, stored: Sequence[str]) -> Event:
    """An event from an execution's own short list, which begins with its entry id."""
    return _decode(partition, stored[1], list(stored[2:]))


def _decode(partition: int, entry_id: str, flat: list[str]) -> Event:
    event_id = f"fp:{partition}/{entry_id}"
    try:
        fields: dict[str, Any] = {}
        for i in range(0, len(flat), 2):
            name, value = flat[i], flat[i + 1]
            if name in _PAIRS:
                fields |= _pair(_PAIRS[name], value)
            elif name == "w":
                fields["worker_id"], _, fields["worker_instance_id"] = value.partition(" ")
            else:
                known = _NAMES.get(name, name)
                fields[known] = int(value) if known in _NUMBERS else value
        if fields["type"] == "acquired":
            fields.setdefault("attempt_type", "initial")
        if fields["type"] == "revoked":
            fields["revoked_by"] = fields.pop("requested_by", "operator")
        if fields["type"] == "reclaimed":
            for part in ("lease_id", "lease_epoch", "attempt_id", "attempt_index"):
                fields[f"new_{part}"] = fields.pop(part)
        if "result_ref" in fields:
            fields["result_ref"] = True
        if "tags" in fields:
            fields["tags"] = _tags(fields["tags"])
        default = "default" if "execution_id" in fields else None
        return Event(
            event_id,
            fields.pop("type"),
            int(fields.pop("at", None) or entry_id.partition("-")[0]),
            fields.pop("execution_id", None),
            fields.pop("namespace", default),
            fields.pop("lane_id", default),
            fields.pop("execution_kind") if default else fields.pop("execution_kind", None),
            fields,
        )
    except (KeyError, ValueError, IndexError) as error:
        raise CorruptionError("corruption", f"event {event_id}: {error!r}") from error


_tags = msgspec.json.Decoder(dict[str, str]).decode


def _pair(names: tuple[str, str], text: str) -> dict[str, Any]:
    """`<id>/<number>`, the form of leases and attempts."""
    identity, _, number = text.rpartition("/")
    return {names[0]: identity, names[1]: int(number)}
