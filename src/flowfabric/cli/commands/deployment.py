"""`flowfabric doctor`, `secrets` and `rotate-secret`."""

import asyncio
import hashlib
import os
import secrets as secrets_of_python
import sys
from collections import Counter, defaultdict
from contextlib import closing
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from flowfabric import __version__
from flowfabric.cli import options
from flowfabric.cli.errors import CliError, UsageError
from flowfabric.cli.options import Deployment, Target, argument, flag, value
from flowfabric.cli.session import CONNECT_S, describe_location, open_backend
from flowfabric.cli.views.screen import Cell, Row, Screen, print_json, print_result
from flowfabric.core.contracts.suspension import HmacKid, HmacKids, RotationSummary
from flowfabric.core.environment import whole_number
from flowfabric.core.text import clock, compact_ids, duration, plural
from flowfabric.engine.api.meta import Finding, Grade
from flowfabric.engine.api.secrets import DEFAULT_GRACE_MS, GRACE_VARIABLE, check_rotation
from flowfabric.engine.connect import ServerLocation, store_secret

_MARKS = {Grade.OK: ("✓", "green"), Grade.WARNING: ("⚠", "yellow"), Grade.BROKEN: ("✗", "bold red")}
_PREPARE = flag("--prepare", "First store the partition counts and load the function library.")
_MAX_LISTED = 8
_SECRET_BYTES = 32
_SECRET_FILE = value(
    "FILE",
    "Write the new secret to this file, or read it if the file exists. - reads standard input.",
)
_ROTATION_GRACE = options.duration(
    "How long tokens of the previous key stay valid. Default: FF_WAITPOINT_HMAC_GRACE_MS, or 24h."
)


async def doctor(target: Target, *, prepare: Annotated[bool, _PREPARE] = False) -> None:
    """Check the deployment and suggest fixes.

    Exits with status 1 if a check fails; warnings do not count.
    """
    with closing(ServerLocation(target.url)) as location:
        checks = await location.diagnose(
            target.namespace, prepare=prepare, connect_timeout=CONNECT_S
        )
        where = describe_location(location)
    sound = all(check.grade is not Grade.BROKEN for check in checks)
    if target.as_json:
        print_json({"ok": sound, "version": __version__, "address": where, "checks": checks})
    else:
        _print_findings(where, checks)
    if not sound:
        raise typer.Exit(1)


def _print_findings(where: str, findings: list[Finding]) -> None:
    screen = Screen()
    screen.line((f"FlowFabric {__version__}", "bold"), "  ", (where, "bright_black"))
    screen.line()
    width = max(len(each.name) for each in findings)
    for each in findings:
        screen.line("  ", _MARKS[each.grade], f" {each.name:<{width}}  ", compact_ids(each.detail))
        if each.advice:
            screen.line(" " * (width + 6), ("→ ", "cyan"), each.advice)
    screen.line()
    screen.line(_verdict(Counter(each.grade for each in findings)))


def _verdict(grades: Counter[Grade]) -> Cell:
    warnings, broken = grades[Grade.WARNING], grades[Grade.BROKEN]
    if not broken and not warnings:
        return "All checks passed.", "green"
    failed = plural(broken, "check") if broken else "No check"
    more = f", {plural(warnings, 'warning')}" if warnings else ""
    return f"{failed} failed{more}.", "bold red" if broken else "yellow"


async def secrets(target: Deployment) -> None:
    """List the keys that sign waitpoint tokens.

    Never shows their secrets. Partitions with the same keys share a line. More than one line
    means that a rotation did not finish; run it again. With --json, prints one JSON object per
    line.
    """
    async with open_backend(target) as backend:
        partitions = range(backend.counts.flow)
        found = await asyncio.gather(*map(backend.secrets.list_waitpoint_hmac_kids, partitions))
    groups = _grouped(found)
    if target.as_json:
        print_json(*groups)
    else:
        Screen().table([_row(group) for group in groups])


class _KeyGroup(msgspec.Struct, frozen=True):
    """Partitions that sign with the same key and accept the same others."""

    current_kid: str | None
    verifying: tuple[HmacKid, ...]
    """Each with its last expiry: partitions rotate some milliseconds apart."""
    partitions: int


def _row(group: _KeyGroup) -> Row:
    accepted = [f"{key.kid} until {clock(key.expires_at_ms)}" for key in group.verifying]
    return {
        "SIGNS WITH": (group.current_kid or "none", "bold"),
        "STILL ACCEPTS": ", ".join(accepted) or "-",
        "PARTITIONS": f"{group.partitions:,}",
    }


def _grouped(found: list[HmacKids]) -> list[_KeyGroup]:
    groups = defaultdict[tuple[str | None, ...], list[HmacKids]](list)
    for keys in found:
        groups[keys.current_kid, *(key.kid for key in keys.verifying)].append(keys)
    latest: list[_KeyGroup] = []
    for kids, members in groups.items():
        columns = zip(*(keys.verifying for keys in members), strict=True)
        verifying = tuple(max(column, key=lambda key: key.expires_at_ms) for column in columns)
        latest.append(_KeyGroup(kids[0], verifying, len(members)))
    return sorted(latest, key=lambda group: -group.partitions)


async def rotate_secret(
    target: Deployment,
    kid: Annotated[
        str | None, argument("[KID]", "A name for the new key. Default: derived from the secret.")
    ] = None,
    *,
    secret_file: Annotated[str | None, _SECRET_FILE] = None,
    grace: Annotated[float | None, _ROTATION_GRACE] = None,
    yes: options.Yes = False,
) -> None:
    """Sign waitpoint tokens with a new secret.

    Generates the secret. An embedded deployment keeps it in its data folder. For your own Valkey,
    pass --secret-file, and then change FF_WAITPOINT_HMAC_SECRET to the content of the file wherever
    it is set. If the file exists, its secret is used: at least 32 hexadecimal digits; 64 are
    recommended.

    If some partitions fail, run the same command again. That is always safe.
    """
    location = ServerLocation(target.url)
    grace_ms = _grace_ms() if grace is None else round(grace * 1000)
    secret, new_file = _new_secret(secret_file, embedded=location.embedded)
    # The same secret always gets the same name, so that a repeat only rotates what is left.
    kid = kid or f"k-{hashlib.sha256(secret.lower().encode()).hexdigest()[:8]}"
    secret = check_rotation(kid, secret, grace_ms)
    lifetime = duration(grace_ms)
    options.confirm(f"Tokens of the previous key stop working after {lifetime}. Rotate?", yes=yes)
    async with open_backend(target) as backend:
        if new_file is not None:
            # Save it before the rotation: a lost secret could not complete an interrupted one.
            _write_secret(new_file, secret)
        count = backend.counts.flow
        with Console(stderr=True).status(f"Rotating the secret of {plural(count, 'partition')} …"):
            summary = await backend.secrets.rotate_waitpoint_hmac_secret_all(kid, secret, grace_ms)
        if not summary.failed and location.embedded:
            store_secret(secret)
    fields = {"new_kid": kid, "rotated": summary.rotated, "failed": summary.failed}
    effect = f" signs new tokens on {plural(summary.rotated, 'partition')}."
    print_result(fields, (kid, "bold"), effect, as_json=target.as_json)
    if summary.failed:
        raise _incomplete(summary)


def _grace_ms() -> int:
    return whole_number(os.environ, GRACE_VARIABLE, DEFAULT_GRACE_MS, 0)


def _new_secret(file: str | None, *, embedded: bool) -> tuple[str, Path | None]:
    """The secret, and the file to write it to if it is new."""
    if file is None:
        if not embedded:
            problem = "--secret-file is required unless the Valkey is embedded"
            hint = "pass --secret-file FILE; it is created if it does not exist"
            raise UsageError("missing_secret", problem, hint)
        return secrets_of_python.token_hex(_SECRET_BYTES), None
    if file == "-":
        given, name = sys.stdin.read(), "standard input"
    else:
        path = Path(file).expanduser()
        if not path.exists():
            return secrets_of_python.token_hex(_SECRET_BYTES), path
        given, name = path.read_text(errors="replace"), str(path)
    if not given.strip():
        hint = "`openssl rand -hex 32` generates one"
        raise UsageError("missing_secret", f"{name} is empty", hint)
    return given.strip(), None


def _write_secret(path: Path, secret: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{secret}\n")
        file.flush()
        os.fsync(file.fileno())


def _incomplete(summary: RotationSummary) -> CliError:
    failed = [str(index) for index in summary.failed]
    listed = ", ".join(failed[:_MAX_LISTED] + ["…"] * (len(failed) > _MAX_LISTED))
    reason = next(each.error for each in summary.entries if each.error)
    return CliError(
        "rotation_incomplete",
        f"{plural(len(failed), 'partition')} not rotated ({listed}): {reason}",
        "run the same command again, which is safe; if the key name is taken, pass another KID",
        *failed,
    )
