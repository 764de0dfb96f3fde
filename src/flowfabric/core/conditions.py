"""Conditions that end a suspension: their JSON form, their rules, and how they are evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar, cast

import msgspec

from flowfabric.core.errors import ValidationError, invalid_input

MAX_DEPTH = 4
OPERATOR = "operator"
"""The source type of approvals; a signal with a token cannot have it."""


class CountKind(StrEnum):
    """What makes two contributions to a `Count` different."""

    DISTINCT_WAITPOINTS = "DistinctWaitpoints"
    DISTINCT_SIGNALS = "DistinctSignals"
    DISTINCT_SOURCES = "DistinctSources"
    """Pairs of `source_type` and `source_identity`. The holder of one token can claim several, so
    this does not prove that several people answered."""
    DISTINCT_OPERATORS = "DistinctOperators"
    """Different people who decided through `approve`. Signals sent with a token do not count."""


SignalName = str | tuple[str, ...] | None
"""Which signals count: one name, several names, or any."""


def accepts(wanted: SignalName, name: str) -> bool:
    """Whether a signal of this name counts."""
    return wanted is None or name == wanted or (isinstance(wanted, tuple) and name in wanted)


def named(wanted: SignalName) -> tuple[str, ...]:
    """The names that count; empty means any."""
    if wanted is None:
        return ()
    return wanted if isinstance(wanted, tuple) else (wanted,)


class Single(msgspec.Struct, frozen=True):
    """Satisfied by one signal on one waitpoint; by any signal if no name is given."""

    waitpoint_key: str
    signal_name: SignalName = None


class AllOf(msgspec.Struct, frozen=True):
    """Satisfied when every member is."""

    members: tuple[Condition, ...]


class Count(msgspec.Struct, frozen=True, kw_only=True):
    """Satisfied by `n` distinct contributions; `n=1` is "any of"."""

    n: int
    waitpoints: tuple[str, ...]
    count_kind: CountKind = CountKind.DISTINCT_WAITPOINTS
    signal_name: SignalName = None


class OperatorOnly(msgspec.Struct, frozen=True):
    """Only an operator resumes the execution."""


class TimeoutOnly(msgspec.Struct, frozen=True):
    """Only the timeout ends the wait."""


Condition = Single | AllOf | Count | OperatorOnly | TimeoutOnly


class AcceptedSignal(msgspec.Struct, frozen=True):
    """A signal with the fields that conditions compare."""

    signal_id: str
    waitpoint_key: str
    signal_name: str
    source_type: str = ""
    source_identity: str = ""


S = TypeVar("S", bound=AcceptedSignal)


def referenced_waitpoint_keys(condition: Condition) -> list[str]:
    """The waitpoint keys in a condition, depth first, each once."""
    found: dict[str, None] = {}

    def visit(node: Condition) -> None:
        match node:
            case Single():
                found.setdefault(node.waitpoint_key)
            case Count():
                for key in node.waitpoints:
                    found.setdefault(key)
            case AllOf():
                for member in node.members:
                    visit(member)
            case _:
                pass

    visit(condition)
    return list(found)


# --- JSON ---------------------------------------------------------------------------


def _matcher(name: SignalName) -> Any:
    if name is None:
        return "Wildcard"
    return {"AnyName": list(name)} if isinstance(name, tuple) else {"ByName": name}


def _plain(condition: Condition) -> Any:
    match condition:
        case Single(key, name):
            return {"Single": {"waitpoint_key": key, "matcher": _matcher(name)}}
        case AllOf():
            members = [_plain(member) for member in condition.members]
            return {"Composite": {"kind": "AllOf", "members": members}}
        case Count():
            body: dict[str, Any] = {
                "kind": "Count",
                "n": condition.n,
                "count_kind": condition.count_kind.value,
                "waitpoints": list(dict.fromkeys(condition.waitpoints)),
            }
            if condition.signal_name is not None:
                body["matcher"] = _matcher(condition.signal_name)
            return {"Composite": body}
        case OperatorOnly():
            return "OperatorOnly"
        case TimeoutOnly():
            return "TimeoutOnly"


def condition_json(condition: Condition) -> str:
    """The stored form."""
    return msgspec.json.encode(_plain(condition)).decode()


def parse_condition(source: bytes | str | Mapping[str, Any]) -> Condition:
    """A condition from its JSON form; anything else is `invalid_resume_condition`."""
    try:
        value: Any = msgspec.json.decode(source) if isinstance(source, bytes | str) else source
        return _parse(value)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _refuse(f"invalid_resume_condition: {error!r}") from error


def _parse(value: Any) -> Condition:
    if value == "OperatorOnly":
        return OperatorOnly()
    if value == "TimeoutOnly":
        return TimeoutOnly()
    if not isinstance(value, dict) or len(cast("dict[str, Any]", value)) != 1:
        raise ValueError("must be one variant")
    ((variant, body),) = cast("dict[str, Any]", value).items()
    if variant == "Single":
        return Single(_text(body["waitpoint_key"]), _name(body["matcher"]))
    if variant != "Composite":
        raise ValueError(variant)
    if body["kind"] == "AllOf":
        return AllOf(tuple(_parse(member) for member in body["members"]))
    if body["kind"] != "Count":
        raise ValueError(body["kind"])
    n = body["n"]
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise ValueError("n must be a whole number")
    return Count(
        n=n,
        waitpoints=tuple(_text(key) for key in body["waitpoints"]),
        count_kind=CountKind(body["count_kind"]),
        signal_name=_name(body.get("matcher", "Wildcard")),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("must be text")
    return value


def _name(matcher: Any) -> SignalName:
    if matcher == "Wildcard":
        return None
    if isinstance(matcher, dict) and "AnyName" in matcher:
        names = cast("dict[str, Any]", matcher)["AnyName"]
        if not isinstance(names, list):
            raise TypeError("AnyName must be a list")
        return tuple(_text(name) for name in cast("list[Any]", names))
    return _text(matcher["ByName"])


# --- rules --------------------------------------------------------------------------


def _refuse(detail: str) -> ValidationError:
    return ValidationError("invalid_input", detail)


def check_types(condition: Any, depth: int = 1) -> None:
    """Refuse values of the wrong type. `check_tree` and `check_bindings` check the meaning."""
    if depth > MAX_DEPTH + 1:
        return  # `check_tree` refuses its depth.
    match condition:
        case Single():
            _check_kind(condition.waitpoint_key, str, "waitpoint_key")
            _check_names(condition.signal_name)
        case Count():
            if type(condition.n) is not int or condition.n < 0:
                raise invalid_input("condition", "n must be a whole number")
            _check_kind(condition.count_kind, CountKind, "count_kind")
            for key in _check_kind(condition.waitpoints, (tuple, list), "waitpoints"):
                _check_kind(key, str, "waitpoints")
            _check_names(condition.signal_name)
        case AllOf():
            for member in _check_kind(condition.members, (tuple, list), "members"):
                check_types(member, depth + 1)
        case OperatorOnly() | TimeoutOnly():
            pass
        case _:
            problem = f"must be a condition such as Single(...), got {type(condition).__name__}"
            raise invalid_input("condition", problem, undecodable=True)


def _check_kind(value: Any, kind: type | tuple[type, ...], part: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, str) and not _encodable(value)):
        raise invalid_input("condition", f"{part} has the wrong type", undecodable=True)
    return value


def _check_names(wanted: Any) -> None:
    for name in named(wanted):
        _check_kind(name, str, "signal_name")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def has_empty_name(condition: Condition) -> bool:
    """Whether a matcher in the tree has an empty name."""
    match condition:
        case Single() | Count():
            name = condition.signal_name
            return not all(name) or not name if isinstance(name, tuple) else name == ""
        case AllOf():
            return any(has_empty_name(member) for member in condition.members)
        case _:
            return False


def check_tree(condition: Condition) -> None:
    """Check depth and shape of a composite, top down; raises the first problem."""
    if isinstance(condition, AllOf | Count):
        _check_node(condition, "<root>", 1)


def _check_node(node: AllOf | Count, path: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        detail = f"condition_depth_exceeded: depth {depth} exceeds cap {MAX_DEPTH} at path {path}"
        raise _refuse(detail)
    if isinstance(node, Count):
        _check_count(node, path)
        return
    if not node.members:
        raise _refuse(f"allof_empty_members at path {path}")
    for position, member in enumerate(node.members):
        inside = f"members[{position}]" if path == "<root>" else f"{path}.members[{position}]"
        if isinstance(member, OperatorOnly | TimeoutOnly):
            raise _refuse(f"member_not_signal_satisfiable at path {inside}")
        if isinstance(member, AllOf | Count):
            _check_node(member, inside, depth + 1)


def _check_count(node: Count, path: str) -> None:
    if node.n == 0:
        raise _refuse(f"count_n_zero at path {path}")
    if not node.waitpoints:
        raise _refuse(f"count_waitpoints_empty at path {path}")
    distinct = len(set(node.waitpoints))
    if node.count_kind is CountKind.DISTINCT_WAITPOINTS and node.n > distinct:
        raise _refuse(
            f"count_exceeds_waitpoint_set: n={node.n} > waitpoints={distinct} at path {path}"
        )


# --- evaluation ---------------------------------------------------------------------


def satisfied(condition: Condition, accepted: Sequence[AcceptedSignal]) -> bool:
    """Whether the accepted signals satisfy the condition, in any order."""
    match condition:
        case Single():
            return any(
                seen.waitpoint_key == condition.waitpoint_key
                and accepts(condition.signal_name, seen.signal_name)
                for seen in accepted
            )
        case AllOf():
            members = condition.members
            return bool(members) and all(satisfied(member, accepted) for member in members)
        case Count():
            return len(_satisfiers(condition, accepted)) >= condition.n
        case _:
            return False


def contributors(condition: Condition, accepted: Sequence[S]) -> list[S]:
    """The signals, in order, that contributed until the condition was met; empty if it is not."""
    taken: list[S] = []
    weight = 0
    for seen in accepted:
        more = _weight(condition, [*taken, seen])
        if more > weight:
            taken.append(seen)
            weight = more
            if satisfied(condition, taken):
                return taken
    return []


def _weight(condition: Condition, accepted: Sequence[AcceptedSignal]) -> int:
    """The number of contributions to all nodes together."""
    match condition:
        case AllOf():
            return sum(_weight(member, accepted) for member in condition.members)
        case Count():
            return len(_satisfiers(condition, accepted))
        case _:
            return int(satisfied(condition, accepted))


def _satisfiers(node: Count, accepted: Sequence[AcceptedSignal]) -> set[object]:
    matching = [
        seen
        for seen in accepted
        if seen.waitpoint_key in node.waitpoints and accepts(node.signal_name, seen.signal_name)
    ]
    match node.count_kind:
        case CountKind.DISTINCT_WAITPOINTS:
            return {seen.waitpoint_key for seen in matching}
        case CountKind.DISTINCT_SIGNALS:
            return {seen.signal_id for seen in matching}
        case CountKind.DISTINCT_SOURCES:
            return {(seen.source_type, seen.source_identity) for seen in matching}
        case CountKind.DISTINCT_OPERATORS:
            return {seen.source_identity for seen in matching if seen.source_type == OPERATOR}


def check_bindings(
    condition: Condition, keys: Sequence[str | None], *, timeout_given: bool
) -> None:
    """Check a condition against the keys of its waitpoints; None is the key of a pending one.

    The order of the checks is specified: the first problem is raised.
    """
    if not keys:
        raise _refuse("waitpoints_empty")
    if isinstance(condition, Single) and keys[0] is not None and keys[0] != condition.waitpoint_key:
        raise _refuse("waitpoint_key_mismatch")
    for position, key in enumerate(keys[1:], start=1):
        if key == "":
            raise _refuse(f"additional_waitpoint_binding_empty_key at waitpoints[{position}]")
    for position, key in enumerate(keys[1:], start=1):
        if key is None:
            raise _refuse(f"additional_waitpoint_binding_must_be_fresh at waitpoints[{position}]")
    _check_references(condition, keys)
    if isinstance(condition, TimeoutOnly) and not timeout_given:
        raise _refuse("timeout_only_without_deadline")
    if has_empty_name(condition):
        raise invalid_input("resume_condition", "empty signal name (use Wildcard instead)")


def _check_references(condition: Condition, keys: Sequence[str | None]) -> None:
    named = referenced_waitpoint_keys(condition)
    bound = {key for key in keys if key is not None}
    if None not in keys:
        for key in named:
            if key not in bound:
                raise _refuse(f"referenced_waitpoint_key_missing_binding: {key}")
    if len(keys) > 1:
        for key in keys:
            if key is not None and key not in named:
                raise _refuse(f"extra_binding_not_referenced_by_condition: {key}")
