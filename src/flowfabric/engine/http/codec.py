"""The JSON encoding of engine values, for both ends of an operation over HTTP.

It follows the types of the Protocols in `engine/api`. JSON cannot distinguish the structs of a
union, so such a value is an object with one key, the name of its class: `{"Created": {...}}`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, Union, cast, get_args, get_origin

import msgspec

from flowfabric.core.errors import (
    EngineError,
    TransportError,
    UnavailableError,
    ValidationError,
    engine_error,
    invalid_input,
)
from flowfabric.core.ids import ExecutionId, WaitpointToken
from flowfabric.core.text import shown

_Tagger = Callable[[Any], Any]


class WireError(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as a result: the outcome of one item of a batch."""

    code: str
    details: tuple[str, ...] = ()
    op: str = ""
    ambiguous: bool = False
    undecodable: bool = False
    shutting_down: bool = False

    @classmethod
    def of(cls, error: EngineError) -> "WireError":
        flags = ("ambiguous", "undecodable", "shutting_down")
        given = {name: bool(getattr(error, name, False)) for name in flags}
        return cls(error.code, tuple(map(shown, error.details)), error.op, **given)

    def error(self) -> EngineError:
        error = engine_error(self.code, self.details, self.op, function="the server")
        if isinstance(error, TransportError):
            error.ambiguous = self.ambiguous
        elif isinstance(error, ValidationError):
            error.undecodable = self.undecodable
        elif isinstance(error, UnavailableError):
            error.shutting_down = self.shutting_down
        return error


class _AnyInstance(type):
    """Accepts every instance: the decoder checks a hook's result against its type."""

    def __instancecheck__(cls, _: object) -> bool:
        return True


class _OneOf(metaclass=_AnyInstance):
    """Represents a union whose members JSON cannot distinguish."""

    members: ClassVar[Mapping[str, Any]]


def _plain(value: Any) -> Any:
    # Ids are a subclass of text, which the encoder does not know.
    if isinstance(value, str):
        return str(value)
    if isinstance(value, WaitpointToken):
        return value.reveal()
    if isinstance(value, EngineError):
        return WireError.of(value)
    if isinstance(value, Mapping):
        return dict(cast("Mapping[Any, Any]", value))
    if isinstance(value, (Sequence, set, frozenset)) or hasattr(value, "__iter__"):
        return list(cast("Sequence[Any]", value))
    raise TypeError(f"cannot encode a value of type {type(value).__name__}")


encode = msgspec.json.Encoder(enc_hook=_plain).encode


def encode_escaped(value: Any) -> bytes:
    """JSON of a value. Text that is not UTF-8, which damaged records hold, is escaped."""
    try:
        return encode(value)
    except UnicodeEncodeError:
        return encode(_escaped(msgspec.to_builtins(value, enc_hook=_plain)))


def _escaped(value: Any) -> Any:
    match value:
        case str():
            return shown(value)
        case dict():
            pairs = cast("dict[Any, Any]", value).items()
            return {_escaped(key): _escaped(each) for key, each in pairs}
        case list() | tuple():
            return [_escaped(each) for each in cast("Sequence[Any]", value)]
        case _:
            return value


def _field(kind: type, value: Any) -> Any:
    if kind is ExecutionId:
        try:
            return ExecutionId.parse(value)
        except ValidationError as error:
            raise ValueError(error.detail.partition(": ")[2] or error.detail) from None
    if kind is WaitpointToken and isinstance(value, str):
        return WaitpointToken(value)
    if kind is EngineError:
        return msgspec.convert(value, WireError).error()
    if issubclass(kind, _OneOf) and isinstance(value, dict) and len(cast("Any", value)) == 1:
        ((name, fields),) = cast("dict[str, Any]", value).items()
        if name in kind.members:
            return msgspec.convert(fields, kind.members[name], dec_hook=_field)
    raise ValueError(f"is not a {kind.__name__}")


@cache
def decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Decodes JSON of this type."""
    return msgspec.json.Decoder(wire_type(kind), dec_hook=_field)


@cache
def wire_type(kind: Any) -> Any:
    """The type to decode instead of this one: unions of structs are tagged with class names."""
    arguments = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return _wire_union(arguments)
    if not arguments or get_origin(kind) not in (list, tuple, dict, Sequence, Iterable):
        return kind
    shape: Any = list if get_origin(kind) is Iterable else get_origin(kind)
    return shape[tuple(map(wire_type, arguments))]


def _wire_union(members: Sequence[Any]) -> Any:
    if WaitpointToken in members:
        # Tokens may be passed as text and are sent as text.
        members = [each for each in members if each is not str]
    named = [each for each in members if _needs_name(each)]
    others: list[Any] = [wire_type(each) for each in members if each not in named]
    if len(named) > 1:
        fields = {"members": {each.__name__: each for each in named}}
        others.append(_AnyInstance("_".join(fields["members"]), (_OneOf,), fields))
    else:
        others += named
    return Union[tuple(others)]  # noqa: UP007 - the members are known at run time only


def _needs_name(kind: Any) -> bool:
    if not isinstance(kind, type):
        return False
    tagged = issubclass(kind, msgspec.Struct) and kind.__struct_config__.tag is not None
    return issubclass(kind, (msgspec.Struct, EngineError)) and not tagged


@cache
def named(kind: Any) -> _Tagger | None:
    """A function that adds class names where the decoder needs them; None if it needs none."""
    arguments = get_args(kind)
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return _named_union(arguments)
    if origin in (list, Sequence) or (origin is tuple and arguments[-1] is Ellipsis):
        each = named(arguments[0])
        return None if each is None else (lambda values: [each(value) for value in values])
    if origin is dict:
        each = named(arguments[1])
        return each and (lambda values: {name: each(value) for name, value in values.items()})
    if origin is tuple:
        taggers = [named(each) or _same for each in arguments]
        if any(each is not _same for each in taggers):
            return lambda values: [tag(value) for tag, value in zip(taggers, values, strict=True)]
    return None


def _same(value: Any) -> Any:
    return value


def _named_union(members: Sequence[Any]) -> _Tagger | None:
    structs = tuple(each for each in members if _needs_name(each))
    if len(structs) > 1:

        def tag(value: Any) -> Any:
            found = next((each for each in structs if isinstance(value, each)), None)
            return value if found is None else {found.__name__: value}

        return tag
    others = [each for each in members if each is not NoneType]
    inner = named(others[0]) if len(others) == 1 else None
    return inner and (lambda value: None if value is None else inner(value))


def encode_as(kind: Any, value: Any) -> Any:
    """A value in the form that `decoder` reads, not yet encoded."""
    tag = named(kind)
    return value if tag is None else tag(value)


def encode_arguments(value: Any, op: str) -> bytes:
    """JSON of arguments; what JSON cannot represent is `invalid_input`."""
    try:
        return encode(value)
    except UnicodeEncodeError:
        problem = "text with surrogates cannot be sent"
    except (TypeError, ValueError, OverflowError) as error:
        problem = str(error)
    raise invalid_input("arguments", problem, op=op, undecodable=True)
