"""Small values that server processes share for a limited time, each a string that expires."""

from typing import Any

from flowfabric.engine.api import check
from flowfabric.engine.api.notes import Notes
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls


class ValkeyNotes(Notes):
    def __init__(self, calls: FunctionCalls) -> None:
        self._calls = calls

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
