"""Conditions that end a suspension: their JSON form, their rules, and how they are evaluated."""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import msgspec

from flowfabric.core.errors import ValidationError, invalid_input
from flowfabric.core.ids import enc_hook

_MAX_DEPTH = 4
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


def named(wanted: SignalName) -> tuple[str, ...]:
    """The names that count; empty means any."""
    if wanted is None:
        return ()
    return wanted if isinstance(wanted, tuple) else (wanted,)


def accepts(wanted: SignalName, name: str) -> bool:
    """Whether a signal of this name counts."""
    return wanted is None or name in named(wanted)


class Single(msgspec.Struct, frozen=True, tag=True):
    """Satisfied by one signal on one waitpoint; by any signal if no name is given."""

    waitpoint_key: str
    signal_name: SignalName = None


class AllOf(msgspec.Struct, frozen=True, tag=True):
    """Satisfied when every member is."""

    members: "tuple[Condition, ...]"


class Count(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Satisfied by `n` distinct contributions; `n=1` is "any of"."""

    n: Annotated[int, msgspec.Meta(ge=0)]
    waitpoints: tuple[str, ...]
    count_kind: CountKind = CountKind.DISTINCT_WAITPOINTS
    signal_name: SignalName = None


class OperatorOnly(msgspec.Struct, frozen=True, tag=True):
    """Only an operator resumes the execution."""


class TimeoutOnly(msgspec.Struct, frozen=True, tag=True):
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


def _leaves(condition: Condition) -> Iterator[Single | Count | OperatorOnly | TimeoutOnly]:
    if isinstance(condition, AllOf):
        for member in condition.members:
            yield from _leaves(member)
    else:
        yield condition


def _keys(leaf: Condition) -> tuple[str, ...]:
    if isinstance(leaf, Single):
        return (leaf.waitpoint_key,)
    return leaf.waitpoints if isinstance(leaf, Count) else ()


def referenced_waitpoint_keys(condition: Condition) -> list[str]:
    """The waitpoint keys in a condition, depth first, each once."""
    return list(dict.fromkeys(key for leaf in _leaves(condition) for key in _keys(leaf)))


# --- JSON ---------------------------------------------------------------------------


def _matcher(name: SignalName) -> Any:
    if name is None:
        return "Wildcard"
    return {"AnyName": name} if isinstance(name, tuple) else {"ByName": name}


def _plain(condition: Condition) -> Any:
    match condition:
        case Single(key, name):
            return {"Single": {"waitpoint_key": key, "matcher": _matcher(name)}}
        case AllOf(members):
            return {"Composite": {"kind": "AllOf", "members": [_plain(each) for each in members]}}
        case Count():
            body = {
                "kind": "Count",
                "n": condition.n,
                "count_kind": condition.count_kind,
                "waitpoints": list(dict.fromkeys(condition.waitpoints)),
            }
            name = condition.signal_name
            return {"Composite": body if name is None else body | {"matcher": _matcher(name)}}
        case _:
            return type(condition).__name__


def condition_json(condition: Condition) -> str:
    """The stored form."""
    return msgspec.json.encode(_plain(condition)).decode()


def parse_condition(source: bytes | str) -> Condition:
    """A condition from its JSON form; anything else is `invalid_resume_condition`."""
    try:
        return _parse(msgspec.json.decode(source))
    except (KeyError, TypeError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise _refuse(f"invalid_resume_condition: {error!r}") from error


def _parse(value: Any) -> Condition:
    match value:
        case "OperatorOnly":
            return OperatorOnly()
        case "TimeoutOnly":
            return TimeoutOnly()
        case {"Single": body, **others} if not others:
            leaf, matcher = msgspec.convert(body | {"type": "Single"}, Single), body["matcher"]
        case {"Composite": {"kind": "AllOf", "members": members}, **others} if not others:
            return AllOf(tuple(_parse(member) for member in members))
        case {"Composite": {"kind": "Count"} as body, **others} if not others:
            leaf = msgspec.convert(body | {"type": "Count"}, Count)
            matcher = body.get("matcher", "Wildcard")
        case _:
            raise ValueError("must be one variant")
    return msgspec.structs.replace(leaf, signal_name=_parse_matcher(matcher))


def _parse_matcher(matcher: Any) -> SignalName:
    if matcher == "Wildcard":
        return None
    if "AnyName" in matcher:
        return msgspec.convert(matcher["AnyName"], tuple[str, ...])
    return msgspec.convert(matcher["ByName"], str)


# --- rules --------------------------------------------------------------------------


def _refuse(detail: str) -> ValidationError:
    return ValidationError("invalid_input", detail)


def checked_condition(condition: Condition) -> Condition:
    """The condition, or `invalid_input` for a value of the wrong type.

    `check_tree` and `check_bindings` check the meaning.
    """
    try:
        plain = msgspec.json.encode(condition, enc_hook=enc_hook)
        return msgspec.json.decode(plain, type=Condition)
    except UnicodeError:
        problem = "a waitpoint_key or signal_name is not valid Unicode"
        raise invalid_input("condition", problem, undecodable=True) from None
    except (TypeError, msgspec.MsgspecError, RecursionError) as error:
        raise invalid_input("condition", str(error), undecodable=True) from None


def check_tree(condition: Condition) -> None:
    """Check depth and shape of a composite, top down; raises the first problem."""
    if isinstance(condition, AllOf | Count):
        _check_node(condition, "<root>", 1)


def _check_node(node: AllOf | Count, path: str, depth: int) -> None:
    if depth > _MAX_DEPTH:
        detail = f"condition_depth_exceeded: depth {depth} exceeds cap {_MAX_DEPTH} at path {path}"
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
    distinct = len(set(node.waitpoints))
    if node.n == 0:
        raise _refuse(f"count_n_zero at path {path}")
    if distinct == 0:
        raise _refuse(f"count_waitpoints_empty at path {path}")
    if node.count_kind is CountKind.DISTINCT_WAITPOINTS and node.n > distinct:
        raise _refuse(
            f"count_exceeds_waitpoint_set: n={node.n} > waitpoints={distinct} at path {path}"
        )


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
    for wrong, problem in (("", "empty_key"), (None, "must_be_fresh")):
        if wrong in keys[1:]:
            place = f"waitpoints[{keys.index(wrong, 1)}]"
            raise _refuse(f"additional_waitpoint_binding_{problem} at {place}")
    referenced = referenced_waitpoint_keys(condition)
    for key in referenced:
        if key not in keys and None not in keys:
            raise _refuse(f"referenced_waitpoint_key_missing_binding: {key}")
    for key in keys:
        if len(keys) > 1 and key is not None and key not in referenced:
            raise _refuse(f"extra_binding_not_referenced_by_condition: {key}")
    if isinstance(condition, TimeoutOnly) and not timeout_given:
        raise _refuse("timeout_only_without_deadline")
    if any(isinstance(leaf, Single | Count) and _is_nameless(leaf) for leaf in _leaves(condition)):
        raise invalid_input("resume_condition", "empty signal name (use Wildcard instead)")


def _is_nameless(leaf: Single | Count) -> bool:
    return leaf.signal_name == () or "" in named(leaf.signal_name)


# --- evaluation ---------------------------------------------------------------------


def satisfied(condition: Condition, accepted: Sequence[AcceptedSignal]) -> bool:
    """Whether the accepted signals satisfy the condition, in any order."""
    match condition:
        case Single():
            return bool(_matching(condition, accepted))
        case AllOf(members):
            return bool(members) and all(satisfied(member, accepted) for member in members)
        case Count():
            return _weight(condition, accepted) >= condition.n
        case _:
            return False


def contributors(condition: Condition, accepted: Sequence[S]) -> list[S]:
    """The signals, in order, that contributed until the condition was met; empty if it is not."""
    taken: list[S] = []
    weight = 0
    for seen in accepted:
        more = sum(_weight(leaf, [*taken, seen]) for leaf in _leaves(condition))
        if more > weight:
            taken.append(seen)
            weight = more
            if satisfied(condition, taken):
                return taken
    return []


def _matching(leaf: Single | Count, accepted: Sequence[S]) -> list[S]:
    keys, wanted = _keys(leaf), leaf.signal_name
    return [
        seen
        for seen in accepted
        if seen.waitpoint_key in keys and accepts(wanted, seen.signal_name)
    ]


def _weight(leaf: Condition, accepted: Sequence[AcceptedSignal]) -> int:
    """The number of different contributions."""
    if not isinstance(leaf, Count):
        return int(satisfied(leaf, accepted))
    matching = _matching(leaf, accepted)
    match leaf.count_kind:
        case CountKind.DISTINCT_WAITPOINTS:
            return len({seen.waitpoint_key for seen in matching})
        case CountKind.DISTINCT_SIGNALS:
            return len({seen.signal_id for seen in matching})
        case CountKind.DISTINCT_SOURCES:
            return len({(seen.source_type, seen.source_identity) for seen in matching})
        case CountKind.DISTINCT_OPERATORS:
            people = (seen for seen in matching if seen.source_type == OPERATOR)
            return len({seen.source_identity for seen in people})
