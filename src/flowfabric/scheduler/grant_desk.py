"""Grants for workers elsewhere, which may wait for them where the claims of workers wait."""

import asyncio
from typing import Any

from flowfabric.core.contracts.leases import ClaimGrant
from flowfabric.core.errors import EngineError
from flowfabric.engine.api.backend import Backend
from flowfabric.scheduler.claim_desk import ClaimDesk, Look, log
from flowfabric.scheduler.grant_search import GrantRequest
from flowfabric.scheduler.grants import WorkerDraining, WorkerGrants

_DRAIN_PAUSE_S = 1.0
"""How long a drained worker waits for its answer at least, if it waits at all."""


class GrantDesk:
    """Reserves work for workers elsewhere, and lets them wait for it.

    Workers that offer the same share hints and one doorbell, also with those that claim.
    """

    def __init__(self, backend: Backend, desk: ClaimDesk, grants: WorkerGrants) -> None:
        self._backend = backend
        self._desk = desk
        self._grants = grants

    async def claim(
        self, request: GrantRequest, wait_s: float, given_up: asyncio.Future[Any]
    ) -> ClaimGrant | None:
        """Reserve one execution; wait for one, at most `wait_s`.

        The wait also ends when `given_up` is done. A grant that comes after that is returned.
        """
        offer = self._desk.offer(
            (request.lane_id,), request.offered, request.namespaces, request.worker_instance_id
        )
        draining = False

        async def look() -> Look[ClaimGrant | None]:
            nonlocal draining
            found = await self._grants.claim_hinted(request, offer.lanes[request.lane_id])
            draining = isinstance(found, WorkerDraining)
            grant = found if isinstance(found, ClaimGrant) else None
            return Look(grant, is_last=draining, refused=draining)

        grant = await self._desk.serve(offer, look, wait_s, given_up)
        if draining and wait_s:
            await asyncio.wait((given_up,), timeout=min(wait_s, _DRAIN_PAUSE_S))
        if grant is not None and given_up.done():
            await self.release(grant)
            return None
        return grant

    async def release(self, grant: ClaimGrant) -> None:
        """Return a grant that its worker has not received."""
        try:
            await self._backend.claims.release_grant(grant)
        except EngineError as error:
            # The grant expires.
            log.debug("cannot return the grant of %s: %s", grant.execution_id, error)
