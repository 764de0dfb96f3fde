"""What the server can do, for programs and for people (10 §11.2)."""

from typing import Any

from flowfabric.server.calls import Call
from flowfabric.server.queries import NoQuery
from flowfabric.server.routing import Routes
from flowfabric.server.schemas import Content
from flowfabric.server.wire import Reply

routes = Routes()


@routes.get("/openapi.json", scope="read", answers={200: dict[str, Any]})
async def openapi(call: Call[None, NoQuery]) -> Reply:
    """Read this API as an OpenAPI 3.1 document."""
    return Reply(200, call.services.description[0])


@routes.get("/docs", scope="read", answers={200: Content("text/html")})
async def docs(call: Call[None, NoQuery]) -> Reply:
    """Show this API as an HTML page."""
    return Reply(200, call.services.description[1], "text/html; charset=utf-8")
