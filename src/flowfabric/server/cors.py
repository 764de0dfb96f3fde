"""Cross-origin requests: every origin, or an exact list (10 §2.3)."""

import logging
import re
from collections.abc import Mapping

from flowfabric.core.environment import invalid

log = logging.getLogger(__name__)
VARIABLE = "FF_CORS_ORIGINS"
_is_header_value = re.compile(r"[\x20-\x7e]+").fullmatch
Header = tuple[bytes, bytes]
_VARY: Header = (b"vary", b"origin")
_EXPOSED: Header = (b"access-control-expose-headers", b"*")
"""Pages may read every header of an answer, such as `Retry-After` and `X-FF-Public-State`."""


def parse_origins(text: str | None) -> frozenset[str] | None:
    """The allowed origins; None means any."""
    if text is None:
        return None
    named = [origin for part in text.split(",") if (origin := part.strip())]
    if not named:
        raise invalid(VARIABLE, "must not be empty; list origins, or use * for all")
    if "*" in named:
        return None
    usable = [origin for origin in named if _is_header_value(origin)]
    if not usable:
        raise invalid(VARIABLE, "must contain an origin that can be sent as a header")
    if len(usable) < len(named):
        numbers = {"invalid": len(named) - len(usable), "accepted": len(usable)}
        extra = {"action": "cors_origins_dropped", **numbers}
        log.warning("ignored origins in %s that cannot be sent as headers", VARIABLE, extra=extra)
    return frozenset(usable)


class Cors:
    """The headers for browsers of other origins."""

    def __init__(self, origins: frozenset[str] | None, *, with_token: bool) -> None:
        self._origins = origins
        allowed = "content-type, idempotency-key, last-event-id"
        self._headers = f"{allowed}, authorization" if with_token else allowed

    def headers(self, origin: bytes | None) -> list[Header]:
        """Headers of every answer to a request of this origin."""
        if self._origins is None:
            return [(b"access-control-allow-origin", b"*"), _EXPOSED]
        if origin is None or origin.decode("latin-1") not in self._origins:
            return [_VARY]
        return [(b"access-control-allow-origin", origin), _EXPOSED, _VARY]

    def preflight(self, method: str, headers: Mapping[bytes, bytes]) -> list[Header] | None:
        """The headers of the answer to a preflight; None if the request is not a preflight."""
        origin = headers.get(b"origin")
        if method != "OPTIONS" or not origin or b"access-control-request-method" not in headers:
            return None
        found = self.headers(origin)
        if self._origins is None:
            # Browsers do not count `authorization` among the headers that `*` allows.
            methods, wanted = "*", "*, authorization"
        else:
            methods, wanted = "GET, POST, PUT, DELETE", self._headers
        return [
            *found,
            (b"access-control-allow-methods", methods.encode()),
            (b"access-control-allow-headers", wanted.encode()),
        ]
