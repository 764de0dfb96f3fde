"""The OpenAPI document, and a page that shows it, both from the route table (10 §11.2)."""

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast, get_type_hints

import msgspec

from flowfabric.core.contracts import NamedOutcome, kind_of
from flowfabric.core.ids import ExecutionId
from flowfabric.core.policy import ExecutionPolicy
from flowfabric.core.version import __version__
from flowfabric.server.bodies import U64, LaneName, PolicyObject, Uuid
from flowfabric.server.routing import Route
from flowfabric.server.schemas import EVENTS, OMITTED, RAW, Content, Listed, Variants
from flowfabric.server.wire import variant_name

_REF = "#/components/schemas/{name}"
_UUID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_ID = rf"^\{{fp:[0-9]{{1,5}}\}}:{_UUID}$"
_parameter = re.compile(r"([\w-]+)/\{(\w+)\}").findall
_PATH_ID = {"type": "string", "pattern": rf"^(\{{fp:[0-9]{{1,5}}\}}:|[0-9]{{1,5}}-){_UUID}$"}
_PATH_UUID = {"type": "string", "format": "uuid"}
# The type of the path parameter after each of these segments; any other is text.
_PATH_SCHEMAS: dict[str, dict[str, Any]] = {
    "executions": _PATH_ID,
    "groups": _PATH_ID,
    **dict.fromkeys(("flows", "budgets", "quotas", "rotations", "waitpoints"), _PATH_UUID),
    "lanes": msgspec.json.schema(LaneName),
    "attempts": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
}
_KEY = {"type": "string", "pattern": "^[ -~]{1,255}$"}
_FORMS: dict[str, dict[str, Any]] = {
    RAW: {"description": "The payload itself; the other fields are query parameters."},
    "application/x-ndjson": {"type": "string", "description": "One item per line."},
}
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error", "kind", "retryable", "code", "class", "group", "request_id"],
    "properties": {
        "error": {"type": "string"},
        "kind": {"type": "string"},
        "code": {"type": "string"},
        "class": {"type": "string"},
        "group": {"type": "string"},
        "retryable": {"type": "boolean"},
        "detail": {"type": "string"},
        "details": {"type": "array", "items": {"type": "string"}},
        "ambiguous": {"type": "boolean"},
        "request_id": {"type": "string"},
        "retry_after_ms": {"type": "integer"},
        "limit_bytes": {"type": "integer"},
        "route": {"type": "string"},
        "rotation_id": {"type": "string"},
        "status": {"type": "string"},
        "failing": {"type": "array", "items": {"type": "string"}},
    },
}
_UNAUTHORIZED: dict[str, Any] = {
    "type": "object",
    "required": ["error", "code"],
    "properties": {"error": {"type": "string"}, "code": {"type": "string"}},
}
_STATUSES = {200: "Success", 201: "Created", 202: "Not finished yet", 204: "No work available"}
_REFUSALS = {
    400: "The request is malformed or breaks a rule",
    401: "The token is missing or invalid",
    403: "The token does not allow this request",
    404: "Not found",
    409: "The current state does not allow it, or the Idempotency-Key was used for another request",
    410: "The events after this cursor were trimmed",
    413: "The body is too large",
    415: "The content type of the body is not supported",
    422: "The body does not match the schema",
    429: "Too many concurrent requests, or the rate limit is reached",
    503: "Unavailable; try again later",
    504: "The operation timed out",
}


def _schema_of(kind: Any) -> dict[str, Any]:
    if kind is ExecutionId:
        return {"type": "string", "pattern": _ID}
    if kind is U64:
        return {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}
    if kind is Uuid:
        return {"type": "string", "format": "uuid"}
    if kind is PolicyObject:
        return {"$ref": _REF.format(name=ExecutionPolicy.__name__)}
    raise TypeError(f"no schema for {kind!r}")


def _refs(schema: Any) -> set[str]:
    """The names of the schemas that a schema refers to."""
    if isinstance(schema, list):
        return {name for each in cast("list[Any]", schema) for name in _refs(each)}
    if not isinstance(schema, dict):
        return set()
    members = cast("dict[str, Any]", schema)
    own = {members["$ref"].rpartition("/")[2]} if "$ref" in members else set[str]()
    return own | {name for each in members.values() for name in _refs(each)}


def _inside(kind: Any) -> Sequence[Any]:
    """The types that the document needs schemas of."""
    if isinstance(kind, Variants):
        return kind.outcomes
    if isinstance(kind, Listed):
        return (kind.row,)
    return () if kind in (None, bytes) or isinstance(kind, Content) else (kind,)


class _Schemas:
    """The schemas of every type that the routes use."""

    def __init__(self, routes: Iterable[Route]) -> None:
        kinds: dict[Any, None] = {ExecutionPolicy: None}
        for route in routes:
            for each in (_body(route), *route.answers.values()):
                kinds |= dict.fromkeys(_inside(each))
        found, self.components = msgspec.json.schema_components(
            kinds, schema_hook=_schema_of, ref_template=_REF
        )
        self._found = dict(zip(kinds, found, strict=True))
        answers = [each for route in routes for each in route.answers.values() if _inside(each)]
        for name in self._parts([self.of(each) for each in answers]):
            schema = self.components[name]
            if "properties" in schema:
                omitted = OMITTED.get(name, ())
                schema["required"] = [each for each in schema["properties"] if each not in omitted]

    def _parts(self, schemas: list[Any]) -> set[str]:
        """The names of the schemas that these are made of. Requests and answers share none."""
        names: set[str] = set()
        while schemas:
            for name in _refs(schemas.pop()) - names:
                names.add(name)
                schemas.append(self.components[name])
        return names

    def of(self, kind: Any) -> dict[str, Any]:
        if isinstance(kind, Variants):
            return {"oneOf": [self._variant(each, kind) for each in kind.outcomes]}
        if isinstance(kind, Listed):
            return {
                "type": "object",
                "required": [kind.noun, "next_cursor"],
                "properties": {
                    kind.noun: {"type": "array", "items": self._found[kind.row]},
                    "next_cursor": {"type": ["string", "null"]},
                },
            }
        return self._found[kind]

    def _variant(self, outcome: type[NamedOutcome[Any]], among: Variants) -> dict[str, Any]:
        name = variant_name(kind_of(outcome))
        fields = [each for each in outcome.__struct_fields__ if each not in among.omit]
        if not fields:
            return {"const": name}
        properties: dict[str, Any] = dict(self.components[outcome.__name__]["properties"])
        properties |= {each: {"type": "string"} for each in among.texts if each in fields}
        always = [each for each in fields if each not in among.optional]
        sent: dict[str, Any] = {"type": "object", "required": always}
        sent["properties"] = {each: properties[each] for each in fields}
        return {"type": "object", "required": [name], "properties": {name: sent}}


def _body(route: Route) -> Any:
    return route.documented or route.body


def _answers(route: Route, schemas: _Schemas) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for status, kind in route.answers.items():
        answer: dict[str, Any] = {"description": _STATUSES[status]}
        if isinstance(kind, Content):
            schema = {"type": "string"} if kind is EVENTS else {}
            answer["content"] = {kind.media_type: {"schema": schema} if schema else {}}
        elif kind is not None:
            answer["content"] = {"application/json": {"schema": schemas.of(kind)}}
        found[str(status)] = answer
    for status in (*sorted(route.refusals), "default"):
        found[str(status)] = {"$ref": f"#/components/responses/{status}"}
    return found


def _refusals() -> dict[str, Any]:
    named = {str(status): text for status, text in _REFUSALS.items()}
    named["default"] = "Unexpected error"
    return {name: _refusal(text, name) for name, text in named.items()}


def _refusal(text: str, status: str) -> dict[str, Any]:
    schema = {"$ref": _REF.format(name="Unauthorized" if status == "401" else "Error")}
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _headers(route: Route) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": name, "in": "header", "required": True, "schema": {"type": "string"}}
        for name in route.headers
    ]
    if EVENTS in route.answers.values():
        found.append({"name": "Last-Event-ID", "in": "header", "schema": {"type": "string"}})
    if route.method in ("POST", "PUT"):
        found.append({"name": "Idempotency-Key", "in": "header", "schema": _KEY})
    return found


def _raw_parameters(route: Route, schemas: _Schemas) -> list[dict[str, Any]]:
    """The fields of a body as query parameters, for uploads whose body is only the payload."""
    properties: dict[str, Any] = schemas.components[_body(route).__name__]["properties"]
    hint = f"Only with {RAW}."
    found: list[dict[str, Any]] = []
    for name, schema in properties.items():
        if "payload" not in name or name == "payload_encoding":
            is_json = name in ("tags", "policy", "depends_on")
            form = {"content": {"application/json": {"schema": schema}}} if is_json else {}
            found.append(
                {"name": name, "in": "query", "description": hint} | (form or {"schema": schema})
            )
    return found


def _parameters(route: Route, schemas: _Schemas) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for noun, name in _parameter(route.template):
        schema = _PATH_SCHEMAS.get(noun, {"type": "string"})
        found.append({"name": name, "in": "path", "required": True, "schema": schema})
    found += _headers(route)
    if RAW in route.forms:
        found += _raw_parameters(route, schemas)
    hints = get_type_hints(route.query, include_extras=True)
    for field in msgspec.structs.fields(route.query):
        schema = msgspec.json.schema(hints[field.name])
        default: Any = field.default
        if default not in (None, msgspec.NODEFAULT, "", ()):
            schema["default"] = default
        found.append({"name": field.encode_name, "in": "query", "schema": schema})
    return found


def _operation(route: Route, schemas: _Schemas) -> dict[str, Any]:
    summary, _, more = (route.handler.__doc__ or "").partition("\n")
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": summary,
        "tags": [route.template.split("/")[2 if route.template.startswith("/v1/") else 1]],
    }
    if more.strip():
        operation["description"] = " ".join(more.split())
    if parameters := _parameters(route, schemas):
        operation["parameters"] = parameters
    if (body := _body(route)) is not None:
        content: dict[str, Any] = {"application/json": {"schema": schemas.of(body)}}
        content |= {form: {"schema": _FORMS[form]} for form in route.forms}
        operation["requestBody"] = {"required": not route.optional_body, "content": content}
    operation["responses"] = _answers(route, schemas)
    operation["security"] = [] if route.scope is None else [{"bearer": []}]
    if route.scope is not None:
        operation["x-scope"] = route.scope
    return operation


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    routes = [route for route in routes if not route.internal]
    schemas = _Schemas(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.template, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "FlowFabric",
            "version": __version__,
            "description": "Durable execution for Python on Valkey.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas.components | {"Error": _ERROR, "Unauthorized": _UNAUTHORIZED},
            "responses": _refusals(),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
code,pre{font:14px/1.4 ui-monospace,monospace}pre{background:#8881;padding:.75rem;overflow:auto}
summary{cursor:pointer;padding:.25rem 0}b{display:inline-block;min-width:4rem}
table{border-collapse:collapse}td,th{text-align:left;padding:.1rem .75rem .1rem 0}
:root{color-scheme:light dark}
"""


def page(document: Mapping[str, Any]) -> str:
    """The document for people: one page without scripts."""
    by_tag: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            by_tag.setdefault(operation["tags"][0], []).append(_entry(path, method, operation))
    sections = "".join(
        f"<h2>{html.escape(tag)}</h2>{''.join(entries)}" for tag, entries in by_tag.items()
    )
    names = "".join(
        f"<details><summary><code>{html.escape(name)}</code></summary>{_json(schema)}</details>"
        for name, schema in document["components"]["schemas"].items()
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>FlowFabric HTTP API</title>'
        f"<style>{_STYLE}</style><h1>FlowFabric HTTP API</h1>"
        f"<p>Version {html.escape(document['info']['version'])}. "
        f'<a href="/openapi.json">OpenAPI document</a></p>{sections}<h2>Types</h2>{names}</html>'
    )


def _entry(path: str, method: str, operation: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{html.escape(each['name'])}</code></td><td>{each['in']}</td>"
        f"<td><code>{html.escape(_text(each.get('schema', each.get('content'))))}</code></td></tr>"
        for each in operation.get("parameters", ())
    )
    table = f"<table>{rows}</table>" if rows else ""
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    shown = f"<p>Body</p>{_json(body['schema'])}" if body else ""
    scope = operation.get("x-scope", "none")
    return (
        f"<details><summary><b>{method.upper()}</b><code>{html.escape(path)}</code> "
        f"{html.escape(operation['summary'])}</summary>"
        f"<p>{html.escape(operation.get('description', ''))} Scope: {scope}.</p>{table}{shown}"
        "</details>"
    )


def _text(schema: object) -> str:
    return msgspec.json.encode(schema).decode()


def _json(schema: object) -> str:
    shown = msgspec.json.format(msgspec.json.encode(schema), indent=2).decode()
    return f"<pre>{html.escape(shown)}</pre>"


def rendered(routes: Sequence[Route]) -> tuple[bytes, bytes]:
    """The document and the page as they are sent."""
    made = document(routes)
    return msgspec.json.encode(made), page(made).encode()
