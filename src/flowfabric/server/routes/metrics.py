"""Metrics for Prometheus, open to everyone unless the settings say otherwise (10 §9)."""

from flowfabric.engine.metrics import Meter
from flowfabric.observability import CONTENT_TYPE, render, scrape
from flowfabric.server.calls import Call
from flowfabric.server.queries import NoQuery
from flowfabric.server.routing import Routes
from flowfabric.server.schemas import Content
from flowfabric.server.wire import Reply

routes = Routes()
PATH = "/metrics"
_METHODS = frozenset(
    ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"]
)


@routes.get(PATH, scope=None, counted=False, cors=False, answers={200: Content("text/plain")})
async def metrics(call: Call[None, NoQuery]) -> Reply:
    """Render the metrics of this process and of the deployment."""
    gauges = call.services.gauges
    page = render() if gauges is None else await scrape(gauges)
    return Reply(200, page, CONTENT_TYPE)


class RequestMeter:
    """Counts requests, except those for the metrics themselves."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def __call__(self, method: str, template: str, status: int, seconds: float) -> None:
        if template == PATH:
            return
        labels = method if method in _METHODS else "OTHER", template, str(status)
        self._meter.count("ff_http_requests_total", *labels)
        self._meter.observe("ff_http_request_duration_seconds", seconds, *labels)
