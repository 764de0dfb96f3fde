"""`flowfabric tokens`: the API tokens of a server, kept hashed in a file."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from flowfabric.cli import options
from flowfabric.cli.errors import CliError, UsageError
from flowfabric.cli.options import argument, value
from flowfabric.cli.views.screen import Row, Screen, print_json, print_result
from flowfabric.core.ids import validate_namespace
from flowfabric.core.text import clock
from flowfabric.server.auth import SCOPES, StoredToken, new_token, read_tokens, write_tokens

_VARIABLE = "FF_API_TOKENS_FILE"
File = Annotated[Path | None, value("FILE", f"The tokens file. Default: {_VARIABLE}.", "--file")]
Rate = Annotated[
    float | None,
    value("N", "How many requests per second each server accepts. Default: no limit."),
]
Burst = Annotated[
    int | None,
    value("N", "How many requests may arrive at once. Default: --rate, rounded up."),
]
TokenId = Annotated[str, argument("ID", "The id of the token, such as `ci`.")]


def _file(given: Path | None) -> Path:
    if given is not None:
        return given
    if named := os.environ.get(_VARIABLE):
        return Path(named)
    raise UsageError("usage", f"no tokens file: pass --file, or set {_VARIABLE}")


def _scope(name: str) -> str:
    if name not in SCOPES:
        raise UsageError(
            "usage", f"there is no scope {name!r}", f"the scopes are {', '.join(SCOPES)}"
        )
    return name


def create(
    token_id: TokenId,
    *,
    scopes: Annotated[
        Sequence[str],
        value(
            "A,B",
            f"What the token allows: {', '.join(SCOPES)}.",
            parser=partial(options.checked_names, _scope),
        ),
    ],
    namespaces: Annotated[
        Sequence[str] | None,
        value(
            "A,B",
            "Limit the token to these namespaces.",
            parser=partial(options.checked_names, validate_namespace),
        ),
    ] = None,
    rate: Rate = None,
    burst: Burst = None,
    file: File = None,
    as_json: options.Json = False,
) -> None:
    """Create a token and print it. Save it: only its hash is stored."""
    path = _file(file)
    known = read_tokens(path)
    if any(each.id == token_id for each in known):
        raise CliError(
            "exists", f"token {token_id!r} already exists", "revoke it or use another id"
        )
    token, stored = new_token(token_id, scopes, namespaces, rate_per_s=rate, burst=burst)
    write_tokens(path, [*known, stored])
    print_result({"id": token_id, "token": token, "scopes": stored.scopes}, token, as_json=as_json)


def list_tokens(*, file: File = None, as_json: options.Json = False) -> None:
    """List tokens without their secrets.

    With --json, prints one JSON object per line.
    """
    found = read_tokens(_file(file))
    if as_json:
        print_json(*(_row(each) for each in found))
    elif found:
        Screen().table([_shown(each) for each in found])
    else:
        Screen().line("No tokens.")


def _row(token: StoredToken) -> dict[str, object]:
    names = ("id", "scopes", "namespaces", "rate_per_s", "burst", "created_at")
    return {name: getattr(token, name) for name in names}


def _shown(token: StoredToken) -> Row:
    return {
        "ID": (token.id, "bold"),
        "SCOPES": ", ".join(token.scopes),
        "NAMESPACES": "all" if token.namespaces is None else ", ".join(token.namespaces),
        "RATE": "" if token.rate_per_s is None else f"{token.rate_per_s:g}/s",
        "CREATED": clock(token.created_at),
    }


def limit(
    token_id: TokenId,
    *,
    rate: Rate = None,
    burst: Burst = None,
    file: File = None,
    as_json: options.Json = False,
) -> None:
    """Change how many requests a token may send. Without --rate, removes the limit.

    Servers apply the change within a second.
    """
    path = _file(file)
    known = read_tokens(path)
    changed = msgspec.structs.replace(_find(known, token_id), rate_per_s=rate, burst=burst)
    changed.check()
    write_tokens(path, [changed if each.id == token_id else each for each in known])
    text = "not limited" if rate is None else f"limited to {rate:g} requests per second"
    print_result(_row(changed), f"{token_id} is {text}.", as_json=as_json)


def _find(known: Sequence[StoredToken], token_id: str) -> StoredToken:
    for each in known:
        if each.id == token_id:
            return each
    raise CliError("not_found", f"there is no token {token_id!r}", "see `flowfabric tokens list`")


def revoke(token_id: TokenId, *, file: File = None, as_json: options.Json = False) -> None:
    """Revoke a token. Servers refuse it within a second."""
    path = _file(file)
    known = read_tokens(path)
    revoked = _find(known, token_id)
    write_tokens(path, [each for each in known if each.id != token_id])
    print_result({"id": revoked.id, "revoked": True}, f"Revoked {token_id}.", as_json=as_json)


tokens = {"create": create, "list": list_tokens, "limit": limit, "revoke": revoke}
