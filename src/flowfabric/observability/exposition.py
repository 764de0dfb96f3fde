"""Metrics for Prometheus: rendered for your own web server, or served on a separate port."""

import asyncio
import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from importlib.resources import files

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    REGISTRY,
    CollectorRegistry,
    generate_latest,
    start_http_server,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from flowfabric.core.errors import ConfigError
from flowfabric.engine import metrics
from flowfabric.engine.api.backend import Backend
from flowfabric.observability.gauges import Gauges

log = logging.getLogger(__name__)

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_REFRESH_S = 2.0


class _Numbers(Collector):
    """FlowFabric's collector in the registry of prometheus-client."""

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Generator[Metric]:
        meter = metrics.active()
        if meter is None:
            return
        histograms = {name: series.copy() for name, series in meter.histograms.items()}
        shown = meter.shown()
        for metric in metrics.METRICS.values():
            if metric.kind == "histogram":
                yield _histogram(metric, histograms[metric.name])
            else:
                yield _numbers(metric, shown[metric.name])


def _numbers(metric: metrics.Metric, values: Mapping[metrics.Labels, float]) -> Metric:
    form = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = form(metric.name, metric.help, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _histogram(metric: metrics.Metric, found: dict[metrics.Labels, metrics.Histogram]) -> Metric:
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    bounds = [*map(str, metric.buckets), "+Inf"]
    for labels, histogram in found.items():
        below, buckets = 0, list[tuple[str, float]]()
        for bound, count in zip(bounds, histogram.counts, strict=True):
            below += count
            buckets.append((bound, below))
        family.add_metric(labels, buckets, histogram.total)
    return family


# Registered beside the application's own metrics; empty while metrics are off.
REGISTRY.register(_Numbers())


def enable() -> metrics.Meter:
    """Start collecting metrics in this process. Call it before anything connects.

    >>> meter = enable()
    """
    return metrics.enable()


def render() -> bytes:
    """All metrics of this process as text; gauges of the deployment as they were last read.

    >>> text = render().decode()
    """
    return generate_latest(REGISTRY)


_reading: set[asyncio.Task[None]] = set()


async def scrape(gauges: Gauges) -> bytes:
    """Read the gauges of the deployment, then `render`. Gauges that are slow keep their values."""
    reading = asyncio.create_task(gauges.refresh(), name="ff-gauges")
    # Not cancelled when it is late, because a large deployment may always take longer.
    _reading.add(reading)
    reading.add_done_callback(_reading.discard)
    await asyncio.wait({reading}, timeout=_REFRESH_S)
    if reading.done():
        reading.result()
    return render()


class _Scraped(CollectorRegistry):
    """The registry of the process, with gauges read at every scrape."""

    def __init__(self, refresh: Callable[[], None]) -> None:
        super().__init__()
        self._refresh = refresh

    def collect(self) -> Generator[Metric]:
        self._refresh()
        yield from REGISTRY.collect()


class MetricsServer:
    """Serves metrics at `/metrics` of a port until closed.

    >>> server = serve(backend, 9464)  # doctest: +SKIP
    """

    def __init__(self, backend: Backend, port: int, host: str) -> None:
        self._gauges = Gauges(backend, metrics.enable())
        self._loop = asyncio.get_running_loop()
        try:
            self._server, self._thread = start_http_server(port, host, _Scraped(self._refresh))
        except OSError as error:
            problem = f"cannot listen on {host}:{port}: {error.strerror or error}"
            raise ConfigError("metrics", problem, "port") from error
        self.port: int = self._server.server_port

    def _refresh(self) -> None:
        """Read the gauges, from a server thread; skipped while the loop is blocked or closed."""
        reading = self._gauges.refresh()
        try:
            asyncio.run_coroutine_threadsafe(reading, self._loop).result(_REFRESH_S)
        except RuntimeError:
            reading.close()
        except TimeoutError:
            log.debug("gauges keep their last values: the event loop is busy")

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(backend: Backend, port: int, host: str = "127.0.0.1") -> MetricsServer:
    """Serve the metrics of this process on a port; `0` picks a free one. Close the result."""
    return MetricsServer(backend, port, host)


def dashboard() -> bytes:
    """A dashboard for Grafana, as JSON to import.

    >>> import json
    >>> json.loads(dashboard())["title"]
    'FlowFabric'
    """
    return files("flowfabric.observability").joinpath("grafana.json").read_bytes()
