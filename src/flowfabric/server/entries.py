"""Entries of the event feed as JSON (12 §11.2)."""

from typing import Any

from flowfabric.engine.api.events import Event

_COMMON = ("event_id", "type", "at", "execution_id", "namespace", "lane_id", "execution_kind")


def entry_of(event: Event) -> dict[str, Any]:
    """An entry with all its fields; absent ones are left out."""
    known = {name: getattr(event, name) for name in _COMMON}
    return {name: value for name, value in known.items() if value is not None} | dict(event.fields)
