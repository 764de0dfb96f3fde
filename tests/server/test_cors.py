"""Pages of other origins (10 §2.3)."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from flowfabric.core.errors import ConfigError
from flowfabric.server.config import ServerConfig
from flowfabric.server.cors import parse_origins
from tests.server.conftest import Serving
from tests.support.http import Http, Response

OURS, THEIRS = "https://a.example", "https://b.example"
LISTED = frozenset({OURS})
ALWAYS = "content-type, idempotency-key, last-event-id"


async def preflight(http: Http, path: str, method: str = "POST", origin: str = OURS) -> Response:
    headers = {"origin": origin, "access-control-request-method": method}
    headers["access-control-request-headers"] = "authorization, x-other"
    return await http.send("OPTIONS", path, headers=headers)


def cors_headers(answer: Response) -> dict[str, str]:
    names = ("access-control-", "vary")
    return {name: value for name, value in answer.headers.items() if name.startswith(names)}


async def test_any_origin_may_send_anything_by_default(http: Http) -> None:
    for path, method in (("/v1/executions", "PUT"), ("/nope", "DELETE"), ("/livez", "GET")):
        asked = await preflight(http, path, method)
        assert (asked.status, asked.body) == (200, b"")
        assert len(asked.headers["x-request-id"]) == 36
        # `*` never covers `authorization` in a browser, so it is named.
        assert cors_headers(asked) == {
            "access-control-allow-origin": "*",
            "access-control-expose-headers": "*",
            "access-control-allow-methods": "*",
            "access-control-allow-headers": "*, authorization",
        }
    answer = await http.get("/v1/executions", origin=OURS)
    assert cors_headers(answer) == {
        "access-control-allow-origin": "*",
        "access-control-expose-headers": "*",
    }


@pytest.mark.parametrize("settings", [{}, {"api_token": "t"}])
async def test_a_list_allows_its_origins(serve: Serving, settings: dict[str, Any]) -> None:
    async with serve(cors_origins=LISTED, **settings) as http:
        for path, method in (("/v1/executions", "PUT"), ("/nope", "DELETE")):
            asked = await preflight(http, path, method)
            assert (asked.status, "x-request-id" in asked.headers) == (200, True)
            assert cors_headers(asked) == {
                "access-control-allow-origin": OURS,
                "access-control-expose-headers": "*",
                "vary": "origin",
                "access-control-allow-methods": "GET, POST, PUT, DELETE",
                "access-control-allow-headers": f"{ALWAYS}, authorization" if settings else ALWAYS,
            }
            other = await preflight(http, path, method, THEIRS)
            assert "access-control-allow-origin" not in other.headers
            assert "access-control-expose-headers" not in other.headers
            assert other.headers["vary"] == "origin"
        for origin, allowed in ((OURS, OURS), (THEIRS, None), ("", None)):
            answer = await http.get("/livez", origin=origin)
            assert answer.headers.get("access-control-allow-origin") == allowed
            assert ("access-control-expose-headers" in answer.headers) == (allowed is not None)
            assert answer.headers["vary"] == "origin"
            assert "access-control-allow-credentials" not in answer.headers


async def test_options_without_a_preflight_is_a_method_like_others(http: Http) -> None:
    answer = await http.send("OPTIONS", "/v1/executions", headers={"origin": OURS})
    assert (answer.status, answer.json) == (405, {"error": "method not allowed"})


@pytest.mark.parametrize("settings", [{}, {"cors_origins": LISTED}])
async def test_metrics_are_outside_cors(serve: Serving, settings: dict[str, Any]) -> None:
    async with serve(**settings) as http:
        answer = await http.get("/metrics", origin=OURS)
        assert (answer.status, cors_headers(answer)) == (200, {})
        asked = await preflight(http, "/metrics", "GET")
        assert (asked.status, cors_headers(asked)) == (405, {})


def test_a_star_among_others_allows_all() -> None:
    assert parse_origins(f"{OURS}, *") is None
    assert parse_origins(None) is None
    assert parse_origins(f" {OURS} ,, {THEIRS},") == {OURS, THEIRS}


def test_unusable_origins_are_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert parse_origins(f"{OURS},https://b\u00fc.example,bad\x01") == {OURS}
    (record,) = caplog.records
    fields = record.__dict__
    assert (fields["action"], fields["invalid"], fields["accepted"]) == (
        *("cors_origins_dropped", 2, 1),
    )


@pytest.mark.parametrize("text", ["", " , ", "https://b\u00fc.example"])
def test_without_a_usable_origin_the_server_does_not_start(text: str) -> None:
    with pytest.raises(ConfigError, match="invalid value for FF_CORS_ORIGINS: "):
        ServerConfig.from_env({"FF_CORS_ORIGINS": text})
