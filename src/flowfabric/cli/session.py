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
from flowfabric.cli.options import Deployment, Namespaced, Target
from flowfabric.cli.selection import Selection, select
from flowfabric.core.errors import EngineError, NotFoundError, ValidationError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.text import shown
from flowfabric.engine import lookup
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.connect import ServerLocation, data_folder, has_data, no_data
from flowfabric.engine.flow_overview import flows_that_start_with

_UUID_LENGTH = 36
_MIN_START = 4
_LISTED = 10
_flow_start = re.compile(rf"[0-9a-f-]{{{_MIN_START},{_UUID_LENGTH}}}").fullmatch
_FLOWS_HINT = "`flowfabric flows` lists flows; the engine deletes them a day after they end"
CONNECT_S = 3.0
"""Shorter than a worker's: a person waits for the answer."""


def with_shared_options(run: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A command that runs a coroutine and has the options that make its target and selection."""
    target, *declared = inspect.signature(run).parameters.values()
    selecting = [each for each in declared if each.annotation is Selection]
    choices = list(inspect.signature(select).parameters.values())
    own = [each for one in declared for each in (choices if one.annotation is Selection else [one])]

    def start(
        context: typer.Context,
        *,
        namespace: options.AnyNamespace = None,
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
    elif target.annotation is Namespaced:
        shared[0] = shared[0].replace(annotation=options.OneNamespace)
    parameters = [context, *own, *shared]
    start.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    start.__doc__ = run.__doc__
    return start


class NoDataYet(CliError):
    """The project's embedded Valkey was never started, so there is no data to read."""


@asynccontextmanager
async def open_backend(target: Target, *, create: bool = False) -> AsyncGenerator[Backend]:
    """A backend on existing data. Without any, raises `NoDataYet`, or creates the folder."""
    location = ServerLocation(target.url)
    is_new = location.embedded and not has_data()
    if is_new and not create:
        raise NoDataYet("no_data", *no_data())
    try:
        if is_new:
            backend = await location.open(name="flowfabric-cli")
        else:
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
    """The execution with this id, this UUID, or an id that only it starts with."""
    try:
        return await lookup.find_execution(backend, lookup.parse_name(text), namespace)
    except NotFoundError as error:
        flows = await _flows_named(backend, text, namespace)
        if len(flows) != 1:
            raise
        hint = f"this is the id of a flow: run `flowfabric flow show {flows[0]}`"
        raise CliError(error.code, error.explanation, hint) from error
    except lookup.AmbiguousId as error:
        raise await _ambiguous(backend, error) from error
    except ValidationError as error:
        hint = "`flowfabric ps` lists executions and their ids"
        raise UsageError(error.code, error.explanation, hint) from error


@asynccontextmanager
async def open_flow(target: Target, text: str) -> AsyncGenerator[tuple[Backend, str]]:
    """A backend, and the id of the flow that the text names."""
    async with open_backend(target) as backend:
        yield backend, await _find_flow(backend, text, target.namespace)


async def _flows_named(backend: Backend, text: str, namespace: str | None) -> list[str]:
    """Flows whose id is this text or starts with it."""
    given = _given(text)
    if _flow_start(given) is None:
        return []
    if len(given) < _UUID_LENGTH:
        return await flows_that_start_with(backend, given, namespace, _LISTED + 1)
    flow = await backend.flows.describe_flow(given, edge_groups=False)
    return [given] if flow is not None and namespace in (None, flow.namespace) else []


def _given(text: str) -> str:
    """The id without what people copy along with it."""
    return text.strip().removesuffix("…").lower()


async def _execution_hint(backend: Backend, text: str, namespace: str | None) -> str:
    """The command to run instead if the text names an execution."""
    try:
        name = lookup.parse_name(text)
        execution_id = await lookup.find_execution(backend, name, namespace)
    except EngineError:
        return ""
    flow_id = await backend.flows.resolve_execution_flow_id(execution_id)
    if flow_id is None:
        compact = execution_id.compact
        return f"this is the id of an execution without a flow: run `flowfabric show {compact}`"
    return f"this is the id of an execution in a flow: run `flowfabric flow show {flow_id}`"


async def _find_flow(backend: Backend, text: str, namespace: str | None) -> str:
    """The only flow whose id is this text or starts with it."""
    given = _given(text)
    found = await _flows_named(backend, text, namespace)
    hint = "" if found else await _execution_hint(backend, text, namespace)
    if _flow_start(given) is None:
        hint = hint or "`flowfabric flows` lists flows and their ids"
        problem = f"{text!r} is neither a flow id nor its first {_MIN_START} or more characters"
        raise UsageError("invalid_input", problem, hint)
    if len(found) > 1:
        lines = "".join(f"\n  {flow_id}" for flow_id in found[:_LISTED])
        more = "\n  …" if len(found) > _LISTED else ""
        message = f"more than one flow id starts with {given!r}:{lines}{more}"
        raise CliError("ambiguous_id", message, "give more of the id", *found[:_LISTED])
    if not found:
        where = "" if namespace is None else f" in namespace {namespace}"
        how = "has the id" if len(given) == _UUID_LENGTH else "has an id that starts with"
        problem = f"no flow{where} {how} {given!r}"
        raise CliError("flow_not_found", problem, hint or _FLOWS_HINT)
    return found[0]


async def _ambiguous(backend: Backend, error: lookup.AmbiguousId) -> CliError:
    message = f"more than one id starts with {error.text!r}:"
    for execution_id in error.candidates:
        message += f"\n  {execution_id}"
        try:
            info = await backend.reads.read_execution_info(execution_id)
            message += f"  {info.execution_kind}  {info.public_state.value}"
        except EngineError:
            # Deleted meanwhile.
            continue
    if error.more:
        message += "\n  …"
    return CliError("ambiguous_id", message, "give more of the id", *map(str, error.candidates))
