"""The exceptions. Decide on `.error_class` or `.retryable`, never on message text."""

from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, Literal, Self

from flowfabric.core.catalogue import CATALOGUE, FAULT_KINDS, CatalogueEntry, ErrorClass, explained
from flowfabric.core.text import compact_ids

Verdict = Literal["succeeded", "failed", "superseded", "unknown"]
"""What happened to a call whose reply was lost."""


class FlowFabricError(Exception):
    """Base of every error raised by FlowFabric."""

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed later."""
        return False


class ConfigError(FlowFabricError):
    """A setting is missing or wrong; nothing was done.

    >>> str(ConfigError("worker", "must be positive", "lease_ttl_ms"))
    'config: worker.lease_ttl_ms: must be positive'
    """

    def __init__(self, context: str, message: str, field: str | None = None) -> None:
        super().__init__(context, message, field)
        self.context = context
        self.message = message
        self.field = field

    def __str__(self) -> str:
        where = f"{self.context}.{self.field}" if self.field else self.context
        return f"config: {where}: {self.message}"


class BackendNotBuilt(ConfigError):
    """`FF_BACKEND` names a store that this version does not have."""


class WorkerAtCapacity(FlowFabricError):
    """The worker already runs as many tasks as it may. Claim again when one has finished."""

    code = "worker_at_capacity"

    @property
    def retryable(self) -> bool:
        return True

    def __str__(self) -> str:
        return f"{self.code}: {CATALOGUE[self.code].hint}"


class TaskFinishedError(FlowFabricError):
    """The task has already been completed, failed, suspended or delayed."""

    def __init__(self, execution_id: str = "", finished_by: str = "") -> None:
        super().__init__(execution_id, finished_by)
        self.execution_id = execution_id
        self.finished_by = finished_by

    def __str__(self) -> str:
        task = f"task {compact_ids(self.execution_id)}" if self.execution_id else "this task"
        how = f" by {self.finished_by}" if self.finished_by else ""
        return f"{task} was already ended{how}; end a task only once"


class LeaseLost(FlowFabricError):
    """The worker no longer owns the execution; `code` says what ended the lease."""

    def __init__(self, code: str, reason: str = "", execution_id: str = "") -> None:
        super().__init__(code, reason, execution_id)
        self.code = code
        self.reason = reason
        self.execution_id = execution_id

    def __str__(self) -> str:
        whose = f" of {compact_ids(self.execution_id)}" if self.execution_id else ""
        entry = CATALOGUE.get(self.code)
        why = self.reason or (entry.hint if entry else "stop work")
        return f"lease{whose} lost ({self.code}): {why}"


class PossiblySucceeded(FlowFabricError):
    """The reply was lost: the operation may or may not have taken effect.

    `await error.verify()` reads the state and returns what happened.
    """

    def __init__(self, op: str, execution_id: str = "", message: str = "") -> None:
        super().__init__(op, execution_id, message)
        self.op = op
        self.execution_id = execution_id
        self.message = message
        self.verifier: Callable[[], Awaitable[Verdict]] | None = None

    def __reduce__(self) -> tuple[type[Self], tuple[str, ...]]:
        # The verifier belongs to a connection of this process.
        return type(self), self.args

    async def verify(self) -> Verdict:
        """What happened to the call; `superseded` if another call has decided since."""
        return "unknown" if self.verifier is None else await self.verifier()

    def __str__(self) -> str:
        target = f" of {compact_ids(self.execution_id)}" if self.execution_id else ""
        cause = f" ({self.message})" if self.message else ""
        return f"{self.op}{target}: no reply{cause}; read the state before repeating the call"


class RetryableError(FlowFabricError):
    """Raise in a handler to fail the attempt; another attempt may succeed."""

    category = "transient"

    @property
    def retryable(self) -> bool:
        return True


class PermanentError(FlowFabricError):
    """Raise in a handler to fail the execution; it is not retried."""

    category = "permanent"


class PayloadMismatch(PermanentError):
    """A stored value does not fit the type that the code expects. Trying again cannot help."""

    category = "extractor_payload_decode"


_UNKNOWN = CatalogueEntry("", ErrorClass.BUG, "bug", 500, "Report this: the code is unknown.")


class EngineError(FlowFabricError):
    """An error with a code of the catalogue.

    >>> str(EngineError("invalid_claim_grant"))
    'invalid_claim_grant: Ask for a new grant.'
    """

    by_group: ClassVar[dict[str, "type[EngineError]"]] = {}

    def __init_subclass__(cls, groups: str = "") -> None:
        EngineError.by_group.update(dict.fromkeys(groups.split(), cls))

    def __init__(self, code: str, *details: str, op: str = "") -> None:
        super().__init__(code, *details)
        self.code = code
        self.details: tuple[str, ...] = details
        self.op = op

    @property
    def _entry(self) -> CatalogueEntry:
        return CATALOGUE.get(self.code, _UNKNOWN)

    @property
    def error_class(self) -> ErrorClass:
        """What a caller should do about it; depends only on the code."""
        return self._entry.error_class

    @property
    def group(self) -> str:
        """The group of its code."""
        return self._entry.group

    @property
    def retryable(self) -> bool:
        return self.error_class is ErrorClass.RETRYABLE

    @property
    def http_status(self) -> int:
        """The HTTP status of this error."""
        return self._entry.http_status

    @property
    def hint(self) -> str:
        """One sentence: what the user can do next."""
        return self._entry.hint

    @property
    def detail(self) -> str:
        """All details in one line, as HTTP shows them."""
        return ", ".join(self.details)

    @property
    def explanation(self) -> str:
        """The details in one line for people, with the meaning of their words."""
        return compact_ids(", ".join(map(explained, self.details)))

    @property
    def problem(self) -> str:
        """The code and what happened, without the hint."""
        return f"{self.code}: {self.explanation}" if self.details else self.code

    def __str__(self) -> str:
        if not self.explanation:
            return f"{self.problem}: {self.hint}"
        return f"{self.problem.removesuffix('.')}. {self.hint}"


class NotFoundError(EngineError, groups="not_found"):
    """The named thing does not exist."""

    @property
    def http_status(self) -> int:
        # The waitpoint of an early signal may still be created later.
        if self.code == "waitpoint_not_found" and self.op == "deliver_signal":
            return 409
        return super().http_status


class ValidationError(EngineError, groups="validation"):
    """The request breaks a rule; details name the field and the problem.

    `undecodable` marks a value of the wrong type: HTTP 422 instead of 400.
    """

    def __init__(self, code: str, *details: str, op: str = "", undecodable: bool = False) -> None:
        super().__init__(code, *details, op=op)
        self.undecodable = undecodable

    @property
    def http_status(self) -> int:
        return 422 if self.undecodable else super().http_status


class AuthError(EngineError, groups="auth"):
    """The caller may not do this."""


class ContentionError(EngineError, groups="contention"):
    """Another caller was first, or the execution is in another phase."""


class ConflictError(EngineError, groups="conflict"):
    """The request contradicts something that exists."""


class StateError(EngineError, groups="state"):
    """The target's state does not allow the operation."""


class BudgetExceeded(StateError):
    """Usage passed a hard limit: stop spending."""

    def __init__(self, *details: str, op: str = "") -> None:
        super().__init__("budget_exceeded", *details, op=op)
        # Exception.__reduce__ rebuilds from args, and this class adds the code itself.
        self.args = details


class LimitError(EngineError, groups="limit"):
    """A rate, a pool or a capacity is used up for now."""

    @property
    def retry_after_ms(self) -> int | None:
        """How long to wait before repeating, if known."""
        for detail in self.details:
            name, _, value = detail.partition("=")
            if name == "retry_after_ms":
                return int(value)
        return None


class BugError(EngineError, groups="bug"):
    """A bug in the engine: report it."""


class CorruptionError(EngineError, groups="corruption"):
    """Stored data cannot be read."""

    @property
    def http_status(self) -> int:
        # A handle comes from the caller.
        if self.details and self.details[0].startswith("handle_codec:"):
            return 400
        return super().http_status


class KeyStoreError(EngineError, groups="key_store"):
    """The stored signing keys are missing or broken."""


class UnavailableError(EngineError, groups="availability subscriptions"):
    """The operation cannot be served: missing, too old, or shutting down."""

    def __init__(self, code: str, *details: str, op: str = "", shutting_down: bool = False) -> None:
        super().__init__(code, *details, op=op)
        self.shutting_down = shutting_down

    @property
    def retryable(self) -> bool:
        return self.shutting_down or super().retryable

    @property
    def hint(self) -> str:
        if self.code != "unavailable":
            return super().hint
        if self.shutting_down:
            return "This process is shutting down; repeat the call in another one."
        return "This version of FlowFabric does not support it; nothing was changed."


class TimeoutError_(EngineError):  # noqa: N801 - the name in the public exception tree
    """A deadline passed."""


class TransportError(EngineError):
    """Valkey was unreachable, or its answer was lost or unusable.

    `ambiguous` means that the call was sent and may have taken effect.
    """

    def __init__(
        self, kind: str, message: str = "", *, ambiguous: bool = False, op: str = ""
    ) -> None:
        if kind not in FAULT_KINDS:
            raise ValueError(f"unknown transport fault kind {kind!r}")
        super().__init__("transport", kind, message, op=op)
        self.args = (kind, message)
        self.kind = kind
        self.message = message
        self.ambiguous = ambiguous

    @property
    def error_class(self) -> ErrorClass:
        retryable = FAULT_KINDS[self.kind].retryable
        return ErrorClass.RETRYABLE if retryable else ErrorClass.TERMINAL

    @property
    def passing(self) -> bool:
        """Whether the fault usually ends by itself within seconds."""
        return FAULT_KINDS[self.kind].passing

    @property
    def safe_to_repeat(self) -> bool:
        """Whether any operation may be repeated; if not, only a replay-safe one."""
        return not self.ambiguous and self.retryable

    @property
    def hint(self) -> str:
        if self.ambiguous:
            return "The call may have taken effect; read the state before repeating it."
        return FAULT_KINDS[self.kind].hint

    @property
    def problem(self) -> str:
        # One kind has the name of the code.
        parts = dict.fromkeys(part for part in (self.code, self.kind, self.message) if part)
        return compact_ids(": ".join(parts))


class ReplyError(TransportError):
    """A function returned a reply that this version cannot read. Do not repeat the call."""

    def __init__(
        self,
        function: str,
        problem: str,
        execution_id: str = "",
        *,
        op: str = "",
        ambiguous: bool = True,
    ) -> None:
        about = f" for {execution_id}" if execution_id else ""
        message = f"{function or op or 'a function'} answered {problem}{about}"
        super().__init__("protocol", message, ambiguous=ambiguous, op=op)
        self.args = (function, problem, execution_id)
        self.function = function
        self.execution_id = execution_id

    @property
    def hint(self) -> str:
        if self.ambiguous:
            return super().hint
        return "Different versions of FlowFabric use this server; run one version everywhere."


class UnknownCodeError(ReplyError):
    """A function returned an error code that this version does not know. Nothing was changed."""

    def __init__(
        self, code: str, *details: str, op: str = "", function: str = "", execution_id: str = ""
    ) -> None:
        extra = f" ({', '.join(details)})" if details else ""
        problem = f"the unknown code {code!r}{extra}"
        super().__init__(function, problem, execution_id, op=op, ambiguous=False)
        self.args = (code, *details)
        self.unknown_code = code


_BY_CODE = {code: EngineError.by_group[entry.group] for code, entry in CATALOGUE.items()}
_BY_CODE["timeout"] = TimeoutError_


def engine_error(
    code: str,
    details: Sequence[str] = (),
    op: str = "",
    *,
    function: str = "",
    execution_id: str = "",
) -> EngineError:
    """The typed error for a code that a function returned.

    An unknown code means that processes of different versions share the deployment.
    """
    if code == "transport":
        kind = details[0] if details and details[0] in FAULT_KINDS else "other"
        return TransportError(kind, ", ".join(details[1:]), op=op)
    if code == "budget_exceeded":
        return BudgetExceeded(*details, op=op)
    if code in _BY_CODE:
        return _BY_CODE[code](code, *details, op=op)
    return UnknownCodeError(code, *details, op=op, function=function, execution_id=execution_id)


def invalid_input(
    field: str, problem: str, *, op: str = "", undecodable: bool = False
) -> ValidationError:
    """The error for an invalid argument: `invalid_input: <field>: <problem>`."""
    return ValidationError("invalid_input", f"{field}: {problem}", op=op, undecodable=undecodable)
