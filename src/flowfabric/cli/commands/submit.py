"""`flowfabric submit` and `result`."""

import base64
import re
import sys
from difflib import get_close_matches
from typing import Annotated, Any

import msgspec
import typer

from flowfabric.app.calls import Arguments
from flowfabric.app.codec import JSON, decode_call
from flowfabric.app.fabric import Fabric
from flowfabric.cli import options
from flowfabric.cli.errors import CliError, UsageError
from flowfabric.cli.loader import load_app
from flowfabric.cli.options import Namespaced, Target, argument, value
from flowfabric.cli.session import open_execution
from flowfabric.cli.views.screen import print_json, print_result
from flowfabric.cli.views.text import json_line
from flowfabric.core.errors import PayloadMismatch
from flowfabric.engine.connect import ServerLocation
from flowfabric.sdk.client import Client, Outcome

_is_application = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*").fullmatch
_is_joined = re.compile(r"([A-Za-z_][\w.]*:[A-Za-z_][\w.]*):(.+)").fullmatch
_named_argument = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL).fullmatch
_TASK = (
    "The task's name. With an application before it, as in `shop:app resize`, the application "
    "checks the arguments and sets the task's lane, retries, timeouts, budgets and quota. Without "
    "it, no budget or quota limits the execution."
)
_ARGUMENT = (
    "VALUE or NAME=VALUE. A value that is valid JSON is read as JSON, any other value as text; "
    "for the text 300, write '\"300\"'."
)


async def submit(
    target: Namespaced,
    task: Annotated[str, argument("[MODULE:APP] TASK", _TASK)],
    arguments: Annotated[list[str] | None, argument("ARGUMENT", _ARGUMENT)] = None,
    *,
    payload: Annotated[
        bytes | None,
        value(
            *("JSON", "All arguments: a JSON array or object, @file, or - for stdin."),
            parser=options.read_payload,
        ),
    ] = None,
    lane: Annotated[
        str | None, value("NAME", "Use this lane, not the task's own.", parser=options.parse_lane)
    ] = None,
    priority: Annotated[int | None, value("N", "Higher numbers start first.")] = None,
    delay: Annotated[
        float | None, options.duration("Wait this long before the first attempt.")
    ] = None,
    idempotency_key: Annotated[
        str | None, value("KEY", "Submitting twice with the same key creates one execution.")
    ] = None,
    tag: Annotated[
        list[str] | None,
        value("KEY=VALUE", "Add this tag. Repeatable.", parser=options.parse_tag),
    ] = None,
) -> None:
    """Submit one execution of a task.

    Prints the id of the execution; `flowfabric result ID` waits for its result. Write `--` before
    arguments that start with a dash.
    """
    words = list(arguments or ())
    if joined := _is_joined(task):
        hint = f"put a space between them: flowfabric submit {joined[1]} {joined[2]}"
        raise UsageError("usage", f"{task} joins an application and a task", hint)
    app = load_app(task) if (application := _is_application(task)) else Fabric()
    if application:
        task = _task_of(app, task, words)
    if target.url is not None:
        app.location = ServerLocation(target.url)
    if target.namespace is not None:
        app.namespace = target.namespace
    args, kwargs = _call(words, payload)
    if application:
        _check_types(app.tasks[task].arguments, args, kwargs)
    named = app.tasks[task] if application else app.named(task)
    chosen = named.options(
        lane=lane,
        priority=priority,
        delay=delay,
        idempotency_key=idempotency_key,
        tags=options.pairs(tag) or None,
    )
    async with app:
        run = await chosen.submit(*args, **kwargs)
    fields = {
        "execution_id": run.id,
        "task": chosen.name,
        "lane": chosen.lane,
        "namespace": app.namespace,
        "duplicate": run.duplicate,
    }
    print_result(fields, run.id.compact, as_json=target.as_json)
    if run.duplicate and not target.as_json:
        sys.stderr.write("note: this key was used before; this is the execution it created\n")


def _task_of(app: Fabric, application: str, words: list[str]) -> str:
    """Take the task's name from the words after `module:app`."""
    known = ", ".join(sorted(app.tasks)) or "none"
    if not words:
        raise UsageError("usage", f"name a task of {application}", f"its tasks: {known}")
    name = words.pop(0)
    if name not in app.tasks:
        close = get_close_matches(name, app.tasks, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"its tasks: {known}"
        raise UsageError("unknown_task", f"{application} has no task {name!r}", hint)
    return name


def _call(words: list[str], payload: bytes | None) -> tuple[list[Any], dict[str, Any]]:
    """The positional and the named arguments."""
    if payload is not None:
        if words:
            problem = "pass either arguments or --payload, not both"
            raise typer.BadParameter(problem, param_hint="--payload")
        return decode_call(payload)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for word in words:
        if found := _named_argument(word):
            kwargs[found[1]] = _value(found[2])
        else:
            args.append(_value(word))
    return args, kwargs


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError):
        return text


def _check_types(arguments: Arguments, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Reject arguments that the worker would reject."""
    bound, named = arguments.bind(tuple(args), kwargs)
    try:
        arguments.convert(list(bound), named)
    except PayloadMismatch as error:
        hint = "a value is JSON if it can be; write the text 300 as '\"300\"'"
        raise UsageError("invalid_input", f"{error}", hint) from error


async def result(
    target: Target,
    id_: options.Id,
    *,
    timeout: Annotated[
        float | None, options.duration("Stop waiting after this time; the execution continues.")
    ] = None,
) -> None:
    """Wait for the result of an execution and print it as JSON.

    Prints bytes that are not text as base64. If the execution fails, prints the reason to standard
    error and exits with status 1. With --json, prints the execution's state and attempts too.
    """
    async with open_execution(target, id_) as (backend, execution_id):
        try:
            outcome = await Client(backend).success(execution_id, timeout)
        except TimeoutError as error:
            hint = f"wait again, or run `flowfabric show {execution_id.compact}`"
            raise CliError("timeout", str(error), hint) from error
    found = _result(outcome)
    if target.as_json:
        fields = {"execution_id": execution_id, "state": outcome.state.value}
        print_json(fields | {"attempts": outcome.attempts, "result": found})
    else:
        sys.stdout.write(json_line(found) + "\n")


def _result(outcome: Outcome) -> Any:
    data = outcome.result
    if data is None:
        return None
    if outcome.result_encoding == JSON:
        return msgspec.Raw(data)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return base64.b64encode(data).decode()
