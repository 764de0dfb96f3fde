"""Metrics in the format of Prometheus, and a dashboard for them.

>>> from flowfabric import observability
>>> observability.enable()  # before connecting
>>> print(observability.render().decode())  # doctest: +SKIP
"""

from flowfabric.observability.exposition import (
    CONTENT_TYPE,
    dashboard,
    enable,
    render,
    scrape,
    serve,
)
from flowfabric.observability.gauges import Gauges

__all__ = ["CONTENT_TYPE", "Gauges", "dashboard", "enable", "render", "scrape", "serve"]
