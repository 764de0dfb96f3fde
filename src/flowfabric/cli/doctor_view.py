"""How `flowfabric doctor` goes about it, and looks."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from pathlib import Path

from flowfabric import __version__
from flowfabric.app.place import Place
from flowfabric.cli.checks import check_deployment, check_server_side
from flowfabric.cli.errors import describe
from flowfabric.cli.options import Target
from flowfabric.cli.screen import Screen, print_json
from flowfabric.cli.session import CONNECT_S, NoDataYet, data_folder, has_data
from flowfabric.cli.words import plural
from flowfabric.core.errors import ConfigError, EngineError, FlowFabricError
from flowfabric.engine.backend import Backend
from flowfabric.engine.boot import read_counts
from flowfabric.engine.health import Finding, Grade
from flowfabric.valkey.connect import connect

__all__ = ["examine"]

_MARKS = {Grade.OK: ("✓", "green"), Grade.WARNING: ("⚠", "yellow"), Grade.BROKEN: ("✗", "bold red")}


def examine(target: Target, *, prepare: bool, as_json: bool) -> bool:
    """Run every check that can be run; whether nothing is broken."""
    place = Place(target.url)
    # What preparing warns of in the log is among the findings.
    logging.disable(logging.WARNING)
    where, checks = asyncio.run(_checks(place, target.namespace, prepare=prepare))
    grades = Counter(check.grade for check in checks)
    sound = not grades[Grade.BROKEN]
    if as_json:
        print_json({"ok": sound, "version": __version__, "address": where, "checks": checks})
        return sound
    screen = Screen()
    screen.line(("FlowFabric ", "bold"), (__version__, "bold"), "  ", (where, "bright_black"))
    screen.line()
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark, style = _MARKS[check.grade]
        screen.line("  ", (mark, style), f" {check.name:<{width}}  ", check.detail)
        if check.advice:
            screen.line(" " * (width + 6), ("→ ", "cyan"), check.advice)
    screen.line()
    screen.line(_verdict(grades))
    return sound


def _verdict(grades: Counter[Grade]) -> tuple[str, str]:
    warnings, broken = grades[Grade.WARNING], grades[Grade.BROKEN]
    if broken:
        more = f", {plural(warnings, 'warning')}" if warnings else ""
        return f"{plural(broken, 'thing')} broken{more}.", "bold red"
    if warnings:
        return f"Nothing is broken, {plural(warnings, 'warning')}.", "yellow"
    return "All is well.", "green"


async def _prepare(place: Place) -> None:
    name = "flowfabric-doctor"
    if place.embedded:
        backend = await place.open(name=name)
    else:
        backend = await Backend.connect_and_prepare(await place.address(), name=name)
    await backend.aclose()


async def _checks(
    place: Place, namespace: str | None, *, prepare: bool
) -> tuple[str, list[Finding]]:
    folder = data_folder()
    where = f"embedded Valkey in {folder}" if place.embedded else ""
    try:
        if place.embedded and not prepare and not has_data():
            return where, _before_first_start(folder)
        address = await place.address()
        where = where or address.peer
        checks: list[Finding] = []
        transport = await connect(
            address, connect_timeout=CONNECT_S, name="flowfabric-doctor", patient=False
        )
        try:
            if prepare:
                await _prepare(place)
                checks.append(
                    Finding("prepare", Grade.OK, "partition counts and functions are in place")
                )
            checks += await check_server_side(transport, owned=place.embedded)
            if all(check.name != "version" or check.grade is Grade.OK for check in checks):
                backend = Backend(transport, await read_counts(transport))
                checks += await check_deployment(backend, namespace)
        except FlowFabricError as error:
            checks.append(_broken(error, place))
        finally:
            await transport.aclose()
    except (EngineError, ConfigError) as error:
        return where, [_broken(error, place)]
    finally:
        place.close()
    return where, checks


def _before_first_start(folder: Path) -> list[Finding]:
    # Needs fcntl, which not every platform has; external servers do without.
    from flowfabric.cli.embedded_checks import check_new_folder  # noqa: PLC0415

    nothing = NoDataYet(folder)
    return [
        Finding("data", Grade.WARNING, nothing.message, nothing.hint),
        *check_new_folder(folder),
    ]


def _broken(error: FlowFabricError, place: Place) -> Finding:
    what = describe(error)
    if isinstance(error, ConfigError) and error.field == "partition_config":
        if place.embedded:
            detail = "the first start in this folder was interrupted"
            advice = "nothing to do: the next worker, program or command sets it up"
            return Finding("partitions", Grade.WARNING, detail, advice)
        advice = "run `flowfabric doctor --prepare` once"
        return Finding("partitions", Grade.BROKEN, "this Valkey was never prepared", advice)
    name = "connection" if what.code == "transport" else "deployment"
    if isinstance(error, ConfigError) and error.context == "embedded":
        name = {"data_dir": "folder", "binary": "server"}.get(error.field or "", "server")
        return Finding(name, Grade.BROKEN, error.message)
    return Finding(name, Grade.BROKEN, what.message or what.code, what.hint)
