"""Repeats of a request with the same `Idempotency-Key` get the first answer (10 §11.9)."""

import asyncio
import contextlib
import hashlib
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from flowfabric.core.errors import EngineError
from flowfabric.core.ids import new_uuid
from flowfabric.engine.api.notes import Notes
from flowfabric.server.calls import Call
from flowfabric.server.exchange import EventStream
from flowfabric.server.problems import Problem, invalid, problem_of
from flowfabric.server.wire import Reply, encode

log = logging.getLogger(__name__)
Answer = Reply | EventStream
Run = Callable[[Call[Any, Any], bytes], Awaitable[Answer]]
_KEPT_MS = 86_400_000
_RUNNING_MS = 60_000
_RENEW_S = 20.0
_STORED = frozenset({409, 422})
_is_key = re.compile(rb"[ -~]{1,255}").fullmatch
_pack = msgspec.msgpack.Encoder().encode


class _Note(msgspec.Struct, array_like=True):
    digest: bytes
    """A digest of query string and body, because another request must not get this answer."""
    owner: str
    reply: tuple[int, str, bytes] | None = None
    """Status, content type and body; None while the first call runs."""


_unpack = msgspec.msgpack.Decoder(_Note).decode


class IdempotentReplies:
    """Stores the answers of requests that carry a key."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    async def run(self, key: bytes, call: Call[Any, Any], body: bytes, handle: Run) -> Answer:
        """The stored answer of an earlier request with this key, or a new one."""
        if _is_key(key) is None:
            raise invalid("Idempotency-Key", "must be 1 to 255 printable ASCII characters")
        request = call.request
        scope = b"\n".join((request.method.encode(), request.path, call.caller.token_id.encode()))
        name = "idem:" + hashlib.sha256(scope + b"\n" + key).hexdigest()
        digest = hashlib.sha256(request.query + b"\n" + body).digest()
        mine = _Note(digest, new_uuid())
        found = await self._notes.claim_note(name, _pack(mine), _RUNNING_MS)
        if found is not None:
            other = _unpack(found)
            if other.digest != digest:
                raise Problem("idempotency_conflict", "this key was used for another request")
            if other.reply is not None:
                return Reply(*_reordered(other.reply), headers=(("Idempotency-Replayed", "true"),))
            # After a lost reply, our repeated command finds our own marker.
            if other.owner != mine.owner:
                raise Problem("idempotency_in_progress", "the first request is still running")
        return await self._first(name, mine, call, body, handle)

    async def _first(
        self, name: str, mine: _Note, call: Call[Any, Any], body: bytes, handle: Run
    ) -> Answer:
        keeping = asyncio.ensure_future(self._keep(name))
        stored = False
        try:
            try:
                answer = await handle(call, body)
            except (EngineError, Problem) as error:
                problem = problem_of(error) if isinstance(error, EngineError) else error
                if problem.status not in _STORED:
                    raise
                envelope = encode(problem.body(call.request.request_id))
                answer = Reply(problem.status, envelope, headers=tuple(problem.headers.items()))
            if isinstance(answer, Reply) and (answer.status < 300 or answer.status in _STORED):
                mine.reply = (answer.status, answer.content_type, answer.body)
                stored = await self._store(name, mine)
            return answer
        finally:
            keeping.cancel()
            if not stored:
                with contextlib.suppress(EngineError):
                    await self._notes.drop_note(name)

    async def _store(self, name: str, note: _Note) -> bool:
        try:
            await self._notes.put_note(name, _pack(note), _KEPT_MS)
        except EngineError as error:
            # The call took effect, so its caller must get the answer anyway.
            extra = {"action": "answer_not_stored", "error": str(error)}
            log.warning("cannot store a response for repeated requests: %s", error, extra=extra)
            return False
        return True

    async def _keep(self, name: str) -> None:
        while True:
            await asyncio.sleep(_RENEW_S)
            try:
                await self._notes.extend_note(name, _RUNNING_MS)
            except EngineError as error:
                log.debug("cannot renew the marker of an idempotent request: %s", error)


def _reordered(reply: tuple[int, str, bytes]) -> tuple[int, bytes, str]:
    status, content_type, body = reply
    return status, body, content_type
