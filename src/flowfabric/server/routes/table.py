"""Every route of the server, in the order in which the documentation lists them."""

import msgspec

from flowfabric.server.routes import (
    admin,
    budgets,
    bulk,
    claims,
    description,
    engine,
    events,
    execution_reads,
    executions,
    fleet,
    flows,
    graphs,
    health,
    metrics,
    remote,
    remote_attempts,
    streams,
    waitpoints,
)
from flowfabric.server.routing import Route

_RESOURCES = (
    *(executions, execution_reads, bulk, waitpoints, streams, claims, events),
    *(remote, remote_attempts, flows, graphs, budgets, fleet, admin, health, metrics),
    *(description, engine),
)


def all_routes(*, metrics_auth: bool = False) -> list[Route]:
    """The routes of every resource; with `metrics_auth`, metrics need a token, too."""
    found = [route for resource in _RESOURCES for route in resource.routes.found]
    if not metrics_auth:
        return found
    return [
        msgspec.structs.replace(route, scope="read") if route.template == metrics.PATH else route
        for route in found
    ]
