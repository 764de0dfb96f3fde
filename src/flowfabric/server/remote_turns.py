"""Repeated claims of remote workers: any server finds what the first request claimed.

The first request with an id stores a note with a random seed before it claims, and the ids of its
leases contain the seed. So a repeat finds the leases even if the first server was killed right
after the claim.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from flowfabric.core.contracts.leases import Claim
from flowfabric.core.errors import NotFoundError, TransportError, invalid_input
from flowfabric.core.ids import new_uuid
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.api.workers import WorkerLease
from flowfabric.scheduler.giving_back import give_back

_SEED = slice(8, 32)
"""The part of a UUID that is the seed. The part before it distinguishes the calls of one request;
the engine numbers the leases of a call with the part after it."""
_CALL = slice(32)
"""The common part of the lease ids of one call."""
_RELEASED = b"released"
_PROMPT_S = 0.25
_AWAY_S = 5.0
"""For how long to prefer other nodes than one that has not answered."""
_MOST_TURNS = 128
"""How many requests may share one id. Each reads the notes of all earlier ones."""


class Turn(msgspec.Struct, frozen=True):
    """The place of a request among those with the same id, the first of which has number 0."""

    seed: str
    number: int
    ttl_ms: int
    """How long repeats are recognised."""

    def new_request_id(self) -> str:
        """The id of one call of the engine."""
        call = new_uuid()
        return call[: _SEED.start] + self.seed + call[_SEED.stop :]

    def note(self, number: int) -> str:
        """The name of the note for the request with this number, which is not the first."""
        return f"remote:{self.seed}:{number}"


class RemoteTurns:
    """Lets repeats of a request find what it claimed."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._away: dict[str, float] = {}

    async def take(
        self, name: str, ttl_ms: int, requests: Mapping[str, ClaimRequest]
    ) -> tuple[Turn, list[Claim]]:
        """Take the next turn under this name; also returns what earlier turns claimed."""
        notes, mine = self._backend.notes, new_uuid().encode()
        name, found = await self._first(name, mine, ttl_ms)
        # After a lost reply, our repeated command finds our own note.
        turn = Turn((mine if found is None else found).decode()[_SEED], 0, ttl_ms)
        if found in (None, mine):
            return turn, []
        note, last = name, found
        while found not in (None, mine):
            if turn.number + 1 == _MOST_TURNS:
                problem = f"was used {_MOST_TURNS} times; send a new one with each claim"
                raise invalid_input("request_id", f"{problem}, and the same one only to repeat it")
            # What this turn claims must be found, too.
            await notes.extend_note(note, ttl_ms)
            turn, last = msgspec.structs.replace(turn, number=turn.number + 1), found
            note = turn.note(turn.number)
            found = await notes.claim_note(note, mine, ttl_ms)
        claims = await self.claims(turn.seed, requests)
        if last == _RELEASED:
            # Its server may have been killed before it released them all.
            await give_back(self._backend, [claim.handle for claim in claims])
            return turn, []
        return turn, claims

    async def _first(self, name: str, mine: bytes, ttl_ms: int) -> tuple[str, bytes | None]:
        """The name of the first note, and what it holds.

        In a cluster, its node may be away: another name then leads to another one. If the node
        comes or goes between a request and its repeat, the leases of the request expire.
        """
        now, notes = time.monotonic(), self._backend.notes
        names = notes.names_by_node(name).items()
        *others, (_, last) = sorted(names, key=lambda each: self._away.get(each[0], 0.0) > now)
        for node, other in others:
            with contextlib.suppress(TimeoutError, TransportError):
                async with asyncio.timeout(_PROMPT_S):
                    return other, await notes.claim_note(other, mine, ttl_ms)
            self._away[node] = time.monotonic() + _AWAY_S
        return last, await notes.claim_note(last, mine, ttl_ms)

    async def look(self, name: str, requests: Mapping[str, ClaimRequest]) -> list[Claim]:
        """What the requests under this name claimed, without taking a turn."""
        found = await self._backend.notes.get_note(name)
        return [] if found is None else await self.claims(found.decode()[_SEED], requests)

    async def release(self, turn: Turn | None, claims: Sequence[Claim]) -> None:
        """Release what was claimed for a disconnected client, unless a repeat got it."""
        if not claims:
            return
        if turn is not None:
            following = turn.note(turn.number + 1)
            found = await self._backend.notes.claim_note(following, _RELEASED, turn.ttl_ms)
            if found not in (None, _RELEASED):
                return
        await give_back(self._backend, [claim.handle for claim in claims])

    async def claims(self, seed: str, requests: Mapping[str, ClaimRequest]) -> list[Claim]:
        """The claims of the worker's live leases whose ids contain the seed, oldest first."""
        instance = next(iter(requests.values())).worker_instance_id
        now = await self._backend.meta.server_time_ms()
        leases: list[WorkerLease] = []
        after: str | None = ""
        while after is not None:
            page = await self._backend.workers.list_worker_leases(instance, after)
            leases += [
                each
                for each in page.entries
                if each.lease_id[_SEED] == seed and each.expires_at_ms > now
            ]
            after = page.cursor
        leases.sort(key=lambda each: (each.expires_at_ms, each.lease_id))
        lanes = await asyncio.gather(*map(self._lane, leases))
        batches = Counter(
            (lane, each.execution_id.tag, each.lease_id[_CALL])
            for lane, each in zip(lanes, leases, strict=True)
            if lane in requests
        )
        claims: list[Claim] = []
        for (lane, tag, prefix), count in batches.items():
            _, again = await self._backend.claims.complete_and_claim(
                tag, (), requests[lane], count, request_id=f"{prefix}0000"
            )
            claims += again.claims
        return claims

    async def _lane(self, lease: WorkerLease) -> str:
        try:
            return (await self._backend.reads.read_execution_info(lease.execution_id)).lane_id
        except NotFoundError:
            return ""
