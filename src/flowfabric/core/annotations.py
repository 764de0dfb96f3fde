"""The types that tasks take and return, and how JSON becomes values of them."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Never, NoReturn, cast, get_args, get_origin

import msgspec
from msgspec import inspect

from flowfabric.core import ids
from flowfabric.core.errors import PayloadMismatch

_INSTEAD = (
    "Take or return a dataclass, a pydantic model, or a type that JSON can represent instead, and "
    "convert it in the function"
)
_UNION = "Use tagged msgspec.Struct classes, pydantic models, or only one of these types"
_KEYS = "Use keys of one type that JSON can write as text, such as str or int, or a list of pairs"
_KEY_TYPES = (
    *(inspect.AnyType, inspect.StrType, inspect.IntType, inspect.FloatType, inspect.DecimalType),
    *(inspect.EnumType, inspect.LiteralType, inspect.UUIDType, inspect.BytesType),
    *(inspect.DateType, inspect.DateTimeType, inspect.TimeType, inspect.TimeDeltaType),
)
_PYDANTIC = (2, 11)
_drop_modules = re.compile(r"\b(?:\w+\.)+(?=\w)").sub
_ANY = (Any, object, NoReturn, Never)


class Annotation:
    """A type that a task takes or returns."""

    def __init__(self, hint: Any) -> None:
        self.hint = hint
        self.anything = hint in _ANY
        self._known_to_msgspec = not self.anything
        self.convert: Callable[[Any], Any] = _unchanged
        """Decoded JSON as this type."""
        self.problem = "" if self.anything else self._find_problem()
        """Why values of this type cannot be encoded, and what to use instead; empty if they can."""

    def _find_problem(self) -> str:
        try:
            info = inspect.type_info(self.hint)
        except NameError as error:
            return f"has an annotation that cannot be resolved: {error}"
        except TypeError as error:
            problem = str(error).partition(" - type ")[0]
            if any(map(_is_model, _mentioned(self.hint))):
                # Pydantic tells apart what msgspec does not.
                return self._use_pydantic()
            if "union" in problem:
                return f"has types that JSON cannot tell apart: {problem}. {_UNION}."
            return f"is not supported: {problem}. {_INSTEAD}."
        parts = _parts(info)
        self.convert = partial(msgspec.convert, type=self.hint)
        if any(isinstance(part, (inspect.CustomType, inspect.DictType)) for part in parts):
            self.convert = partial(self.convert, str_keys=True, dec_hook=_dec_hook)
        return next((found for found in map(_problem, parts) if found), "")

    def _use_pydantic(self) -> str:
        pydantic = sys.modules["pydantic"]
        try:
            # Bytes outside of models are written as base64.
            adapter = pydantic.TypeAdapter(self.hint, config={"val_json_bytes": "base64"})
        except pydantic.PydanticUserError as error:
            return f"is not supported: {error.message}. {_INSTEAD}."
        self.convert = partial(_validated, adapter.validate_json)
        self._known_to_msgspec = False
        return _schema_problem(adapter.core_schema)

    def fit(self, value: Any, what: str) -> Any:
        """`convert`, or `PayloadMismatch` that names the value."""
        try:
            return self.convert(value)
        except Exception as error:
            # A class may check its values and raise anything.
            raise PayloadMismatch(f"{what} does not fit {self}: {error}") from error

    def decode(self, data: bytes) -> Any:
        """JSON as this type."""
        if self._known_to_msgspec:
            return msgspec.json.decode(data, type=self.hint, dec_hook=_dec_hook)
        return self.convert(msgspec.json.decode(data))

    def __str__(self) -> str:
        hint = get_args(self.hint)[0] if get_origin(self.hint) is Annotated else self.hint
        plain = isinstance(hint, type) and not get_args(hint)
        return hint.__name__ if plain else _drop_modules("", str(hint))


def _unchanged(value: Any) -> Any:
    return value


_cached = cache(Annotation)


def annotation(hint: Any) -> Annotation:
    """The annotation, examined once."""
    try:
        return _cached(hint)
    except TypeError:
        # Its metadata cannot be hashed.
        return Annotation(hint)


class Unencodable:
    """A value that does not exist yet and therefore cannot be part of a payload."""

    __slots__ = ()

    explanation: ClassVar[str]
    """The text of the error."""


def enc_hook(value: Any) -> Any:
    """Convert a value that msgspec does not know into one that it does."""
    if isinstance(value, Unencodable):
        raise TypeError(value.explanation)
    if _is_model(value.__class__):
        # Without computed fields, and by field name: the form that `_validated` accepts.
        return value.model_dump(mode="json", round_trip=True)
    return str(value) if isinstance(value, PurePath) else ids.enc_hook(value)


def unordered_enc_hook(value: Any) -> Any:
    """`enc_hook` that keeps the sets of a model as sets, for an encoder that sorts them."""
    if _is_model(value.__class__):
        return value.model_dump(round_trip=True)
    return enc_hook(value)


def _dec_hook(wanted: type[Any], value: Any) -> Any:
    if wanted is object:
        return value
    if _is_model(wanted):
        return _validated(wanted.model_validate_json, value)
    return wanted(value) if issubclass(wanted, PurePath) else ids.dec_hook(wanted, value)


def _validated(validate: Callable[..., Any], value: Any) -> Any:
    try:
        # From JSON, because only there a strict model accepts dates as text.
        return validate(msgspec.json.encode(value), by_alias=True, by_name=True)
    except Exception as error:
        # A validator may raise anything.
        raise ValueError(_brief(error)) from error


def _brief(error: Any) -> str:
    """Pydantic's problems without the values, which may be secret."""
    if not hasattr(error, "errors"):
        return f"{type(error).__name__}: {error}"
    found = error.errors(include_url=False, include_input=False, include_context=False)
    lines = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in found)
    return "; ".join(line.removeprefix(": ") for line in lines)


def _is_model(kind: object) -> bool:
    """Whether this is a pydantic 2 model, without importing pydantic."""
    parts = ("__pydantic_core_schema__", "model_validate_json")
    return isinstance(kind, type) and all(hasattr(kind, part) for part in parts)


def _schema_problem(schema: Any) -> str:
    kind = next(_not_from_json(schema), None)
    return "" if kind is None else f"contains {kind}, which JSON cannot represent. {_INSTEAD}."


def _not_from_json(schema: Any) -> Iterator[str]:
    """The part of a pydantic schema that only accepts Python objects and has no validator code."""
    match schema:
        case {"type": "is-instance", "cls": kind}:
            if not isinstance("", kind):
                yield getattr(kind, "__name__", str(kind))
        case {"type": "callable" | "is-subclass"}:
            yield "a function or a class"
        case {"type": "json-or-python", "json_schema": inner}:
            yield from _not_from_json(inner)
        case {"type": "lax-or-strict", "lax_schema": inner}:
            yield from _not_from_json(inner)
        case {"type": str(kind)} if kind.startswith("function-"):
            return
        case Mapping():
            for name, inner in cast("Mapping[str, Any]", schema).items():
                if name not in ("default", "metadata", "serialization"):
                    yield from _not_from_json(inner)
        case list() | tuple():
            for inner in cast("Iterable[Any]", schema):
                yield from _not_from_json(inner)
        case _:
            return


def _mentioned(hint: Any) -> Iterator[Any]:
    yield hint
    for inner in get_args(hint):
        yield from _mentioned(inner)


def _parts(info: inspect.Type) -> list[inspect.Type]:
    """The type and all types inside it."""
    found, known = [info], {id(info)}
    for each in found:
        inner: list[Any] = []
        for name in each.__struct_fields__:
            value = getattr(each, name)
            inner += value if isinstance(value, tuple) else (value,)
        for one in inner:
            part = one.type if isinstance(one, inspect.Field) else one
            if isinstance(part, inspect.Type) and id(part) not in known:
                known.add(id(part))
                found.append(part)
    return found


def _problem(part: inspect.Type) -> str:
    if isinstance(part, inspect.CustomType):
        return _problem_of_class(part.cls)
    if isinstance(part, inspect.DictType) and not isinstance(part.key_type, _KEY_TYPES):
        return f"has dictionary keys that JSON cannot represent. {_KEYS}."
    return f"contains msgspec.Raw. {_INSTEAD}." if isinstance(part, inspect.RawType) else ""


def _problem_of_class(kind: type[Any]) -> str:
    if _is_model(kind):
        version = sys.modules["pydantic"].VERSION
        old = tuple(map(int, version.split(".")[:2])) < _PYDANTIC
        if old:
            return f"needs pydantic 2.11 or newer, and this is {version}."
        return _schema_problem(kind.__pydantic_core_schema__)
    if kind is object or issubclass(kind, (PurePath, ids.ExecutionId, ids.PartitionKey)):
        return ""
    instead = _INSTEAD
    if issubclass(kind, Mapping):
        instead = "Use dict instead"
    elif issubclass(kind, Iterable) and kind.__module__ in (
        "builtins",
        "collections",
        "collections.abc",
    ):
        instead = "Use list instead"
    return f"contains {kind.__name__}, which is not supported. {instead}."
