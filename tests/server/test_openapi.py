"""The OpenAPI document describes every route, and its schemas are those that validate."""

from __future__ import annotations

import re
from typing import Any

from flowfabric.server.openapi import document, page
from flowfabric.server.routes.table import all_routes
from tests.server.conftest import Serving
from tests.support.http import Http


def refs(value: Any) -> set[str]:
    """Every schema that the document refers to."""
    if isinstance(value, dict):
        found: set[str] = set()
        for name, each in value.items():  # pyright: ignore[reportUnknownVariableType]
            found |= {each} if name == "$ref" else refs(each)
        return found
    if isinstance(value, list):
        return {ref for each in value for ref in refs(each)}  # pyright: ignore[reportUnknownVariableType]
    return set()


def test_every_route_is_described_once() -> None:
    made = document(all_routes())
    described = {
        (method.upper(), path) for path, methods in made["paths"].items() for method in methods
    }
    public = [route for route in all_routes() if not route.internal]
    assert described == {(route.method, route.template) for route in public}
    names = [each["operationId"] for path in made["paths"].values() for each in path.values()]
    assert len(set(names)) == len(names)


def test_every_route_has_a_summary_answers_and_its_parameters() -> None:
    for path, methods in document(all_routes())["paths"].items():
        for operation in methods.values():
            assert operation["summary"].endswith((".", "…")) or operation["description"]
            assert operation["responses"].keys() > {"default"}, path
            named = {
                each["name"] for each in operation.get("parameters", ()) if each["in"] == "path"
            }
            assert named == set(re.findall(r"\{(\w+)\}", path))


def test_every_reference_resolves() -> None:
    made = document(all_routes())
    kinds = ("schemas", "responses")
    known = {f"#/components/{kind}/{name}" for kind in kinds for name in made["components"][kind]}
    assert refs(made) <= known


def test_the_body_of_create_is_the_struct_that_validates() -> None:
    made = document(all_routes())
    body = made["paths"]["/v1/executions"]["post"]["requestBody"]["content"]["application/json"]
    name = body["schema"]["$ref"].rpartition("/")[2]
    schema = made["components"]["schemas"][name]
    assert schema["required"] == ["namespace", "execution_kind"]
    assert schema["properties"]["priority"]["anyOf"][0]["minimum"] == -(2**31)


def test_the_page_shows_every_path() -> None:
    shown = page(document(all_routes()))
    for route in all_routes():
        assert (route.template in shown) is not route.internal
    assert "<script" not in shown


async def test_both_are_served(http: Http, serve: Serving) -> None:
    found = await http.get("/openapi.json")
    assert (found.status, found.json["openapi"]) == (200, "3.1.0")
    shown = await http.get("/docs")
    assert shown.headers["content-type"] == "text/html; charset=utf-8"
    async with serve(api_token="t") as closed:
        assert (await closed.get("/openapi.json")).status == 401
        assert (await closed.with_token("t").get("/openapi.json")).status == 200
