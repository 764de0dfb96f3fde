"""Routes and the table that finds them: by raw path segments, decoded one by one (10 §1)."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Literal, get_args, get_type_hints
from urllib.parse import unquote_to_bytes

import msgspec

from flowfabric.server.queries import NoQuery

Scope = Literal["read", "submit", "signal", "operate", "admin", "remote"]
"""What a token may allow. `remote` is what a worker does; `operate` includes it."""
Limit = Literal["large", "medium", "control", "bulk"]
Handler = Callable[[Any], Awaitable[Any]]
_ANY = "{}"
"""The key of a parameter in the tree of segments."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint. Its handler's docstring describes it in the OpenAPI document."""

    method: str
    template: str
    handler: Handler
    scope: Scope | None
    """What a token must allow; None: open to everyone."""
    body: Any = None
    """The type of the request body; None means that a body is ignored."""
    optional_body: bool = False
    documented: Any = None
    """How OpenAPI describes the body, if the handler decodes it itself."""
    forms: tuple[str, ...] = ()
    """The content types that the body may have besides JSON."""
    headers: tuple[str, ...] = ()
    """The headers that a request must have."""
    query: type[msgspec.Struct] = NoQuery
    limit: Limit = "control"
    answers: Mapping[int, Any] = {}
    """The type of each successful answer by status; None: no JSON body."""
    errors: tuple[int, ...] = ()
    """The statuses of refusals besides those that follow from the rest, such as 404."""
    cross_origin: bool = True
    """Whether it answers pages of other origins."""
    counted: bool = True
    """Whether it counts against the limit of concurrent requests."""
    internal: bool = False
    """Whether it is for our own clients only, and left out of OpenAPI."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the path's parameters."""
        return tuple(part[1:-1] for part in self.template.split("/") if part.startswith("{"))

    @property
    def refusals(self) -> frozenset[int]:
        """The status of every refusal; faults of the server itself are not among them."""
        found = set(self.errors)
        sends = self.method in ("POST", "PUT")
        if self.scope is not None:
            found |= {401, 403, 429}
        if self.counted:
            found.add(429)
        if sends or self.names or self.query is not NoQuery:
            found.add(400)
        if sends:
            found.add(413)
        if sends and self.scope is not None:
            # An Idempotency-Key that was used for another request.
            found.add(409)
        if self.body is not None:
            found |= {415, 422}
        return frozenset(found)


class Routes:
    """Collects the routes of one resource.

    >>> routes = Routes()
    >>> @routes.get("/livez", scope=None)
    ... async def livez(call: Call[None, NoQuery]) -> Reply: ...  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self.found: list[Route] = []

    def get(self, template: str, **options: Any) -> Callable[[Handler], Handler]:
        return self._add("GET", template, options)

    def post(self, template: str, **options: Any) -> Callable[[Handler], Handler]:
        return self._add("POST", template, options)

    def put(self, template: str, **options: Any) -> Callable[[Handler], Handler]:
        return self._add("PUT", template, options)

    def delete(self, template: str, **options: Any) -> Callable[[Handler], Handler]:
        return self._add("DELETE", template, options)

    def _add(
        self, method: str, template: str, options: dict[str, Any]
    ) -> Callable[[Handler], Handler]:
        def register(handler: Handler) -> Handler:
            # `Call[Body, Query]` says what the handler reads.
            body, query = get_args(get_type_hints(handler)["call"])
            options.setdefault("body", None if body is type(None) else body)
            self.found.append(
                Route(method=method, template=template, handler=handler, query=query, **options)
            )
            return handler

        return register


class Match(msgspec.Struct, frozen=True):
    """The routes of a path by method, and the values of its parameters."""

    methods: Mapping[str, Route]
    values: tuple[str, ...] = ()
    is_text: bool = True
    """Whether the path is UTF-8; it is refused otherwise, but not before the caller is known."""

    @property
    def allowed(self) -> str:
        """The `Allow` header."""
        found = set(self.methods)
        if "GET" in found:
            found.add("HEAD")
        return ", ".join(sorted(found))


class RouteTable:
    """Every route, found by its path."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = list(routes)
        self._tree: dict[str, Any] = {}
        for route in self.routes:
            node = self._tree
            for part in route.template.split("/")[1:]:
                node = node.setdefault(_ANY if part.startswith("{") else part, {})
            methods: dict[str, Route] = node.setdefault("", {})
            if methods.setdefault(route.method, route) is not route:
                raise ValueError(f"two routes {route.method} {route.template}")
        # Most requests have no parameters, such as those that create executions or read lists.
        self._plain: dict[bytes, Match] = {}
        for route in self.routes:
            if not route.names:
                found = self._walk(route.template.split("/")[1:])
                if found is not None:
                    self._plain[route.template.encode()] = found

    def find(self, raw_path: bytes) -> Match | None:
        """The routes of a raw path, if there are any."""
        plain = self._plain.get(raw_path)
        if plain is not None:
            return plain
        segments = _segments(raw_path)
        found = self._walk(segments)
        if all(map(_is_text, segments)):
            return found
        return msgspec.structs.replace(found or Match({}), is_text=False)

    def _walk(self, segments: list[str]) -> Match | None:
        node: dict[str, Any] = self._tree
        values: list[str] = []
        for segment in segments:
            # An empty segment matches nothing: "" is where a node keeps its methods.
            after = node.get(segment) if segment and segment != _ANY else None
            if after is None:
                after = node.get(_ANY) if segment else None
                values.append(segment)
            if after is None:
                return None
            node = after
        methods = node.get("")
        return Match(methods, tuple(values)) if methods else None


def _segments(raw_path: bytes) -> list[str]:
    parts = raw_path.decode("latin-1").split("/")[1:]
    return [_decoded(part) if "%" in part or not part.isascii() else part for part in parts]


def _decoded(part: str) -> str:
    return unquote_to_bytes(part.encode("latin-1")).decode(errors="surrogateescape")


def _is_text(segment: str) -> bool:
    if segment.isascii():
        return True
    try:
        segment.encode()
    except UnicodeEncodeError:
        return False
    return True
