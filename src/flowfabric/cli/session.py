"""Connecting to the deployment, and finding the execution that a command names."""

from __future__ import annotations

import asyncio
import getpass
import re
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from flowfabric.cli.errors import CliError, UsageError
from flowfabric.cli.options import Target
from flowfabric.core.catalogue import CATALOGUE
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.valkey.connect import ServerLocation, has_data, no_data

CONNECT_S = 3.0
"""Somebody is waiting for the answer, so commands give up sooner than workers."""

_MIN_PREFIX = 4
_UUID_LENGTH = 36
_MAX_LISTED = 10
T = TypeVar("T")
_is_prefix = re.compile(r"[0-9a-f-]{1,36}").fullmatch


class NoDataYet(CliError):
    """The project's embedded Valkey was never started, so there is no data to read."""

    def __init__(self) -> None:
        super().__init__("no_data", *no_data())


@asynccontextmanager
async def open_backend(url: str | None) -> AsyncGenerator[Backend]:
    """A backend on existing data. Raises `NoDataYet` rather than creating a folder."""
    location = ServerLocation(url)
    if location.embedded and not has_data():
        raise NoDataYet
    try:
        backend = await location.open_existing(name="flowfabric-cli", connect_timeout=CONNECT_S)
        async with aclosing(backend):
            yield backend
    finally:
        location.close()


def on_execution(
    target: Target, text: str, work: Callable[[Backend, ExecutionId], Coroutine[Any, Any, T]]
) -> T:
    """Do the work on the execution that the text names."""

    async def run() -> T:
        async with open_backend(target.url) as backend:
            return await work(backend, await find_execution(backend, text, target.namespace))

    return asyncio.run(run())


def user_name() -> str:
    """The name of the account that runs the command; empty if there is none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may run under a user id without an account.
        return ""


async def find_execution(backend: Backend, text: str, namespace: str | None = None) -> ExecutionId:
    """The execution with this id, this UUID, or a UUID that only it starts with."""
    found = await _candidates(backend, text.strip().lower())
    if namespace is not None:
        found = [
            each for each in found if await backend.reads.get_execution_namespace(each) == namespace
        ]
    if not found:
        raise _not_found(text, namespace)
    if len(found) > 1:
        raise await _ambiguous(backend, text, found)
    return found[0]


async def _candidates(backend: Backend, text: str) -> list[ExecutionId]:
    if text.startswith("{"):
        try:
            exact = ExecutionId.parse(text).check_partition(backend.counts)
        except EngineError as error:
            raise _invalid_id(error.explanation) from error
        known = await backend.reads.get_execution_namespace(exact)
        return [] if known is None else [exact]
    if not _is_prefix(text):
        raise _invalid_id(f"{text!r} is neither an execution id nor a UUID")
    if len(text) < _MIN_PREFIX:
        raise _invalid_id(f"{text!r} is too short: give at least {_MIN_PREFIX} characters")
    return await backend.listings.find_executions(text, _MAX_LISTED + 1)


def _not_found(text: str, namespace: str | None) -> CliError:
    how = "has the id" if len(text.strip()) >= _UUID_LENGTH else "has an id that starts with"
    where = "" if namespace is None else f" in namespace {namespace}"
    code = "execution_not_found"
    return CliError(code, f"no execution{where} {how} {text!r}", CATALOGUE[code].hint, text)


def _invalid_id(problem: str) -> UsageError:
    return UsageError("invalid_input", problem, "`flowfabric ps` lists executions and their ids")


async def _ambiguous(backend: Backend, text: str, found: list[ExecutionId]) -> CliError:
    lines: list[str] = []
    for execution_id in found[:_MAX_LISTED]:
        try:
            info = await backend.reads.read_execution_info(execution_id)
            lines.append(f"{execution_id}  {info.execution_kind}  {info.public_state.value}")
        except EngineError:
            lines.append(str(execution_id))
    if len(found) > _MAX_LISTED:
        lines.append("…")
    listed = "".join(f"\n  {line}" for line in lines)
    return CliError(
        "ambiguous_id",
        f"more than one id starts with {text!r}:{listed}",
        "give more of the id",
        *(str(each) for each in found[:_MAX_LISTED]),
    )
