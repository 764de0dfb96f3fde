"""`flowfabric doctor`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from flowfabric import __version__
from flowfabric.cli.checks.deployment import check_deployment
from flowfabric.cli.checks.security import check_secret_file
from flowfabric.cli.checks.server import check_server_side
from flowfabric.cli.errors import describe
from flowfabric.cli.options import JsonOption, NamespaceOption, Target, UrlOption
from flowfabric.cli.session import CONNECT_S, NoDataYet
from flowfabric.cli.views.doctor import print_findings
from flowfabric.cli.views.screen import print_json
from flowfabric.core.errors import ConfigError, EngineError, FlowFabricError
from flowfabric.core.text import shown
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.boot import read_counts
from flowfabric.engine.valkey.connect import ServerLocation, data_folder, has_data
from flowfabric.engine.valkey.health import Finding, Grade
from flowfabric.valkey.connect import connect
from flowfabric.valkey.embedded_folder import SECRET_FILE


def doctor(
    context: typer.Context,
    *,
    prepare: Annotated[
        bool,
        typer.Option(
            "--prepare", help="Set up the Valkey first: partition counts and function library."
        ),
    ] = False,
    namespace: NamespaceOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the deployment and suggest fixes.

    Exits with status 1 if a check fails; warnings do not count.
    """
    target = Target.of(context, url, namespace)
    where, checks = asyncio.run(
        _run_checks(ServerLocation(target.url), target.namespace, prepare=prepare)
    )
    sound = all(check.grade is not Grade.BROKEN for check in checks)
    if as_json:
        print_json({"ok": sound, "version": __version__, "address": where, "checks": checks})
    else:
        print_findings(where, checks)
    if not sound:
        raise typer.Exit(1)


async def _run_checks(
    location: ServerLocation, namespace: str | None, *, prepare: bool
) -> tuple[str, list[Finding]]:
    folder = data_folder()
    where = f"embedded Valkey in {shown(str(folder))}" if location.embedded else ""
    try:
        if location.embedded and not prepare and not has_data():
            return where, _before_first_start(folder)
        address = await location.address()
        where = where or address.peer
        checks: list[Finding] = []
        transport = await connect(
            address, connect_timeout=CONNECT_S, name="flowfabric-doctor", patient=False
        )
        try:
            if prepare:
                await (await location.open(name="flowfabric-doctor", prepare=True)).aclose()
                checks.append(
                    Finding("prepare", Grade.OK, "partition counts and functions are set up")
                )
            checks += await check_server_side(transport, owned=location.embedded)
            if location.embedded and (finding := check_secret_file(folder / SECRET_FILE)):
                checks.append(finding)
            if all(check.name != "version" or check.grade is Grade.OK for check in checks):
                backend = ValkeyBackend(transport, await read_counts(transport))
                checks += await check_deployment(backend, namespace)
        except FlowFabricError as error:
            checks.append(_broken(error, location))
        finally:
            await transport.aclose()
    except (EngineError, ConfigError) as error:
        return where, [_broken(error, location)]
    finally:
        location.close()
    return where, checks


def _before_first_start(folder: Path) -> list[Finding]:
    # Needs fcntl, which some platforms lack; external servers work without it.
    from flowfabric.cli.checks.embedded import check_new_folder  # noqa: PLC0415

    nothing = NoDataYet(folder)
    return [
        Finding("data", Grade.WARNING, nothing.message, nothing.hint),
        *check_new_folder(folder),
    ]


def _broken(error: FlowFabricError, location: ServerLocation) -> Finding:
    what = describe(error)
    if isinstance(error, ConfigError) and error.field == "partition_config":
        if location.embedded:
            detail = "the first start in this folder was interrupted"
            advice = "no action needed: the next worker, program or command completes it"
            return Finding("partitions", Grade.WARNING, detail, advice)
        advice = "run `flowfabric doctor --prepare` once"
        return Finding("partitions", Grade.BROKEN, "this Valkey is not prepared", advice)
    name = "connection" if what.code == "transport" else "deployment"
    if isinstance(error, ConfigError) and error.context == "embedded":
        name = {"data_dir": "folder", "binary": "server"}.get(error.field or "", "server")
        return Finding(name, Grade.BROKEN, error.message)
    return Finding(name, Grade.BROKEN, what.message or what.code, what.hint)
