"""`flowfabric secrets` and `flowfabric rotate-secret`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from flowfabric.cli.errors import CliError, UsageError
from flowfabric.cli.options import (
    JsonOption,
    Target,
    UrlOption,
    YesOption,
    confirm,
    parse_seconds,
)
from flowfabric.cli.session import open_backend
from flowfabric.cli.views.screen import Cell, Screen, print_json
from flowfabric.cli.views.text import clock, duration
from flowfabric.core.contracts.suspension import HmacKid, HmacKids, RotationSummary
from flowfabric.core.text import plural
from flowfabric.engine.api.secrets import SECRET_VARIABLE, check_rotation
from flowfabric.engine.valkey.connect import ServerLocation, store_secret

_MAX_LISTED = 8


def secrets(context: typer.Context, *, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """List the keys that sign waitpoint tokens.

    Their secrets are never shown. Partitions with the same keys share a line. More than one line
    means that a rotation did not finish; run it again. With --json, prints one JSON object per
    line.
    """
    groups = _grouped(asyncio.run(_read_keys(Target.of(context, url, None))))
    if as_json:
        for group in groups:
            print_json(group)
        return
    rows: list[list[Cell]] = [
        [
            (group.current_kid or "none", "bold"),
            ", ".join(f"{k.kid} until {clock(k.expires_at_ms)}" for k in group.verifying) or "-",
            f"{group.partitions:,}",
        ]
        for group in groups
    ]
    Screen().table(["SIGNS WITH", "STILL ACCEPTS", "PARTITIONS"], rows)


async def _read_keys(target: Target) -> list[HmacKids]:
    async with open_backend(target.url) as backend:
        return await asyncio.gather(
            *(
                backend.secrets.list_waitpoint_hmac_kids(index)
                for index in range(backend.counts.flow)
            )
        )


class _KeyGroup(msgspec.Struct, frozen=True):
    """Partitions that sign with the same key and accept the same others."""

    current_kid: str | None
    verifying: tuple[HmacKid, ...]
    """With the last expiry of each: partitions rotate some milliseconds apart."""
    partitions: int


def _grouped(found: list[HmacKids]) -> list[_KeyGroup]:
    groups: dict[tuple[str | None, ...], list[HmacKids]] = {}
    for keys in found:
        kids = (keys.current_kid, *(key.kid for key in keys.verifying))
        groups.setdefault(kids, []).append(keys)
    latest = [
        _KeyGroup(
            kids[0],
            tuple(
                max(column, key=lambda key: key.expires_at_ms)
                for column in zip(*(keys.verifying for keys in members), strict=True)
            ),
            len(members),
        )
        for kids, members in groups.items()
    ]
    return sorted(latest, key=lambda group: -group.partitions)


def rotate_secret(
    context: typer.Context,
    kid: Annotated[
        str,
        typer.Argument(metavar="KID", help="A new name for the key, such as k2 or 2026-07."),
    ],
    *,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help=f"Read the new secret from here instead of {SECRET_VARIABLE}."
        ),
    ] = None,
    grace: Annotated[
        float,
        typer.Option(
            parser=parse_seconds,
            metavar="DURATION",
            help="How long tokens of the previous key stay valid.",
        ),
    ] = "24h",  # pyright: ignore[reportArgumentType] - read by the parser
    yes: YesOption = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sign waitpoint tokens with a new secret.

    The secret is hexadecimal: at least 32 digits, better 64. If some partitions fail, run the same
    command again; it changes only those. Afterwards, set FF_WAITPOINT_HMAC_SECRET to the new secret
    for every worker; an embedded deployment stores it in its data folder instead.
    """
    target = Target.of(context, url, None)
    secret = _read_secret(secret_file)
    grace_ms = round(grace * 1000)
    secret = check_rotation(kid, secret, grace_ms)
    confirm(f"Tokens of the previous key stop working after {duration(grace_ms)}. Rotate?", yes=yes)

    async def rotate() -> RotationSummary:
        async with open_backend(target.url) as backend:
            done = await backend.secrets.rotate_waitpoint_hmac_secret_all(kid, secret, grace_ms)
            if not done.failed and ServerLocation(target.url).embedded:
                store_secret(secret)
            return done

    summary = asyncio.run(rotate())
    if as_json:
        print_json({"new_kid": kid, "rotated": summary.rotated, "failed": summary.failed})
    else:
        partitions = plural(summary.rotated, "partition")
        Screen().line((kid, "bold"), f" signs new tokens on {partitions}.")
    if summary.failed:
        raise _incomplete(summary)


def _read_secret(path: Path | None) -> str:
    secret = (
        os.environ.get(SECRET_VARIABLE, "") if path is None else path.read_text(errors="replace")
    )
    if not secret.strip():
        raise UsageError(
            "missing_secret",
            "there is no new secret" if path is None else f"{path} is empty",
            f"set {SECRET_VARIABLE} or pass --secret-file; `openssl rand -hex 32` generates one",
        )
    return secret.strip()


def _incomplete(summary: RotationSummary) -> CliError:
    failed = summary.failed
    listed = ", ".join(map(str, failed[:_MAX_LISTED])) + (
        ", …" if len(failed) > _MAX_LISTED else ""
    )
    reason = next(each.error for each in summary.entries if each.error)
    return CliError(
        "rotation_incomplete",
        f"{plural(len(failed), 'partition')} not rotated ({listed}): {reason}",
        "run the same command again; if the key name is taken, choose another",
        *map(str, failed),
    )
