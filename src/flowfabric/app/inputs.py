"""Results of other nodes as arguments: references in the payload, filled in after the claim."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import msgspec

from flowfabric.app import codec
from flowfabric.core.contracts.flows import FlowInput, FlowInputs
from flowfabric.core.errors import PayloadMismatch
from flowfabric.core.ids import ExecutionId

T = TypeVar("T")

REFERRING = "json+inputs"
"""The encoding of a payload with references: a JSON array of their marker and the arguments."""
_FIRST_MARKER = "$input"


class Reference(msgspec.Struct, frozen=True):
    """The placeholder for results in stored arguments."""

    names: tuple[str, ...]
    """The inputs that replace it."""
    how: str = "one"
    """`one`: the result; `any`: the result of the deciding input; `some`: a list of all results."""


def encode_referring(arguments: Any) -> bytes:
    """Arguments in which each `Reference` becomes `{marker: …}`.

    No key in the data equals the marker, so data is never mistaken for a reference.
    """
    marker = _FIRST_MARKER
    while True:
        written, count = _written(arguments, marker)
        data = codec.encode([marker, written], "arguments")[0]
        if data.count(msgspec.json.encode(marker) + b":") == count:
            return data
        marker += "'"


def _written(arguments: Any, marker: str) -> tuple[Any, int]:
    count = 0

    def write(reference: Reference) -> Any:
        nonlocal count
        count += 1
        names: Any = reference.names
        return {marker: names[0] if reference.how == "one" else [reference.how, *names]}

    return replaced(arguments, lambda part: isinstance(part, Reference), write), count


def decode_referring(payload: bytes, inputs: FlowInputs) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call, with results in place of the references."""
    marker, arguments = msgspec.json.decode(payload)

    def is_reference(part: Any) -> bool:
        return isinstance(part, dict) and len(cast("dict[str, Any]", part)) == 1 and marker in part

    filled = replaced(arguments, is_reference, lambda part: _value(part[marker], inputs))
    if isinstance(filled, dict):
        return [], cast("dict[str, Any]", filled)
    return filled, {}


def replaced(value: Any, matches: Callable[[Any], bool], replace: Callable[[Any], Any]) -> Any:
    """The value with all matching parts replaced; a value without any is returned unchanged."""
    if matches(value):
        return replace(value)
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value)
        new = {key: replaced(each, matches, replace) for key, each in items.items()}
        return new if any(new[key] is not each for key, each in items.items()) else items
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = list(cast("list[Any]", value))
        changed = [replaced(each, matches, replace) for each in parts]
        same = all(new is old for new, old in zip(changed, parts, strict=True))
        return cast("Any", value) if same else changed
    return value


def _value(reference: Any, given: FlowInputs) -> Any:
    if isinstance(reference, str):
        return decoded(given.inputs[reference]) if reference in given.inputs else None
    how, *names = reference
    found = [given.inputs[name] for name in names if name in given.inputs]
    if how == "some":
        return [decoded(each) for each in found]
    winner = next((each for each in found if each.execution_id == given.fired_by), None)
    return None if winner is None else decoded(winner)


def decoded(given: FlowInput, into: Any = Any) -> Any:
    """The result of an upstream."""
    return codec.decode(given.result, given.encoding, into)


def missing_note(given: FlowInputs) -> str:
    """A suffix for the error about misfit arguments: the inputs that have no result."""
    missing = [f"{n!r} {each.outcome}" for n, each in given.inputs.items() if each.result is None]
    if not missing:
        return ""
    what = ", ".join(missing[:3])
    return f". Inputs without a result: {what}. To accept None, annotate the parameter with | None"


class Inputs:
    """The results that this node's upstreams passed to it, by input name.

    An input has the name of its parameter; the items of a list are `parts_1`, `parts_2` and so on.
    An input is None if its upstream ended without a result.

    >>> ctx.inputs["text"], ctx.inputs.get("text", str)
    """

    __slots__ = ("_given",)

    def __init__(self, given: FlowInputs) -> None:
        self._given = given

    @property
    def fired_by(self) -> ExecutionId | None:
        """The execution that decided an `any_of` or `quorum`; None without one."""
        return self._given.fired_by

    def outcome(self, name: str) -> str:
        """How the upstream ended: `success`, `failed`, `cancelled`, `expired` or `skipped`."""
        return self._given.inputs[name].outcome

    def execution_id(self, name: str) -> ExecutionId:
        """The upstream's execution."""
        return self._given.inputs[name].execution_id

    def __getitem__(self, name: str) -> Any:
        return decoded(self._given.inputs[name])

    def get(self, name: str, into: type[T]) -> T | None:
        """The result converted to the type `into`; None if there is none."""
        given = self._given.inputs.get(name)
        if given is None or given.result is None:
            return None
        try:
            return decoded(given, into)
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            raise PayloadMismatch(f"the input {name!r} does not fit: {error}") from error

    def __contains__(self, name: object) -> bool:
        return name in self._given.inputs

    def __iter__(self) -> Iterator[str]:
        return iter(self._given.inputs)

    def __len__(self) -> int:
        return len(self._given.inputs)

    def __repr__(self) -> str:
        return f"Inputs({', '.join(self)})"
