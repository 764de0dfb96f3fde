"""Capabilities, tags, durations and text limits."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core.capabilities import Side, from_csv, missing, normalise, to_csv
from flowfabric.core.durations import to_ms
from flowfabric.core.errors import ValidationError
from flowfabric.core.tags import (
    is_tag_key,
    validate_creation_tags,
    validate_tag_filter,
    validate_tag_key,
    validate_tags,
)
from flowfabric.core.text import lossless, raw, shown, truncate_utf8


def refused(call: Any, *args: Any, code: str = "invalid_input") -> str:
    with pytest.raises(ValidationError) as error:
        call(*args)
    assert error.value.code == code
    return error.value.detail


MANY = [f"t{n}" for n in range(257)]
LONG = ["a" * 2047, "b" * 2049]


@pytest.mark.parametrize("side", ["required", "worker"])
@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        (None, "not_array"),
        ("gpu", "not_array"),
        ({"gpu": 1}, "not_array"),
        (b"gpu", "not_array"),
        (bytearray(b"gpu"), "not_array"),
        (5, "not_array"),
        ([1], "non_string_token"),
        ([None, ""], "non_string_token"),
        ([""], "empty_token"),
        (["a ,b"], "comma_in_token"),
        (["a b"], "control_or_whitespace"),
        (["a\x00"], "control_or_whitespace"),
        (["a\x7f"], "control_or_whitespace"),
        (["a\u2003b"], "control_or_whitespace"),
        (["a\x85"], "control_or_whitespace"),
        (["a\ud800"], "control_or_whitespace"),
        (["gpu", "task:resize"], "reserved prefix"),
        (["", *MANY], "empty_token"),
        (MANY, "too_many_tokens"),
        (LONG, "too_many_bytes"),
    ],
)
def test_capability_checks(side: Side, tokens: object, problem: str) -> None:
    assert refused(normalise, tokens, side, code="invalid_capabilities") == f"{side}:{problem}"


def test_capability_bounds_are_inclusive_and_count_distinct_tokens() -> None:
    assert len(normalise([*MANY[:256], "t0", "t1"])) == 256
    exact = normalise(["a" * 2047, "b" * 2048])
    assert len(to_csv(exact).encode()) == 4096
    assert normalise(["größe", "GPU", "gpu"]) == ("GPU", "gpu", "größe")
    assert normalise(()) == ()


def test_capability_csv() -> None:
    assert to_csv(normalise(["gpu", "cuda"])) == "cuda,gpu"
    assert from_csv(",gpu,,cuda,gpu,") == ("cuda", "gpu")
    assert from_csv("") == ()
    assert refused(from_csv, "a b", "worker", code="invalid_capabilities") == (
        "worker:control_or_whitespace"
    )
    assert len(from_csv("," * 5000 + "x")) == 1


tokens = st.sets(st.text("abcGPU.-/é", min_size=1, max_size=6), max_size=8)


@given(required=tokens, offered=tokens)
def test_matching_is_a_superset_test(required: set[str], offered: set[str]) -> None:
    lacking = missing(normalise(required), normalise(offered))
    assert list(lacking) == sorted(required - offered)
    assert (not lacking) is (offered >= required)
    assert from_csv(to_csv(normalise(required))) == normalise(required)


@pytest.mark.parametrize("key", ["app.task_id", "app.sub.field", "a._", "a.0", "a1_.x.", "ffs.x"])
def test_valid_tag_keys(key: str) -> None:
    assert is_tag_key(key)
    assert validate_tag_key(key) == key


@pytest.mark.parametrize(
    "key",
    [
        "App.x",
        "app",
        "app.",
        "app..x",
        "ap p.x",
        "app.foo-bar",
        "app.Foo",
        "",
        "1a.x",
        "app.x\n",
        "ff.x",
    ],
)
def test_invalid_tag_keys(key: str) -> None:
    assert not is_tag_key(key)
    assert refused(validate_tags, {"app.ok": "1", key: "2"}, code="invalid_tag_key") == key


def test_tag_limits_on_update() -> None:
    assert refused(validate_tags, {}) == "tags: must not be empty"
    full = {f"app.k{n}": "v" for n in range(128)}
    assert validate_tags(full) is full
    assert refused(validate_tags, {**full, "app.x": "v"}) == (
        "tags: must hold at most 128 pairs, got 129"
    )
    assert validate_tags({"app." + "x" * 252: "é" * 2048})
    assert refused(validate_tags, {"app." + "x" * 253: ""}) == (
        "tags: key: must be at most 256 bytes, got 257"
    )
    assert refused(validate_tags, {"app.x": "v" * 4097}) == (
        "tags: value: must be at most 4096 bytes, got 4097"
    )
    assert refused(validate_tags, {"app.x": 5}) == "tags: value: must be text, got int"
    assert refused(validate_tags, {"app.x": "\ud800"}) == "tags: value: is not valid Unicode"
    assert refused(validate_tags, {5: "x"}, code="invalid_tag_key") == "5"


def test_creation_accepts_any_non_empty_key() -> None:
    assert validate_creation_tags({}) == {}
    assert validate_creation_tags({"Any Key!": "v", "é" * 128: ""})
    assert validate_creation_tags({"ff": "v", "FF.x": "", "aff.x": ""})


def test_the_prefix_of_our_own_tags_is_reserved() -> None:
    tags = {"app.ok": "1", "ff.other": "2"}
    assert refused(validate_creation_tags, tags, code="invalid_tag_key") == "ff.other"
    # Looking for them is fine.
    assert validate_tag_filter(tags) is tags
    traced = {"ff.traceparent": f"00-{'0a' * 16}-{'b7' * 8}-01"}
    assert validate_creation_tags(traced) is traced
    assert refused(validate_creation_tags, {"ff.traceparent": "2"}) == (
        "tags: ff.traceparent must be a W3C traceparent"
    )
    assert refused(validate_creation_tags, {"": "v"}) == "tags: key: must not be empty"
    assert refused(validate_creation_tags, {"é" * 129: "v"}) == (
        "tags: key: must be at most 256 bytes, got 258"
    )
    assert refused(validate_creation_tags, {5: "v"}) == "tags: key: must be text, got int"
    assert refused(validate_creation_tags, {str(n): "" for n in range(129)}) == (
        "tags: must hold at most 128 pairs, got 129"
    )


@pytest.mark.parametrize(
    ("value", "ms"),
    [
        (0, 0),
        (5, 5000),
        (2.5, 2500),
        (0.001, 1),
        (0.1, 100),
        (1e-9, 1),
        (timedelta(minutes=5), 300_000),
        (timedelta(microseconds=1), 1),
        (timedelta(milliseconds=1), 1),
        ("5m", 300_000),
        ("24h", 86_400_000),
        ("1h30m", 5_400_000),
        ("1h 30m", 5_400_000),
        ("250ms", 250),
        ("2d", 172_800_000),
        ("1w", 604_800_000),
        ("1.5h", 5_400_000),
        ("1m250ms", 60_250),
        ("0.5ms", 1),
        ("0s", 0),
        (" 10 S ", 10_000),
        ("30", 30_000),
    ],
)
def test_durations(value: Any, ms: int) -> None:
    assert to_ms(value) == ms


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (math.nan, "must be finite, got nan"),
        (math.inf, "must be finite, got inf"),
        (-math.inf, "must be finite, got -inf"),
        (-1, "must not be negative"),
        (-0.001, "must not be negative"),
        (timedelta(seconds=-1), "must not be negative"),
        (2**53, "must be at most 9007199254740991 ms"),
        (1e300, "must be at most 9007199254740991 ms"),
        ("9" * 20 + "w", "must be at most 9007199254740991 ms"),
        (True, "got bool"),
        (None, "got NoneType"),
        ([5], "got list"),
        *(
            (text, "expected text such as")
            for text in (
                "",
                "m",
                "5x",
                "-5m",
                "30m1h",
                "5m5m",
                "1h30",
                "nan",
                "1e3s",
                "٣s",
                "5 m x",
            )
        ),
    ],
)
def test_refused_durations(value: Any, problem: str) -> None:
    detail = refused(to_ms, value, "timeout")
    assert detail.startswith("timeout: ")
    assert problem in detail


@given(st.integers(0, 10**12))
def test_milliseconds_survive_every_spelling(ms: int) -> None:
    assert to_ms(f"{ms}ms") == ms
    assert to_ms(timedelta(milliseconds=ms)) == ms
    assert to_ms(f"{ms // 1000}.{ms % 1000:03}s") == ms


@given(text=st.text(max_size=40), limit=st.integers(0, 60))
def test_truncation_keeps_whole_characters(text: str, limit: int) -> None:
    cut = truncate_utf8(text, limit)
    assert len(cut.encode()) <= limit
    assert text.startswith(cut)
    if len(cut) < len(text):
        assert len((cut + text[len(cut)]).encode()) > limit


@given(st.binary(max_size=40))
def test_what_is_stored_keeps_its_bytes(stored: bytes) -> None:
    text = lossless(stored)
    assert raw(text) == stored
    assert shown(text).encode().decode() == shown(text), "no lone surrogates"
    if stored.isascii():
        assert text == shown(text)


def test_malformed_text_is_shown_escaped() -> None:
    assert shown(lossless(b"a\xff")) == "a\\xff"
    assert shown(lossless("ä".encode())) == "ä"


def test_truncation_vectors() -> None:
    assert truncate_utf8("naïve", 3) == "na"
    assert truncate_utf8("naïve", 4) == "naï"
    assert truncate_utf8("x" * 5000, 4096) == "x" * 4096
    assert truncate_utf8("😀😀", 7) == "😀"
    assert truncate_utf8("a\ud800b", 10) == "a?b"
