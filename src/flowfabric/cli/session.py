"""Running commands: their shared options, the connection, and the execution that they name."""

import asyncio
import getpass
import inspect
import re
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

import typer

from flowfabric.cli import options
from flowfabric.cli.errors import CliError, UsageError
from flowfabric.cli.options import Deployment, Target
from flowfabric.cli.selection import Selection, select
from flowfabric.core.catalogue import CATALOGUE
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.text import shown
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.valkey.connect import ServerLocation, data_folder, has_data, no_data

CONNECT_S = 3.0
"""Shorter than a worker's: a person waits for the answer."""

_MIN_PREFIX = 4
_UUID_LENGTH = 36
_MAX_LISTED = 10
_is_prefix = re.compile(r"[0-9a-f-]{1,36}").fullmatch


def with_shared_options(run: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A command that runs a coroutine and has the options that make its target and selection."""
    target, *declared = inspect.signature(run).parameters.values()
    selecting = [each for each in declared if each.annotation is Selection]
    choices = list(inspect.signature(select).parameters.values())
    own = [each for one in declared for each in (choices if one.annotation is Selection else [one])]

    def start(
        context: typer.Context,
        *,
        namespace: options.Namespace = None,
        url: options.Url = None,
        as_json: options.Json = False,
        **given: Any,
    ) -> None:
        made = target.annotation.of(context, url, namespace, as_json=as_json)
        for each in selecting:
            given[each.name] = select(**{choice.name: given.pop(choice.name) for choice in choices})
        asyncio.run(run(made, **given))

    context, *shared, _ = inspect.signature(start).parameters.values()
    if target.annotation is Deployment:
        shared = [each for each in shared if each.name != "namespace"]
    parameters = [context, *own, *shared]
    start.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    start.__doc__ = run.__doc__
    return start


class NoDataYet(CliError):
    """The project's embedded Valkey was never started, so there is no data to read."""


@asynccontextmanager
async def open_backend(target: Target) -> AsyncGenerator[Backend]:
    """A backend on existing data. Raises `NoDataYet` instead of creating a folder."""
    location = ServerLocation(target.url)
    if location.embedded and not has_data():
        raise NoDataYet("no_data", *no_data())
    try:
        backend = await location.open_existing(name="flowfabric-cli", connect_timeout=CONNECT_S)
        async with aclosing(backend):
            yield backend
    finally:
        location.close()


@asynccontextmanager
async def open_execution(target: Target, text: str) -> AsyncGenerator[tuple[Backend, ExecutionId]]:
    """A backend, and the execution that the text names."""
    async with open_backend(target) as backend:
        yield backend, await find_execution(backend, text, target.namespace)


def describe_location(location: ServerLocation) -> str:
    """The address of the deployment, or the folder of the embedded Valkey."""
    if location.embedded:
        return f"embedded Valkey in {shown(str(data_folder()))}"
    return location.peer


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
    message = f"more than one id starts with {text!r}:"
    for execution_id in found[:_MAX_LISTED]:
        message += f"\n  {execution_id}"
        try:
            info = await backend.reads.read_execution_info(execution_id)
            message += f"  {info.execution_kind}  {info.public_state.value}"
        except EngineError:
            # Deleted meanwhile.
            continue
    if len(found) > _MAX_LISTED:
        message += "\n  …"
    return CliError("ambiguous_id", message, "give more of the id", *map(str, found[:_MAX_LISTED]))
