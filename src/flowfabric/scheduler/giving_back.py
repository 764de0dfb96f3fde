"""Releases leases that were claimed but will not run here, so that other workers get them."""

import asyncio
import logging
from collections.abc import Iterable

from flowfabric.core.contracts.leases import Handle
from flowfabric.engine.api.backend import Backend

log = logging.getLogger(__name__)


async def give_back(backend: Backend, handles: Iterable[Handle], pause_s: float = 0.0) -> int:
    """Return leases, best effort: the others lapse. The result is how many were returned."""
    if pause_s:
        await asyncio.sleep(pause_s)
    calls = (backend.executions.delay(handle, 1) for handle in handles)
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for error in failed:
        log.debug("could not release a lease: %s", error)
    return len(outcomes) - len(failed)
