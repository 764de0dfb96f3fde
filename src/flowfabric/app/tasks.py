"""Tasks: what `@app.task` returns and `submit` takes."""

import functools
import inspect
import sys
import typing
from collections.abc import Callable, Coroutine, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Concatenate, Generic, ParamSpec, TypedDict, TypeVar, Unpack, overload

import msgspec

from flowfabric.app import codec
from flowfabric.app.calls import Arguments, Calls, Keys, scoped_key
from flowfabric.app.context import Context, SyncContext
from flowfabric.app.run import Run
from flowfabric.core.capabilities import normalise
from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.durations import Duration, to_ms
from flowfabric.core.errors import ConfigError, ValidationError, invalid_input
from flowfabric.core.ids import (
    ExecutionId,
    budget_id,
    is_list,
    quota_id,
    validate_lane,
    validate_text,
)
from flowfabric.core.policy import NO_POLICY, ExecutionPolicy, Retry, parse_policy
from flowfabric.core.tags import validate_creation_tags

if typing.TYPE_CHECKING:
    from flowfabric.app.fabric import Fabric

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
D_co = TypeVar("D_co", covariant=True)

_MAX_KEY_BYTES = 1024
_EPOCH = datetime.fromtimestamp(0, UTC)


class TaskOptions(TypedDict, total=False):
    """How executions of a task run: the options of `@app.task`."""

    lane: str
    """The lane its executions wait in; `default` unless set."""
    timeout: Duration | None
    """The longest time for one attempt."""
    deadline: Duration | None
    """The longest time for the whole execution, waits and retries included."""
    retry: Retry | int | None
    """What happens after a failure; `retry=3` is short for `Retry(3)`."""
    capabilities: Iterable[str]
    """What a worker must offer to run it."""
    retention: Duration | None
    """How long an execution is kept after its end."""
    quota: str | None
    """The name of the quota that limits how often and how many executions start."""
    budgets: Iterable[str]
    """The names of the budgets that limit it: it starts only while none is exhausted."""


class SubmitOptions(TypedDict, total=False):
    """How one submission differs from others: the options of `task.options` and `app.named`."""

    lane: str | None
    """Another lane than the task's own."""
    priority: int | None
    """Higher numbers start first."""
    idempotency_key: str | None
    """Submissions of the task with the same key and arguments are one execution."""
    delay: Duration | None
    """How long to wait before the first attempt."""
    at: datetime | None
    """When the first attempt may start: a time with a time zone, instead of `delay`."""
    tags: Mapping[str, str] | None
    """Labels to find the execution by."""
    quota: str | None
    """Another quota than the task's own."""
    budgets: Iterable[str] | None
    """Other budgets than the task's own."""


class Task(Generic[P, R_co]):
    """A task to submit: a registered function, or the name of one that other programs define.

    `P` are the arguments of a submission, `R` is the type of the result.

    >>> run = await greet.submit("Ada")
    >>> run = await greet.options(priority=5, delay="1m").submit("Ada")
    """

    def __init__(
        self,
        app: "Fabric",
        shared: NewExecution,
        arguments: Arguments | None = None,
        options: SubmitOptions | None = None,
    ) -> None:
        self._app = app
        self._own = shared
        self._arguments = arguments
        self._options: SubmitOptions = options or {}
        self.shared = _adjusted(shared, options, app.namespace) if options else shared
        """The fields that all its submissions share."""
        self.key = _checked_key(shared.execution_kind, self._options.get("idempotency_key"))
        """The idempotency key of a submission; empty for none."""
        self.name = self.shared.execution_kind
        self.lane = self.shared.lane_id
        self.returns: Any = Any if arguments is None else arguments.returns
        """The type of the result; `Any` when only the name is known."""

    def options(self, **options: Unpack[SubmitOptions]) -> "Task[P, R_co]":
        """The same task with other options for its submissions.

        >>> run = await app.submit(greet.options(idempotency_key="greet-ada"), "Ada")
        """
        return Task(self._app, self._own, self._arguments, {**self._options, **options})

    async def submit(self, *args: P.args, **kwargs: P.kwargs) -> Run[R_co]:
        """Submit one execution and return a handle on it. Arguments become JSON."""
        return await self._app.submit(self, *args, **kwargs)

    async def submit_many(self, calls: Calls, idempotency_keys: Keys = None) -> list[Run[R_co]]:
        """Submit many executions in few round trips, as `app.submit_many` does."""
        return await self._app.submit_many(self, calls, idempotency_keys)

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """The payload of a call. Raises an error if the task's function does not accept it."""
        if self._arguments is not None:
            try:
                args, kwargs = self._arguments.bind(args, kwargs)
            except ValidationError as error:
                for name in SubmitOptions.__annotations__:
                    if name in kwargs and f"no parameter {name!r}" in str(error):
                        problem = f"{self.name}() has no parameter {name!r}. To set this option, "
                        problem += f"write {self.name}.options({name}=…).submit(…)."
                        raise invalid_input("arguments", problem) from error
                raise
        return codec.encode_call(args, kwargs)

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[tuple[str, Any]], bool]:
        """Each argument with its parameter's name, and whether they are sent by name.

        Raises an error if the task's function does not accept the call.
        """
        names: list[str] = []
        if self._arguments is not None:
            args, kwargs = self._arguments.bind(args, kwargs)
            names = self._arguments.names
        elif args and kwargs:
            raise invalid_input("arguments", "pass them all by position or all by name")
        if kwargs:
            return list(kwargs.items()), True
        names = [*names, *(f"argument_{n}" for n in range(len(names), len(args)))]
        return list(zip(names, args, strict=False)), False

    def new_execution(self, execution_id: ExecutionId, payload: bytes) -> NewExecution:
        """One execution of this task, with its options."""
        return msgspec.structs.replace(
            self.shared,
            execution_id=execution_id,
            input_payload=payload,
            namespace=self._app.namespace,
        )

    def keyed(
        self, new: NewExecution, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> NewExecution:
        """The execution of this call under an idempotency key, which belongs to the task."""
        if not _checked_key(self.name, key):
            return new
        if self._arguments is not None:
            args, kwargs = self._arguments.normal_form(args, kwargs)
        return msgspec.structs.replace(
            new,
            idempotency_key=scoped_key(self.name, key),
            idempotency_digest=codec.digest(self.name, self.lane, args, kwargs),
        )

    def __repr__(self) -> str:
        return f"Task({self.name!r}, lane={self.lane!r})"

    def __reduce__(self) -> str:
        raise TypeError(
            f"The task {self.name!r} cannot be pickled. Send its name instead; `submit` takes "
            "names too."
        )


class TaskFunction(Task[P, R_co], Generic[P, R_co, Q, D_co]):
    """A registered function. Calling it runs it here; submitting it runs it on a worker.

    `Q` and `D` are the parameters, context included, and the return type of the function itself.
    """

    def __init__(
        self,
        app: "Fabric",
        function: Callable[Q, D_co],
        name: str | None,
        lane: str,
        policy: ExecutionPolicy | None,
        retry: Retry | None,
    ) -> None:
        self.function = function
        self.retry = retry
        """Which exceptions are retried; how often is part of the stored policy."""
        shared = shared_fields(_name_of(function, name), lane_id=lane, policy=policy)
        self.arguments = Arguments(function, shared.execution_kind)
        super().__init__(app, shared, self.arguments)
        self.is_async = inspect.iscoroutinefunction(function)
        self.__name__ = self.name
        self.__doc__ = function.__doc__

    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> D_co:
        return self.function(*args, **kwargs)


class TaskDecorator:
    """Registers functions as tasks: `@app.task` or `@app.task(lane="mail", retry=3)`."""

    def __init__(self, app: "Fabric", name: str | None = None, **options: Any) -> None:
        self._app = app
        self._name = name
        self._lane = validate_lane(options.get("lane", "default"))
        self._retry = _retry(options.get("retry"))
        self._policy = _policy(options, self._retry, app.namespace)

    @overload
    def __call__(
        self, function: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]], /
    ) -> TaskFunction[P, R, Concatenate[Context, P], Coroutine[Any, Any, R]]: ...

    @overload
    def __call__(
        self, function: Callable[Concatenate[SyncContext, P], R], /
    ) -> TaskFunction[P, R, Concatenate[SyncContext, P], R]: ...

    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> TaskFunction[P, R, P, Coroutine[Any, Any, R]]: ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> TaskFunction[P, R, P, R]: ...

    @overload
    def __call__(
        self, name: str | None = None, **options: Unpack[TaskOptions]
    ) -> "TaskDecorator": ...

    def __call__(self, name: Any = None, **options: Any) -> Any:
        if name is None or isinstance(name, str):
            _refuse_unknown(options, TaskOptions)
            return TaskDecorator(self._app, name, **options)
        task: TaskFunction[..., Any, ..., Any]
        task = TaskFunction(self._app, name, self._name, self._lane, self._policy, self._retry)
        known = self._app.tasks.get(task.name)
        if known is not None and not _redefines(known.function, task.function):
            problem = f'A task named "{task.name}" is already registered.'
            raise ConfigError("task", f"{problem} Pass name= to register both.", "name")
        self._app.tasks[task.name] = task
        return task


def _redefines(old: Any, new: Any) -> bool:
    """Whether this is the same function again: a notebook cell that reruns, a module reloaded."""
    places = {(getattr(f, "__module__", ""), getattr(f, "__qualname__", "")) for f in (old, new)}
    module, name = places.pop()
    # Each call of a function that defines tasks makes different ones.
    if places or not name or "<locals>" in name:
        return False
    # In one import of a module, a second definition is a mistake.
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return not getattr(spec, "_initializing", False)


def as_task(app: "Fabric", task: object) -> Task[..., Any]:
    """The given task, or the task with the given name."""
    if isinstance(task, Task):
        return typing.cast("Task[..., Any]", task)
    if isinstance(task, str):
        return app.named(task)
    if inspect.iscoroutine(task):
        task.close()
        problem = "must be a task, got a call of one. Pass the task and its arguments separately."
        raise invalid_input("task", problem)
    problem = f"must be a task or its name, got {task!r}. Decorate the function with @app.task."
    raise invalid_input("task", problem)


def shared_fields(name: str, **fields: Any) -> NewExecution:
    """The fields that all executions of a task share; each gets its own id and payload."""
    no_id = ExecutionId.trusted("")
    return NewExecution(
        execution_id=no_id, execution_kind=name, payload_encoding=codec.JSON, **fields
    )


def _adjusted(shared: NewExecution, options: SubmitOptions, namespace: str) -> NewExecution:
    """The execution with these options; rejects wrong types, such as `idempotency_key=0`."""
    _refuse_unknown(options, SubmitOptions)
    lane, delay, at = options.get("lane"), options.get("delay"), options.get("at")
    priority, tags = options.get("priority"), options.get("tags")
    if priority is not None and (isinstance(priority, bool) or not isinstance(priority, int)):
        raise invalid_input("priority", f"must be a whole number, got {type(priority).__name__}")
    if at is not None and delay is not None:
        raise invalid_input("at", "cannot be combined with delay. Pass one of them.")
    return msgspec.structs.replace(
        shared,
        lane_id=shared.lane_id if lane is None else validate_lane(lane, "lane"),
        priority=priority,
        delay_ms=None if delay is None else to_ms(delay, "delay"),
        delay_until=None if at is None else _time_ms(at),
        tags={} if tags is None else validate_creation_tags(tags),
        policy=_limited(shared.policy, options, namespace),
    )


def _limited(
    policy: ExecutionPolicy | None, options: SubmitOptions, namespace: str
) -> ExecutionPolicy | None:
    """The policy with other budgets or another quota than its own; None keeps them."""
    budgets, quota = options.get("budgets"), options.get("quota")
    changes: dict[str, Any] = {}
    if budgets is not None:
        given = parse_policy({"budget_ids": _budget_ids(budgets, namespace)}) or NO_POLICY
        changes["budget_ids"] = given.budget_ids
    if quota is not None:
        changes["quota_policy_id"] = quota_id(quota, namespace)
    return msgspec.structs.replace(policy or NO_POLICY, **changes) if changes else policy


def _budget_ids(budgets: Iterable[str], namespace: str) -> list[str]:
    if not is_list(budgets):
        problem = f"must be a list of names, got {type(budgets).__name__}"
        raise invalid_input("budgets", problem)
    return [budget_id(typing.cast("str", name), namespace) for name in budgets]


def _time_ms(at: object) -> int:
    """A time in milliseconds, rounded up."""
    if not isinstance(at, datetime):
        raise invalid_input("at", f"must be a datetime, got {type(at).__name__}")
    if at.utcoffset() is None:
        problem = "has no time zone. Add tzinfo=UTC, or pass at.astimezone() if it is local."
        raise invalid_input("at", problem)
    return max(0, -((_EPOCH - at) // timedelta(milliseconds=1)))


def _checked_key(kind: str, key: str | None) -> str:
    """The key, or empty for none; checks that it and the task's name fit the limit together."""
    if key is None or key == "":
        return ""
    scope = scoped_key(kind, "").encode(errors="surrogatepass")
    return validate_text(key, "idempotency_key", limit=max(0, _MAX_KEY_BYTES - len(scope)))


def _refuse_unknown(given: Mapping[str, object], options: type) -> None:
    known = options.__annotations__
    for name in given:
        if name not in known:
            advice = f"The options are: {', '.join(known)}."
            if name in SubmitOptions.__annotations__:
                advice = f"Set it for a submission: task.options({name}=…).submit(…)."
            elif name in TaskOptions.__annotations__:
                advice = f"Set it where the task is defined: @app.task({name}=…)."
            raise TypeError(f"There is no option {name!r} here. {advice}")


def _retry(retry: object) -> Retry | None:
    if isinstance(retry, int) and not isinstance(retry, bool):
        return Retry(retry)
    if retry is None or isinstance(retry, Retry):
        return retry
    problem = f"must be a Retry or a number of retries, got {type(retry).__name__}"
    raise ConfigError("task", problem, "retry")


def _policy(
    options: Mapping[str, Any], retry: Retry | None, namespace: str
) -> ExecutionPolicy | None:
    """The execution policy for a task's options; None if all are defaults."""
    policy: dict[str, Any] = {}
    if options.get("quota") is not None:
        policy["quota_policy_id"] = quota_id(options["quota"], namespace)
    if options.get("budgets"):
        policy["budget_ids"] = _budget_ids(options["budgets"], namespace)
    if retry is not None:
        policy["retry_policy"] = msgspec.to_builtins(retry.policy())
    for option, part, field in _DURATIONS:
        if options.get(option) is not None:
            policy.setdefault(part, {})[field] = to_ms(options[option], option)
    if policy.get("timeout_policy", {}).get("execution_deadline_ms") == 0:
        raise ConfigError("task", "must be more than 0; None means no deadline", "deadline")
    tokens = normalise(options.get("capabilities", ()))
    if tokens:
        policy["routing_requirements"] = {"required_capabilities": tokens}
    return parse_policy(policy)


_DURATIONS = (
    ("timeout", "timeout_policy", "attempt_timeout_ms"),
    ("deadline", "timeout_policy", "execution_deadline_ms"),
    ("retention", "stream_policy", "retention_ttl_ms"),
)


def _name_of(given: object, name: str | None) -> str:
    """The task's name; rejects what a worker could not run."""
    if not callable(given):
        raise ConfigError("task", f"{given!r} is not a function")
    called: Any = getattr(given, "__name__", None)
    shown = name or called or repr(given)
    for matches, problem in _NOT_TASKS:
        if matches(given):
            raise ConfigError("task", f"{shown}: {problem}")
    if name is None and called in (None, "<lambda>"):
        what = "a lambda" if called else type(given).__name__
        problem = f'{what} has no name of its own: give the task one, `app.task("name")(…)`'
        raise ConfigError("task", problem, "name")
    if name == "":
        problem = "must not be empty; leave it out to use the function's name"
        raise ConfigError("task", problem, "name")
    return validate_text(called if name is None else name, "name", required=True)


def _is_object(given: object) -> bool:
    """Whether this is neither a function nor a decorated one."""
    if hasattr(given, "__wrapped__") or inspect.isroutine(given):
        return False
    return not isinstance(given, functools.partial)


_STREAMS = "a generator has no result to store: return a list, or write output with `ctx.stream()`"
_NOT_TASKS: tuple[tuple[Callable[[object], bool], str], ...] = (
    (lambda given: isinstance(given, Task), "is already a task"),
    (inspect.isgeneratorfunction, _STREAMS),
    (inspect.isasyncgenfunction, _STREAMS),
    (inspect.isclass, "is a class: decorate a function that makes or uses it"),
    (inspect.isbuiltin, "is built in, and its parameters are unknown: call it in a function"),
    (_is_object, "is an object, not a function: decorate a function that calls it"),
)
