from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core.conditions import (
    AcceptedSignal,
    AllOf,
    Condition,
    Count,
    CountKind,
    OperatorOnly,
    Single,
    TimeoutOnly,
    check_bindings,
    check_tree,
    checked_condition,
    condition_json,
    parse_condition,
    referenced_waitpoint_keys,
    satisfied,
)
from flowfabric.core.errors import ValidationError

SOURCES, SIGNALS, WAITPOINTS = (
    CountKind.DISTINCT_SOURCES,
    CountKind.DISTINCT_SIGNALS,
    CountKind.DISTINCT_WAITPOINTS,
)


def detail_of(problem: pytest.ExceptionInfo[ValidationError]) -> str:
    assert problem.value.code == "invalid_input"
    return problem.value.detail


# --- JSON ---------------------------------------------------------------------------------------

DOCUMENTED: list[tuple[Condition, str]] = [
    (Single("k", "go"), '{"Single":{"waitpoint_key":"k","matcher":{"ByName":"go"}}}'),
    (Single("k"), '{"Single":{"waitpoint_key":"k","matcher":"Wildcard"}}'),
    (Single("k", ("a", "b")), '{"Single":{"waitpoint_key":"k","matcher":{"AnyName":["a","b"]}}}'),
    (OperatorOnly(), '"OperatorOnly"'),
    (TimeoutOnly(), '"TimeoutOnly"'),
    (
        AllOf((Single("a"),)),
        (
            '{"Composite":{"kind":"AllOf","members":[{"Single":{"waitpoint_key":"a",'
            '"matcher":"Wildcard"}}]}}'
        ),
    ),
    (
        Count(n=2, count_kind=SOURCES, waitpoints=("k",)),
        '{"Composite":{"kind":"Count","n":2,"count_kind":"DistinctSources","waitpoints":["k"]}}',
    ),
    (
        Count(n=1, count_kind=SIGNALS, waitpoints=("k", "l"), signal_name="go"),
        (
            '{"Composite":{"kind":"Count","n":1,"count_kind":"DistinctSignals",'
            '"waitpoints":["k","l"],"matcher":{"ByName":"go"}}}'
        ),
    ),
]


@pytest.mark.parametrize(("condition", "text"), DOCUMENTED)
def test_json_both_ways(condition: Condition, text: str) -> None:
    assert condition_json(condition) == text
    assert parse_condition(text) == condition
    assert parse_condition(text.encode()) == condition


def test_keys_of_a_count_are_stored_once() -> None:
    stored = condition_json(Count(n=1, waitpoints=("a", "b", "a")))
    assert parse_condition(stored) == Count(n=1, waitpoints=("a", "b"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "1",
        '"AnyOf"',
        "{}",
        '{"Single":{}}',
        '{"Single":{"waitpoint_key":1,"matcher":"Wildcard"}}',
        '{"Single":{"waitpoint_key":"k","matcher":"Any"}}',
        '{"Single":{"waitpoint_key":"k","matcher":{"ByName":1}}}',
        '{"Single":{"waitpoint_key":"k","matcher":"AnyName"}}',
        '{"Single":{"waitpoint_key":"k","matcher":{"AnyName":"ab"}}}',
        '{"Single":{"waitpoint_key":"k","matcher":{"AnyName":["a",1]}}}',
        '{"Single":{"waitpoint_key":"k","matcher":"Wildcard"},"Composite":{}}',
        '{"V2":{"waitpoint_key":"k"}}',
        '{"Composite":{"kind":"AnyOf","members":[]}}',
        '{"Composite":{"kind":"AllOf"}}',
        '{"Composite":{"kind":"AllOf","members":[7]}}',
        '{"Composite":{"kind":"Count","n":-1,"count_kind":"DistinctSignals","waitpoints":[]}}',
        '{"Composite":{"kind":"Count","n":true,"count_kind":"DistinctSignals","waitpoints":[]}}',
        '{"Composite":{"kind":"Count","n":1.5,"count_kind":"DistinctSignals","waitpoints":[]}}',
        '{"Composite":{"kind":"Count","n":1,"count_kind":"Distinct","waitpoints":[]}}',
        '{"Composite":{"kind":"Count","n":1,"count_kind":"DistinctSignals","waitpoints":[1]}}',
        '{"Composite":' * 5000 + "1" + "}" * 5000,
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValidationError) as problem:
        parse_condition(text)
    assert detail_of(problem).startswith("invalid_resume_condition")


def test_referenced_keys_depth_first_each_once() -> None:
    tree = AllOf(
        (
            Single("b"),
            AllOf((Single("c"), Count(n=1, waitpoints=("a", "b", "d")))),
            Single("a"),
            Single("e"),
        )
    )
    assert referenced_waitpoint_keys(tree) == ["b", "c", "a", "d", "e"]
    assert referenced_waitpoint_keys(OperatorOnly()) == []


# --- rules --------------------------------------------------------------------------------------

Keys = list[str | None]
NO_NAME = "resume_condition: empty signal name (use Wildcard instead)"
BINDINGS: list[tuple[Condition, Keys, str]] = [
    (Single("k", ""), [], "waitpoints_empty"),
    (Single("k", ""), ["other", None, ""], "waitpoint_key_mismatch"),
    (
        Single("k", ""),
        ["k", None, ""],
        "additional_waitpoint_binding_empty_key at waitpoints[2]",
    ),
    (
        Single("k", ""),
        ["k", "x", None],
        "additional_waitpoint_binding_must_be_fresh at waitpoints[2]",
    ),
    (
        AllOf((Single("k", ""), Single("m"))),
        ["k", "x"],
        "referenced_waitpoint_key_missing_binding: m",
    ),
    (AllOf((Single("k", ""),)), ["x"], "referenced_waitpoint_key_missing_binding: k"),
    (Count(n=1, waitpoints=("a", "b")), ["a"], "referenced_waitpoint_key_missing_binding: b"),
    (Single("k", ""), ["k", "x"], "extra_binding_not_referenced_by_condition: x"),
    (Single("k", ""), [None, "x"], "extra_binding_not_referenced_by_condition: x"),
    (OperatorOnly(), ["a", "b"], "extra_binding_not_referenced_by_condition: a"),
    (TimeoutOnly(), ["k"], "timeout_only_without_deadline"),
    (Single("k", ""), ["k"], NO_NAME),
    (Single("k", ""), [None], NO_NAME),
    (Single("k", ()), ["k"], NO_NAME),
    (Single("k", ("a", "")), ["k"], NO_NAME),
    (AllOf((Single("k"), AllOf((Single("k", ""),)))), ["k"], NO_NAME),
    (Count(n=1, waitpoints=("k",), signal_name=""), ["k"], NO_NAME),
]


@pytest.mark.parametrize(("condition", "keys", "detail"), BINDINGS)
def test_bindings_first_failure_wins(condition: Condition, keys: Keys, detail: str) -> None:
    with pytest.raises(ValidationError) as problem:
        check_bindings(condition, keys, timeout_given=False)
    assert detail_of(problem) == detail


@pytest.mark.parametrize(
    ("condition", "keys"),
    [
        (Single("k"), ["k"]),
        (Single("k"), [None]),
        (OperatorOnly(), ["anything"]),
        (TimeoutOnly(), ["anything"]),
        (AllOf((Single("a"), Single("b"))), ["b", "a"]),
    ],
)
def test_good_bindings(condition: Condition, keys: Keys) -> None:
    check_bindings(condition, keys, timeout_given=True)


def test_lists_and_plain_text_become_the_declared_types() -> None:
    given: Any = Count(n=1, waitpoints=["k"], count_kind="DistinctSignals", signal_name=["go"])  # pyright: ignore[reportArgumentType]
    typed = Count(n=1, waitpoints=("k",), count_kind=SIGNALS, signal_name=("go",))
    assert checked_condition(AllOf([given])) == AllOf((typed,))  # pyright: ignore[reportArgumentType]


def test_a_value_of_the_wrong_type_is_named_with_its_place() -> None:
    with pytest.raises(ValidationError) as problem:
        checked_condition(AllOf((Single("k"), Count(n=-1, waitpoints=()))))
    assert "members[1].n" in detail_of(problem)


def nested(depth: int, leaf: Condition) -> Condition:
    """`depth` composites around a leaf."""
    for _ in range(depth):
        leaf = AllOf((leaf,))
    return leaf


TREES: list[tuple[Condition, str]] = [
    (
        nested(5, Single("k")),
        (
            "condition_depth_exceeded: depth 5 exceeds cap 4 at path "
            "members[0].members[0].members[0].members[0]"
        ),
    ),
    (
        AllOf((Single("k"), nested(4, Count(n=0, waitpoints=())))),
        (
            "condition_depth_exceeded: depth 5 exceeds cap 4 at path "
            "members[1].members[0].members[0].members[0]"
        ),
    ),
    (AllOf(()), "allof_empty_members at path <root>"),
    (AllOf((Single("k"), AllOf(()))), "allof_empty_members at path members[1]"),
    (
        AllOf((AllOf((Single("k"), AllOf(()))), AllOf(()))),
        "allof_empty_members at path members[0].members[1]",
    ),
    (Count(n=0, waitpoints=()), "count_n_zero at path <root>"),
    (Count(n=1, waitpoints=()), "count_waitpoints_empty at path <root>"),
    (
        Count(n=3, waitpoints=("a", "b", "a")),
        "count_exceeds_waitpoint_set: n=3 > waitpoints=2 at path <root>",
    ),
    (AllOf((Single("k"), OperatorOnly())), "member_not_signal_satisfiable at path members[1]"),
    (
        AllOf((AllOf((TimeoutOnly(),)),)),
        "member_not_signal_satisfiable at path members[0].members[0]",
    ),
]


@pytest.mark.parametrize(("condition", "detail"), TREES)
def test_trees_are_checked_from_the_top(condition: Condition, detail: str) -> None:
    with pytest.raises(ValidationError) as problem:
        check_tree(condition)
    assert detail_of(problem) == detail


@pytest.mark.parametrize(
    "condition",
    [
        nested(4, Single("k")),
        nested(3, Count(n=1, waitpoints=("k",))),
        Count(n=9, count_kind=SIGNALS, waitpoints=("k",)),
        Count(n=9, count_kind=SOURCES, waitpoints=("k",)),
        Single("k"),
        OperatorOnly(),
    ],
)
def test_good_trees(condition: Condition) -> None:
    check_tree(condition)


# --- evaluation ---------------------------------------------------------------------------------


def seen(
    key: str, name: str = "go", identity: str = "", source: tuple[str, str] = ("", "")
) -> AcceptedSignal:
    return AcceptedSignal(identity or f"{key}-{name}", key, name, *source)


def test_single_matches_by_exact_name() -> None:
    assert satisfied(Single("k", "go"), [seen("k", "go")])
    assert not satisfied(Single("k", "go"), [seen("k", "Go"), seen("l", "go")])
    assert satisfied(Single("k"), [seen("k", "anything")])


def test_nothing_satisfies_operator_and_timeout() -> None:
    for condition in (OperatorOnly(), TimeoutOnly()):
        assert not satisfied(condition, [seen("k"), seen("OperatorOnly"), seen("k", "operator")])


def test_counts_count_what_is_different() -> None:
    twice = [seen("k", identity="1", source=("u", "a")), seen("k", identity="2", source=("u", "a"))]
    assert not satisfied(Count(n=2, count_kind=SOURCES, waitpoints=("k",)), twice)
    assert satisfied(Count(n=2, count_kind=SIGNALS, waitpoints=("k",)), twice)
    assert not satisfied(Count(n=2, count_kind=WAITPOINTS, waitpoints=("k", "l")), twice)
    other = [*twice, seen("l", "no", "3", ("v", "a"))]
    assert satisfied(Count(n=2, count_kind=SOURCES, waitpoints=("k", "l")), other)
    assert satisfied(Count(n=2, count_kind=WAITPOINTS, waitpoints=("k", "l")), other)
    named = Count(n=2, count_kind=WAITPOINTS, waitpoints=("k", "l"), signal_name="go")
    assert not satisfied(named, other)


def trees() -> st.SearchStrategy[Condition]:
    key = st.sampled_from("abc")
    name = st.sampled_from([None, "go", "no", ("go", "other")])
    leaf: Any = st.one_of(
        st.builds(Single, key, name),
        st.builds(
            Count,
            n=st.integers(1, 3),
            waitpoints=st.lists(key, min_size=1, max_size=3).map(tuple),
            count_kind=st.sampled_from(CountKind),
            signal_name=name,
        ),
    )
    return st.recursive(
        leaf,
        lambda inner: st.lists(inner, min_size=1, max_size=3).map(lambda m: AllOf(tuple(m))),
        max_leaves=5,
    )


accepted = st.lists(
    st.builds(
        AcceptedSignal,
        st.sampled_from(["s1", "s2", "s3"]),
        st.sampled_from("abc"),
        st.sampled_from(["go", "no"]),
        st.sampled_from("uv"),
        st.sampled_from("xy"),
    ),
    max_size=5,
)


@given(trees(), accepted)
def test_monotone_and_order_free(condition: Condition, signals: list[AcceptedSignal]) -> None:
    verdict = satisfied(condition, signals)
    for order in list(permutations(signals))[:24]:
        assert satisfied(condition, order) == verdict
    if not verdict:
        for some in range(len(signals)):
            assert not satisfied(condition, signals[:some])


@given(trees())
def test_json_round_trip(condition: Condition) -> None:
    def once(node: Condition) -> Condition:
        if isinstance(node, AllOf):
            return AllOf(tuple(once(member) for member in node.members))
        if isinstance(node, Count):
            keys = tuple(dict.fromkeys(node.waitpoints))
            return Count(
                n=node.n, waitpoints=keys, count_kind=node.count_kind, signal_name=node.signal_name
            )
        return node

    assert parse_condition(condition_json(condition)) == once(condition)
