"""Merge patches on summary documents: the standard's rules, exact numbers, the null sentinel."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core.errors import CorruptionError, EngineError, ValidationError
from flowfabric.core.merge_patch import EMPTY, NULL_SENTINEL, merge, parse_patch


def merged(document: str, *patches: str) -> str:
    return merge(document.encode(), *(parse_patch(patch.encode()) for patch in patches)).decode()


@pytest.mark.parametrize(
    ("document", "patch", "result"),
    [
        ('{"a":"b"}', '{"a":"c"}', '{"a":"c"}'),
        ('{"a":"b"}', '{"b":"c"}', '{"a":"b","b":"c"}'),
        ('{"a":"b"}', '{"a":null}', "{}"),
        ('{"a":"b","b":"c"}', '{"a":null}', '{"b":"c"}'),
        ('{"a":["b"]}', '{"a":"c"}', '{"a":"c"}'),
        ('{"a":"c"}', '{"a":["b"]}', '{"a":["b"]}'),
        ('{"a":{"b":"c"}}', '{"a":{"b":"d","c":null}}', '{"a":{"b":"d"}}'),
        ('{"a":[{"b":"c"}]}', '{"a":[1]}', '{"a":[1]}'),
        ('{"a":[1,2,3]}', '{"a":[4]}', '{"a":[4]}'),
        ("{}", '{"a":{"bb":{"ccc":null}}}', '{"a":{"bb":{}}}'),
        ('{"a":1}', '{"a":{"b":2}}', '{"a":{"b":2}}'),
        ('{"a":{"b":1}}', '{"a":{}}', '{"a":{"b":1}}'),
        ('{"a":1}', '{"a":{}}', '{"a":{}}'),
        ("{}", '{"a":{}}', '{"a":{}}'),
        ("{}", '{"a":[],"b":{"c":[]}}', '{"a":[],"b":{"c":[]}}'),
        ('{"a":1}', "{}", '{"a":1}'),
        ('{"a":1}', '{"b":null}', '{"a":1}'),
        ("{}", '{"a":[null,{"b":null}]}', '{"a":[null,{"b":null}]}'),
        ('{"a":null}', '{"b":1}', '{"a":null,"b":1}'),
    ],
)
def test_rules(document: str, patch: str, result: str) -> None:
    assert merged(document, patch) == result


def test_patches_apply_in_order() -> None:
    assert merged("{}", '{"a":1,"b":1}', '{"a":null}', '{"a":{"c":2}}') == '{"b":1,"a":{"c":2}}'


@pytest.mark.parametrize(
    "number",
    [
        *("0", "-1", "9007199254740993", "123456789012345", "12345678901234567890"),
        *(str(2**63 - 1), str(-(2**63)), str(2**64 - 1), str(2**70)),
        *("0.1", "1.0", "-0.0", "3.141592653589793", "1e23", "2.2250738585072014e-308"),
    ],
)
def test_numbers_are_exact(number: str) -> None:
    text = merged("{}", f'{{"n":{number}}}')
    assert merged(text, '{"other":1}').startswith(f'{{"n":{number},')


def test_sentinel_becomes_null() -> None:
    patch = json.dumps({"a": NULL_SENTINEL, "b": {"c": NULL_SENTINEL}, "d": [NULL_SENTINEL, 1]})
    assert merged('{"a":1}', patch) == '{"a":null,"b":{"c":null},"d":[null,1]}'
    assert merged('{"a":null}', '{"a":null}') == "{}"


@pytest.mark.parametrize(
    "payload",
    [b"", b"{", b"nope", b'{"a":NaN}', b'{"a":1}x', b'{"a":"\xff"}', b'{"a":1e999}', b"\xff"],
)
def test_not_json(payload: bytes) -> None:
    with pytest.raises(ValidationError, match="payload: is not JSON"):
        parse_patch(payload)


@pytest.mark.parametrize("payload", [b"[]", b"[1]", b"1", b'"a"', b"null", b"true"])
def test_root_must_be_an_object(payload: bytes) -> None:
    with pytest.raises(ValidationError, match="must be a JSON object"):
        parse_patch(payload)


def nested(levels: int) -> str:
    """Objects inside each other: the root and `levels` more."""
    return '{"a":' * levels + "{}" + "}" * levels


def test_depth() -> None:
    deepest = nested(16)
    assert merged("{}", deepest) == deepest
    for levels in (17, 18, 500):
        with pytest.raises(ValidationError) as caught:
            merged("{}", nested(levels))
        assert caught.value.details == ("patch_depth_exceeded",)


@pytest.mark.parametrize("levels", [129, 900, 30_000])
def test_deep_arrays_are_refused_not_fatal(levels: int) -> None:
    with pytest.raises(ValidationError, match="patch_depth_exceeded"):
        merged("{}", '{"a":' + "[" * levels + "]" * levels + "}")


def test_arrays_may_be_deeper_than_objects() -> None:
    patch = '{"a":' + "[" * 100 + "]" * 100 + "}"
    assert merged("{}", patch) == patch


@pytest.mark.parametrize(
    "document", [b"", b"{", b"[]", b"1", b"null", b"[" * 50_000, b'{"a":"\xff"}']
)
def test_an_unreadable_document_is_corruption(document: bytes) -> None:
    with pytest.raises(CorruptionError) as caught:
        merge(document, {"a": 1})
    assert caught.value.code == "corruption"


def test_corruption_is_reported_before_depth() -> None:
    with pytest.raises(EngineError) as caught:
        merge(b"[]", parse_patch(nested(17).encode()))
    assert caught.value.code == "corruption"


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=3), inner, max_size=3)
    ),
    max_leaves=10,
)
objects = st.dictionaries(st.sampled_from(["a", "b", "c"]), values, max_size=3)


def reference(target: Any, patch: Any) -> Any:
    """RFC 7396, word for word."""
    if not isinstance(patch, dict):
        return patch
    known = cast("dict[str, Any]", target) if isinstance(target, dict) else {}
    result = dict(known)
    for name, value in cast("dict[str, Any]", patch).items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = reference(result.get(name), value)
    return result


@given(objects, objects)
def test_like_the_standard(document: dict[str, Any], patch: dict[str, Any]) -> None:
    expected = reference(document, patch)
    found = merged(json.dumps(document), json.dumps(patch))
    assert json.loads(found) == json.loads(json.dumps(expected))


@given(objects)
def test_a_patch_applied_twice_changes_nothing_more(patch: dict[str, Any]) -> None:
    text = json.dumps(patch)
    once = merged(EMPTY.decode(), text)
    assert merged(once, text) == once
