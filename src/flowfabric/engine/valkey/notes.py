"""Small values that server processes share for a limited time, each a string that expires."""

from typing import Any

from flowfabric.engine.api import check
from flowfabric.engine.api.notes import Notes
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls

_OTHER_NAMES = 16
"""How many names of a note are tried to find other nodes."""


class ValkeyNotes(Notes):
    def __init__(self, calls: FunctionCalls) -> None:
        self._calls = calls

    def names_by_node(self, name: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for each in (name, *(f"{name}:{number}" for number in range(_OTHER_NAMES))):
            found.setdefault(self._calls.transport.peer_of(keys.note(each)) or "", each)
        return found

    async def claim_note(self, name: str, value: bytes, ttl_ms: int) -> bytes | None:
        # One command; repeated after a lost reply, it returns the caller's own value.
        ttl = check.positive_ms(ttl_ms, "ttl_ms")
        return await self._send("SET", name, check.binary(value, "value"), "NX", "GET", "PX", ttl)

    async def put_note(self, name: str, value: bytes, ttl_ms: int) -> None:
        ttl = check.positive_ms(ttl_ms, "ttl_ms")
        await self._send("SET", name, check.binary(value, "value"), "PX", ttl)

    async def get_note(self, name: str) -> bytes | None:
        return await self._send("GET", name)

    async def extend_note(self, name: str, ttl_ms: int) -> None:
        await self._send("PEXPIRE", name, check.positive_ms(ttl_ms, "ttl_ms"))

    async def drop_note(self, name: str) -> None:
        await self._send("DEL", name)

    async def _send(self, command: str, name: str, *arguments: Any) -> Any:
        key = keys.note(check.text(name, "name"))
        return await self._calls.transport.call(command, key, *arguments, key=key, replay_safe=True)
