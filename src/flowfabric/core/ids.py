"""Identifiers: their forms, new ones, and the checks of names that callers pass."""

import hmac
import os
import re
from collections.abc import Iterable, Mapping
from hashlib import sha1, sha256
from shlex import quote
from typing import Self, TypeGuard, cast
from unicodedata import category

from flowfabric.core.errors import CorruptionError, ValidationError, invalid_input
from flowfabric.core.partition import (
    PartitionCounts,
    flow_partition,
    key_name,
    solo_partition,
    spread_partition,
)
from flowfabric.core.text import shown

_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
# 0 to 65535, without leading zeros.
_INDEX = (
    "(?:0|[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
)
_is_uuid = re.compile(_UUID).fullmatch
_is_other_uuid = re.compile(rf"(?i:{_UUID}|[0-9a-f]{{32}})").fullmatch
_is_index = re.compile(_INDEX).fullmatch
_is_execution_id = re.compile(rf"\{{fp:{_INDEX}\}}:{_UUID}").fullmatch
_is_compact_id = re.compile(rf"({_INDEX})-({_UUID})").fullmatch
_VARIANT = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}


class IdParseError(ValidationError):
    """The text is not a valid id; `kind` names the broken rule."""

    def __init__(self, field: str, kind: str, text: str) -> None:
        shown = text if len(text) <= 80 else text[:77] + "..."
        super().__init__("invalid_input", f"{field}: {kind}: {shown!r}", undecodable=True)
        self.args = (field, kind, text)
        self.field = field
        self.kind = kind


def new_uuid() -> str:
    """A random (v4) UUID; about three times as fast as `str(uuid.uuid4())`."""
    return _uuid(os.urandom(16).hex())


def _uuid(digits: str) -> str:
    return (
        f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-"
        f"{_VARIANT[digits[16]]}{digits[17:20]}-{digits[20:32]}"
    )


class _Id(str):
    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """The id, or `IdParseError`."""
        return cls(text)

    @classmethod
    def trusted(cls, text: str) -> Self:
        """An id that the engine wrote; not checked."""
        return str.__new__(cls, text)


class ExecutionId(_Id):
    """The permanent name of an execution: `{fp:N}:<uuid>`.

    The text may also be the compact spelling, which needs no quotes in shells and URLs. The id
    itself is always the canonical text: a second spelling would name another record.

    >>> ExecutionId("42-11111111-2222-4333-8444-555555555555")
    '{fp:42}:11111111-2222-4333-8444-555555555555'
    """

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        return cls.parse(text)

    @classmethod
    def parse(cls, text: str, field: str = "execution_id") -> Self:
        """The id, or `IdParseError` that names the field."""
        if not isinstance(text, str):
            raise _execution_id_error(text, field)
        if _is_execution_id(text) is None:
            compact = _is_compact_id(text)
            if compact is None:
                raise _execution_id_error(text, field)
            text = f"{{fp:{compact[1]}}}:{compact[2]}"
        return str.__new__(cls, text)

    @classmethod
    def solo(
        cls,
        lane_id: str,
        counts: PartitionCounts,
        shards: int = 1,
        key: tuple[str, str] | None = None,
    ) -> Self:
        """Mint an id for an execution outside a flow, on one of the lane's `shards` partitions.

        `key` is the namespace and the idempotency key, if it has one: repeats get an id on the same
        partition.
        """
        uuid = new_uuid()
        if shards == 1:
            return str.__new__(cls, f"{{fp:{solo_partition(lane_id, counts)}}}:{uuid}")
        name = bytes.fromhex(uuid.replace("-", "")) if key is None else key_name(*key)
        return str.__new__(cls, f"{{fp:{spread_partition(lane_id, name, shards, counts)}}}:{uuid}")

    @classmethod
    def deterministic_for_flow(cls, flow_id: str, uuid: str, counts: PartitionCounts) -> Self:
        """Name a flow member with the caller's own UUID."""
        index = flow_partition(validate_uuid(flow_id, "flow_id"), counts)
        return str.__new__(cls, f"{{fp:{index}}}:{validate_uuid(uuid, 'uuid')}")

    @classmethod
    def deterministic_solo(cls, lane_id: str, uuid: str, counts: PartitionCounts) -> Self:
        """Name an execution outside a flow with the caller's own UUID."""
        index = solo_partition(lane_id, counts)
        return str.__new__(cls, f"{{fp:{index}}}:{validate_uuid(uuid, 'uuid')}")

    @classmethod
    def mint_solo_many(
        cls, lane_id: str, counts: PartitionCounts, count: int, shards: int = 1
    ) -> list[Self]:
        """Mint `count` ids for executions outside a flow."""
        if shards != 1:
            return [cls.solo(lane_id, counts, shards) for _ in range(count)]
        prefix = f"{{fp:{solo_partition(lane_id, counts)}}}:"
        # One read of random bytes for all ids: reading per id would take a third of the time.
        digits = os.urandom(16 * count).hex()
        return [
            str.__new__(cls, prefix + _uuid(digits[first : first + 32]))
            for first in range(0, 32 * count, 32)
        ]

    @property
    def partition(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The number of its partition. Hides `str.partition`."""
        return int(self[4 : self.index("}")])

    @property
    def tag(self) -> str:
        """The hash tag of its partition, such as `{fp:42}`."""
        return self[: self.index("}") + 1]

    @property
    def uuid(self) -> str:
        return self[-36:]

    @property
    def compact(self) -> str:
        """The spelling for people, shells and URLs, such as `42-11111111-…`."""
        return f"{self[4 : self.index('}')]}-{self[-36:]}"

    @property
    def short(self) -> str:
        """What log lines show, such as `42-11111111…`."""
        return f"{self[4 : self.index('}')]}-{self[-36:-28]}…"

    def check_partition(self, counts: PartitionCounts) -> Self:
        """The id, or `invalid_input` if the deployment has no such partition."""
        index = self.partition
        if index >= counts.flow:
            raise invalid_input(
                "execution_id", f"partition {index} is out of range 0..{counts.flow - 1}"
            )
        return self


def _execution_id_error(text: object, field: str) -> IdParseError:
    if not isinstance(text, str):
        return IdParseError(field, "MissingTag", repr(text))
    end = text.find("}:")
    if not text.startswith("{fp:") or end < 0:
        kind = "MissingTag"
    elif _is_index(text[4:end]) is None:
        kind = "InvalidPartitionIndex"
    else:
        kind = "InvalidUuid"
    return IdParseError(field, kind, text)


def is_uuid(text: str) -> bool:
    """Whether stored text is a UUID in lower case."""
    return _is_uuid(text) is not None


def canonical_uuid(text: str) -> str | None:
    """A UUID in the form that is stored; None if the text is no UUID.

    Callers may write it in upper case or without hyphens.

    >>> canonical_uuid("1111111122224333844455555555555A")
    '11111111-2222-4333-8444-55555555555a'
    """
    if _is_uuid(text) is not None:
        return text
    if _is_other_uuid(text) is None:
        return None
    digits = text.replace("-", "").lower()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def is_execution_id(text: str, tag: str) -> bool:
    """Whether a stored member is an id of this partition; a damaged index can hold anything."""
    return text.startswith(f"{tag}:") and _is_execution_id(text) is not None


_FAMILIES = ("fp", "b", "q")


class PartitionKey(_Id):
    """The hash tag of a partition: `{fp:N}`, `{b:N}` or `{q:N}`."""

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        if not isinstance(text, str) or len(text) < 2 or text[0] != "{" or text[-1] != "}":
            raise IdParseError("partition_key", "MissingBraces", str(text))
        prefix, colon, index = text[1:-1].partition(":")
        if not colon:
            raise IdParseError("partition_key", "MalformedBody", text)
        if prefix not in _FAMILIES:
            raise IdParseError("partition_key", "UnknownFamilyPrefix", text)
        if _is_index(index) is None:
            raise IdParseError("partition_key", "InvalidIndex", text)
        return str.__new__(cls, text)

    @property
    def index_number(self) -> int:
        """The number of the partition."""
        return int(self[self.index(":") + 1 : -1])


class WaitpointToken:
    """A secret that allows signals to one waitpoint. It prints redacted.

    >>> WaitpointToken("k1:" + "0" * 40)
    WaitpointToken(k1:<REDACTED:len=40>)
    """

    __slots__ = ("_raw",)

    def __init__(self, raw: str) -> None:
        self._raw = raw

    def reveal(self) -> str:
        """The secret itself. Never log it."""
        return self._raw

    @property
    def kid(self) -> str:
        """The id of the signing key; empty if the token is malformed."""
        kid, _, digest = self._raw.partition(":")
        return kid if digest else ""

    @property
    def fingerprint(self) -> str:
        """16 hex digits that identify the token without revealing it."""
        return sha256(self._raw.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        kid, _, digest = self._raw.partition(":")
        return f"{kid}:<REDACTED:len={len(digest)}>" if kid and digest else "<REDACTED:malformed>"

    def __repr__(self) -> str:
        return f"WaitpointToken({self})"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WaitpointToken):
            return NotImplemented
        return hmac.compare_digest(self._raw.encode(), other._raw.encode())

    def __hash__(self) -> int:
        return hash(self._raw)


def fnv1a64(data: bytes) -> int:
    """The 64-bit FNV-1a hash."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value


_LANE_MAX = 64
_NAME_MAX = 256
_is_lane = re.compile(r"[\x20-\x7e]{1,64}").fullmatch
_is_plain_name = re.compile(r"[!-~]{1,128}").fullmatch
_is_plain_namespace = re.compile(r"[!-9;-z|~]{1,128}").fullmatch
_NO_LISTS = (str, bytes, bytearray, memoryview, Mapping)


def is_list(value: object) -> TypeGuard[Iterable[object]]:
    """Whether a value is a collection of items: not text, bytes or a mapping."""
    return isinstance(value, Iterable) and not isinstance(value, _NO_LISTS)


def has_space_or_control(text: str) -> bool:
    """Whether a text has whitespace, control characters, or surrogates, which UTF-8 cannot hold."""
    return any(char.isspace() or category(char) in ("Cc", "Cs") for char in text)


def _size(text: object, field: str) -> int:
    """The number of UTF-8 bytes of a text; anything else is `invalid_input`."""
    if not isinstance(text, str):
        raise invalid_input(field, f"must be text, got {type(text).__name__}", undecodable=True)
    try:
        return len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:
        raise invalid_input(field, "is not valid Unicode", undecodable=True) from None


def validate_uuid(text: str, field: str) -> str:
    """A UUID of any version, in lower case with hyphens."""
    if not isinstance(text, str) or _is_uuid(text) is None:
        raise IdParseError(field, "InvalidUuid", str(text))
    return text


def _lane_problem(text: str) -> str | None:
    if _is_lane(text) is not None:
        return None
    data = text.encode(errors="surrogatepass")
    if not data:
        return "Empty"
    if len(data) > _LANE_MAX:
        return f"TooLong({len(data)})"
    return f"NonPrintable({next(i for i, byte in enumerate(data) if not 0x20 <= byte <= 0x7E)})"


def validate_lane(text: str, field: str = "lane_id") -> str:
    """A lane name: 1 to 64 printable ASCII bytes, spaces included."""
    _size(text, field)
    problem = _lane_problem(text)
    if problem is not None:
        raise invalid_input(field, problem, undecodable=True)
    return text


def validate_lanes(names: object, field: str = "lanes") -> tuple[str, ...]:
    """A list of lane names; a single name is refused."""
    if is_list(names):
        return tuple(validate_lane(cast("str", name)) for name in names)
    problem = f"must be a list of lane names, got {type(names).__name__}"
    if isinstance(names, str):
        problem = f"must be a list: write [{names!r}]"
    raise invalid_input(field, problem, undecodable=True)


def validate_namespaces(names: object, field: str = "namespaces") -> tuple[str, ...]:
    """A list of namespaces; a single name is refused."""
    if is_list(names):
        return tuple(validate_namespace(cast("str", name), field) for name in names)
    problem = f"must be a list of namespaces, got {type(names).__name__}"
    if isinstance(names, str):
        problem = f"must be a list: write [{names!r}]"
    raise invalid_input(field, problem, undecodable=True)


def stored_id(text: str, context: str) -> ExecutionId:
    """An execution id from an index; anything else is `corruption`."""
    if _is_execution_id(text) is None:
        problem = f"{shown(text)!r} is not an execution id"
        raise CorruptionError("corruption", f"{context}: member: {problem}")
    return ExecutionId.trusted(text)


def stored_lane(text: str, context: str) -> str:
    """A lane name from storage; an invalid one is `corruption`."""
    problem = _lane_problem(text)
    if problem is not None:
        raise CorruptionError("corruption", f"{context}: lane_id: {problem}")
    return text


def validate_text(text: str, field: str, *, limit: int = 1024, required: bool = False) -> str:
    """Free text of at most `limit` bytes."""
    size = _size(text, field)
    if required and size == 0:
        raise invalid_input(field, "must not be empty")
    if size > limit:
        raise invalid_input(field, f"must be at most {limit} bytes, got {size}")
    return text


def derived_uuid(namespace: str, name: str) -> str:
    """`uuid5` as text, without a `UUID` object: 28 of those took half the time of a submission."""
    data = bytes.fromhex(namespace.replace("-", "")) + name.encode()
    digest = bytearray(sha1(data, usedforsecurity=False).digest()[:16])
    digest[6] = digest[6] & 0x0F | 0x50
    digest[8] = digest[8] & 0x3F | 0x80
    text = digest.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


_URLS = "6ba7b811-9dad-11d1-80b4-00c04fd430c8"
"""The standard UUID namespace of URLs."""


def named_uuid(kind: str, name: str, namespace: str = "default") -> str:
    """The UUID that a name of this kind always stands for; a UUID stands for itself.

    >>> named_uuid("quota", "openai") == named_uuid("quota", "openai")
    True
    """
    if isinstance(name, str) and is_uuid(name.lower()):
        return name.lower()
    validate_text(name, kind, limit=_NAME_MAX, required=True)
    if not name.isprintable():
        raise invalid_input(kind, "must be printable")
    found = derived_uuid(_URLS, f"flowfabric:{namespace}/{kind}/{name}")
    if len(_names) < _NAMES_KEPT:
        _names[found] = name, namespace
    return found


_names: dict[str, tuple[str, str]] = {}
_NAMES_KEPT = 10_000


def given_name(uuid: str) -> str:
    """The name from which this process derived a UUID, otherwise the UUID; for messages.

    >>> given_name(quota_id("openai"))
    'openai'
    """
    return _names.get(uuid, (uuid, ""))[0]


def as_argument(uuid: str) -> str:
    """The command-line argument, in its namespace, for what `given_name` shows."""
    name, namespace = _names.get(uuid, (uuid, "default"))
    return quote(name) + (f" --namespace {quote(namespace)}" if namespace != "default" else "")


def budget_id(name: str, namespace: str = "default") -> str:
    """The id of the budget with this name in a namespace; a UUID stands for itself.

    >>> budget_id("team") == budget_id("team") != quota_id("team")
    True
    """
    return named_uuid("budget", name, namespace)


def quota_id(name: str, namespace: str = "default") -> str:
    """The id of the quota policy with this name in a namespace; a UUID stands for itself.

    >>> quota_id("openai")
    '6a6dbe86-3f64-5881-aed7-f920e5a6150c'
    """
    return named_uuid("quota", name, namespace)


def validate_worker_id(text: str, field: str = "worker_id") -> str:
    """A worker id or worker instance id: 1 to 256 bytes without whitespace or controls."""
    if isinstance(text, str) and _is_plain_name(text) is not None:
        return text
    if has_space_or_control(validate_text(text, field, limit=256, required=True)):
        raise invalid_input(field, "must not contain whitespace or control characters")
    return text


def validate_namespace(text: str, field: str = "namespace") -> str:
    """A namespace: 1 to 128 printable bytes without whitespace, colons or braces."""
    if isinstance(text, str) and _is_plain_namespace(text) is not None:
        return text
    validate_text(text, field, limit=128, required=True)
    if " " in text or not text.isprintable():
        raise invalid_input(field, "must be printable and without whitespace")
    if not set(":{}").isdisjoint(text):
        raise invalid_input(field, "must not contain ':', '{' or '}'")
    return text


def enc_hook(value: object) -> object:
    """Encodes ids for msgspec, which does not encode subclasses of `str`."""
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(f"cannot encode {type(value).__name__}")


def dec_hook(wanted: type, value: object) -> object:
    """Decodes ids for msgspec."""
    if issubclass(wanted, (ExecutionId, PartitionKey)):
        return wanted(cast("str", value))
    raise TypeError(f"cannot decode {wanted.__name__}")
