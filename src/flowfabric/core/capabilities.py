"""Capabilities: what an execution requires and a worker offers."""

from collections.abc import Iterable, Sequence
from typing import Literal
from urllib.parse import quote, unquote

from flowfabric.core.errors import ValidationError
from flowfabric.core.ids import has_space_or_control, is_list

_MAX_TOKENS = 256
_MAX_CSV_BYTES = 4096

_TASK = "task:"
"""The prefix of tokens that workers offer for the tasks they know; reserved for the engine."""
_UNESCAPED = "".join(map(chr, range(0x21, 0x7F))).replace("%", "").replace(",", "")

Side = Literal["required", "worker"]


def normalise(tokens: object, side: Side = "required") -> tuple[str, ...]:
    """Check a collection of tokens and return it sorted, without duplicates.

    >>> normalise(["gpu", "cuda", "gpu"])
    ('cuda', 'gpu')
    """
    if not is_list(tokens):
        raise _refuse(side, "not_array", undecodable=True)
    distinct = {_check_token(token, side) for token in tokens}
    if len(distinct) > _MAX_TOKENS:
        raise _refuse(side, "too_many_tokens")
    ordered = tuple(sorted(distinct))
    if len(to_csv(ordered).encode()) > _MAX_CSV_BYTES:
        raise _refuse(side, "too_many_bytes")
    return ordered


def to_csv(tokens: Iterable[str]) -> str:
    """The stored form of normalised tokens."""
    return ",".join(tokens)


def from_csv(csv: str, side: Side = "required") -> tuple[str, ...]:
    """Read the stored form; empty items are skipped."""
    return normalise([token for token in csv.split(",") if token], side)


def task_token(kind: str) -> str:
    """The token that a worker offers for a task it has a handler for.

    >>> task_token("resize, fast")
    'task:resize%2C%20fast'
    """
    return _TASK + quote(kind, safe=_UNESCAPED)


def offered_csv(capabilities: Iterable[str], tasks: Iterable[str], *, no_others: bool) -> str:
    """What a worker offers with a claim. With `no_others`, it takes only the tasks it knows.

    >>> offered_csv(("gpu",), ("resize",), no_others=True)
    'gpu,task:,task:resize'
    """
    mark = (_TASK,) if no_others else ()
    return to_csv((*capabilities, *mark, *sorted(map(task_token, tasks))))


def read_tasks(csv: str) -> tuple[tuple[str, ...], bool]:
    """A worker's tasks from their stored form, and whether it also takes other tasks."""
    names = [token.removeprefix(_TASK) for token in csv.split(",") if token]
    return tuple(unquote(name) for name in names if name), "" not in names


def signature_parts(signature: str) -> tuple[str, str]:
    """The namespace and the required tokens (CSV) in a signature, which indexes waiting work.

    >>> signature_parts("acme cuda,gpu"), signature_parts("gpu")
    (('acme', 'cuda,gpu'), ('default', 'gpu'))
    """
    namespace, mark, required = signature.partition(" ")
    return (namespace, required) if mark else ("default", signature)


def split_tasks(required: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """The capabilities among required tokens, and the tasks that a worker must know.

    >>> split_tasks("gpu,task:resize")
    (frozenset({'gpu'}), ('resize',))
    """
    tokens = [token for token in required.split(",") if token]
    named = frozenset(token for token in tokens if not token.startswith(_TASK))
    tasks = (token.removeprefix(_TASK) for token in tokens if token not in named)
    return named, tuple(map(unquote, tasks))


class Offer:
    """What a worker may take: the tokens that it offers, and the namespaces that it serves.

    None stands for every token, and for every namespace.

    >>> Offer("gpu", ["acme"]).covers("acme gpu"), Offer("gpu", ["acme"]).covers("gpu")
    (True, False)
    """

    def __init__(self, csv: str | None, namespaces: Sequence[str] | None = None) -> None:
        self._tokens = None if csv is None else frozenset(csv.split(","))
        self._namespaces = None if namespaces is None else frozenset(namespaces)
        self.text = " ".join((csv or "", *sorted(self._namespaces or ())))
        """The tokens as CSV, then the namespaces."""

    def serves(self, namespace: str) -> bool:
        """Whether it serves a namespace."""
        return self._namespaces is None or namespace in self._namespaces

    def covers(self, signature: str) -> bool:
        """Whether it may take executions with this signature."""
        namespace, required = signature_parts(signature)
        if not self.serves(namespace):
            return False
        return not required or self._tokens is None or self._tokens.issuperset(required.split(","))


def missing(required: Iterable[str], offered: Iterable[str]) -> tuple[str, ...]:
    """The required tokens that are not offered, sorted.

    >>> missing(("cuda", "gpu"), ("gpu",))
    ('cuda',)
    """
    return tuple(sorted(set(required).difference(offered)))


def log_digest(csv: str) -> str:
    """A digest of offered tokens for log records: 64-bit FNV-1a with its halves xor-ed.

    >>> log_digest("cuda,gpu")
    'c952a6c4'
    """
    digest = 0xCBF29CE484222325
    for byte in csv.encode():
        digest = (digest ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{digest >> 32 ^ digest & 0xFFFFFFFF:08x}"


def _check_token(token: object, side: Side) -> str:
    if not isinstance(token, str):
        raise _refuse(side, "non_string_token", undecodable=True)
    if not token:
        raise _refuse(side, "empty_token")
    if "," in token:
        raise _refuse(side, "comma_in_token")
    if has_space_or_control(token):
        raise _refuse(side, "control_or_whitespace")
    if token.startswith(_TASK):
        raise _refuse(side, "reserved prefix")
    return token


def _refuse(side: Side, problem: str, *, undecodable: bool = False) -> ValidationError:
    return ValidationError("invalid_capabilities", f"{side}:{problem}", undecodable=undecodable)
