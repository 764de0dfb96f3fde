"""Identifiers and their checks."""

from __future__ import annotations

import copy
import logging
import pickle
import re
from uuid import UUID, uuid4

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core import ids
from flowfabric.core.errors import CorruptionError, ValidationError
from flowfabric.core.ids import ExecutionId, IdParseError, PartitionKey, WaitpointToken
from flowfabric.core.partition import PartitionCounts

COUNTS = PartitionCounts()
UUID_A = "11111111-2222-4333-8444-555555555555"
UUID_B = "550e8400-e29b-41d4-a716-446655440000"


def detail_of(error: pytest.ExceptionInfo[ValidationError]) -> str:
    assert error.value.code == "invalid_input"
    return error.value.detail


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", "MissingTag"),
        (UUID_A, "MissingTag"),
        (f"{{b:1}}:{UUID_A}", "MissingTag"),
        (f"{{fp:1}}{UUID_A}", "MissingTag"),
        (f" {{fp:1}}:{UUID_A}", "MissingTag"),
        (f"{{fp:xx}}:{UUID_A}", "InvalidPartitionIndex"),
        (f"{{fp:}}:{UUID_A}", "InvalidPartitionIndex"),
        (f"{{fp:65536}}:{UUID_A}", "InvalidPartitionIndex"),
        (f"{{fp:99999}}:{UUID_A}", "InvalidPartitionIndex"),
        (f"{{fp:100000}}:{UUID_A}", "InvalidPartitionIndex"),
        (f"{{fp:+7}}:{UUID_A}", "InvalidPartitionIndex"),
        (f"{{fp:007}}:{UUID_A}", "InvalidPartitionIndex"),
        (f"{{fp:-1}}:{UUID_A}", "InvalidPartitionIndex"),
        (f"{{fp:٣}}:{UUID_A}", "InvalidPartitionIndex"),
        ("{fp:1}:", "InvalidUuid"),
        ("{fp:1}:zz", "InvalidUuid"),
        (f"{{fp:1}}:{UUID_B.upper()}", "InvalidUuid"),
        (f"{{fp:1}}:{UUID_A.replace('-', '')}", "InvalidUuid"),
        (f"{{fp:1}}:{UUID_A}\n", "InvalidUuid"),
        (f"{{fp:1}}:{{{UUID_A}}}", "InvalidUuid"),
    ],
)
def test_malformed_execution_ids(text: str, kind: str) -> None:
    with pytest.raises(IdParseError) as error:
        ExecutionId.parse(text)
    assert error.value.kind == kind
    assert error.value.code == "invalid_input"
    assert error.value.detail.startswith(f"execution_id: {kind}")
    assert error.value.http_status == 422


@pytest.mark.parametrize("value", [None, 5, b"{fp:1}:x"])
def test_an_execution_id_must_be_text(value: object) -> None:
    with pytest.raises(IdParseError):
        ExecutionId.parse(value)  # pyright: ignore[reportArgumentType]


def test_a_long_malformed_id_is_shortened_in_the_message() -> None:
    with pytest.raises(IdParseError) as error:
        ExecutionId.parse("x" * 10_000)
    assert len(str(error.value)) < 250


def test_parts_of_an_execution_id() -> None:
    execution_id = ExecutionId.parse(f"{{fp:42}}:{UUID_A}")
    assert execution_id == f"{{fp:42}}:{UUID_A}"
    assert (execution_id.partition, execution_id.tag, execution_id.uuid) == (42, "{fp:42}", UUID_A)
    assert ExecutionId.trusted(str(execution_id)) == execution_id


@given(index=st.integers(0, 65_535), uuid=st.uuids())
def test_the_compact_spelling_is_the_same_id(index: int, uuid: UUID) -> None:
    compact = f"{index}-{uuid}"
    parsed = ExecutionId(compact)
    assert parsed == f"{{fp:{index}}}:{uuid}"
    assert parsed.compact == compact
    assert re.fullmatch(r"[0-9a-f-]+", compact)


@pytest.mark.parametrize(
    "text", [f"042-{UUID_A}", f"65536-{UUID_A}", f"-{UUID_A}", f"1-{UUID_A}\n"]
)
def test_the_compact_spelling_is_as_strict(text: str) -> None:
    with pytest.raises(IdParseError, match="an execution id looks like 42-<uuid>"):
        ExecutionId(text)


def test_stored_ids_are_canonical() -> None:
    assert type(ids.stored_id(f"{{fp:1}}:{UUID_A}", "index")) is ExecutionId
    with pytest.raises(CorruptionError, match="is not an execution id"):
        ids.stored_id(f"1-{UUID_A}", "index")


@given(index=st.integers(0, 65_535), uuid=st.uuids())
def test_every_canonical_id_parses_and_round_trips(index: int, uuid: UUID) -> None:
    text = f"{{fp:{index}}}:{uuid}"
    parsed = ExecutionId(text)
    assert (parsed, parsed.partition, parsed.uuid) == (text, index, str(uuid))
    for twin in (pickle.loads(pickle.dumps(parsed)), copy.copy(parsed)):
        assert twin == parsed
        assert type(twin) is ExecutionId


@given(st.text(max_size=60))
def test_arbitrary_text_never_raises_anything_else(text: str) -> None:
    with pytest.raises(IdParseError) as error:
        ExecutionId.parse("{fp:" + text)
    assert error.value.kind in {"MissingTag", "InvalidPartitionIndex", "InvalidUuid"}


def test_the_range_is_checked_only_where_asked() -> None:
    assert ExecutionId(f"{{fp:255}}:{UUID_A}").check_partition(COUNTS).partition == 255
    outside = ExecutionId(f"{{fp:256}}:{UUID_A}")
    with pytest.raises(ValidationError) as error:
        outside.check_partition(COUNTS)
    assert detail_of(error) == "execution_id: partition 256 is out of range 0..255"
    assert error.value.http_status == 400


def test_minting_for_flows_and_lanes() -> None:
    assert ExecutionId.deterministic_for_flow(UUID_B, UUID_A, COUNTS).partition == 24
    assert ExecutionId.solo("default", COUNTS).partition == 86
    assert ExecutionId.solo("workers-a", COUNTS).partition == 193
    minted = ExecutionId.solo("default", COUNTS)
    assert ExecutionId.parse(minted) == minted
    assert UUID(minted.uuid).version == 4
    assert minted != ExecutionId.solo("default", COUNTS)
    assert ExecutionId.deterministic_for_flow(UUID_A, UUID_B, COUNTS) == f"{{fp:101}}:{UUID_B}"
    nil = str(UUID(int=0))
    assert ExecutionId.deterministic_solo("default", nil, COUNTS) == f"{{fp:86}}:{nil}"


@pytest.mark.parametrize(
    ("flow_id", "uuid", "field"), [("nope", UUID_A, "flow_id"), (UUID_A, "nope", "uuid")]
)
def test_deterministic_minting_refuses_what_is_no_uuid(flow_id: str, uuid: str, field: str) -> None:
    with pytest.raises(IdParseError) as error:
        ExecutionId.deterministic_for_flow(flow_id, uuid, COUNTS)
    assert (error.value.field, error.value.kind) == (field, "InvalidUuid")


def test_minting_many() -> None:
    many = ExecutionId.mint_solo_many("default", COUNTS, 500)
    assert len(set(many)) == 500
    for each in many:
        assert type(each) is ExecutionId
        assert ExecutionId.parse(each).partition == 86
        assert UUID(each.uuid).version == 4
        assert UUID(each.uuid).variant == uuid4().variant
    assert ExecutionId.mint_solo_many("default", COUNTS, 0) == []


def test_new_uuids_are_random_version_4() -> None:
    made = [ids.new_uuid() for _ in range(400)]
    assert len(set(made)) == 400
    for text in made:
        parsed = UUID(text)
        assert str(parsed) == text
        assert parsed.version == 4
        assert parsed.variant == uuid4().variant


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", "MissingBraces"),
        ("{", "MissingBraces"),
        ("fp:1", "MissingBraces"),
        ("{fp:1", "MissingBraces"),
        ("{}", "MalformedBody"),
        ("{fp}", "MalformedBody"),
        ("{p:1}", "UnknownFamilyPrefix"),
        ("{execution:1}", "UnknownFamilyPrefix"),
        ("{fp:}", "InvalidIndex"),
        ("{fp:65536}", "InvalidIndex"),
        ("{b:01}", "InvalidIndex"),
        ("{q:x}", "InvalidIndex"),
    ],
)
def test_malformed_partition_keys(text: str, kind: str) -> None:
    with pytest.raises(IdParseError) as error:
        PartitionKey.parse(text)
    assert error.value.kind == kind


@pytest.mark.parametrize("text", ["{fp:7}", "{b:7}", "{q:7}"])
def test_partition_keys_by_family(text: str) -> None:
    key = PartitionKey.parse(text)
    assert key == text == PartitionKey.trusted(text)
    assert key.index_number == 7
    assert type(pickle.loads(pickle.dumps(key))) is PartitionKey


def test_waitpoint_tokens_are_redacted_everywhere(caplog: pytest.LogCaptureFixture) -> None:
    secret = "0123456789abcdef0123456789abcdef01234567"
    token = WaitpointToken(f"k1:{secret}")
    shown = "k1:<REDACTED:len=40>"
    assert str(token) == f"{token}" == f"{token:s}" == shown
    assert repr(token) == f"WaitpointToken({shown})"
    assert f"{token:>30}".endswith(shown)
    with caplog.at_level(logging.INFO):
        logging.getLogger("test").info("token %s %r", token, [token])
    assert secret not in caplog.text
    assert shown in caplog.text
    assert token.reveal() == f"k1:{secret}"
    assert token.kid == "k1"
    assert len(token.fingerprint) == 16
    assert token.fingerprint not in secret


@pytest.mark.parametrize("raw", ["", "nocolon", ":digest", "kid:"])
def test_malformed_tokens_show_nothing(raw: str) -> None:
    token = WaitpointToken(raw)
    assert str(token) == "<REDACTED:malformed>"
    assert repr(token) == "WaitpointToken(<REDACTED:malformed>)"
    assert token.kid == ""
    assert token.reveal() == raw


def test_tokens_compare_by_value_and_copy() -> None:
    token = WaitpointToken("k1:aa")
    assert token == WaitpointToken("k1:aa")
    assert hash(token) == hash(WaitpointToken("k1:aa"))
    assert token != WaitpointToken("k1:ab")
    assert token != "k1:aa"
    assert copy.copy(token) == token == pickle.loads(pickle.dumps(token))


def test_hash_vectors() -> None:
    assert ids.fnv1a64(b"") == 0xCBF29CE484222325
    assert ids.fnv1a64(b"a") == 0xAF63DC4C8601EC8C


@pytest.mark.parametrize(
    ("lane", "problem"),
    [
        ("", "Empty"),
        ("x" * 65, "TooLong(65)"),
        ("é" * 33, "TooLong(66)"),
        ("a\tb", "NonPrintable(1)"),
        ("abc\x7f", "NonPrintable(3)"),
        ("aé", "NonPrintable(1)"),
        ("lane\n", "NonPrintable(4)"),
    ],
)
def test_refused_lanes(lane: str, problem: str) -> None:
    with pytest.raises(ValidationError) as error:
        ids.validate_lane(lane)
    assert detail_of(error) == f"lane_id: {problem}"
    with pytest.raises(CorruptionError) as stored:
        ids.stored_lane(lane, "execution {fp:1}")
    assert stored.value.detail == f"execution {{fp:1}}: lane_id: {problem}"


@pytest.mark.parametrize("lane", ["default", "x" * 64, "with space", "~!:{}"])
def test_accepted_lanes(lane: str) -> None:
    assert ids.validate_lane(lane) == lane == ids.stored_lane(lane, "test")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must not be empty"),
        ("w" * 257, "must be at most 256 bytes, got 257"),
        ("é" * 129, "must be at most 256 bytes, got 258"),
        ("a b", "must not contain whitespace or control characters"),
        ("a\x00", "must not contain whitespace or control characters"),
        ("a\u2003b", "must not contain whitespace or control characters"),
        ("a\x85b", "must not contain whitespace or control characters"),
        ("a\ud800", "is not valid Unicode"),
    ],
)
def test_refused_worker_ids(text: str, problem: str) -> None:
    with pytest.raises(ValidationError) as error:
        ids.validate_worker_id(text, "worker_instance_id")
    assert detail_of(error) == f"worker_instance_id: {problem}"


@pytest.mark.parametrize("text", ["w", "w" * 256, "é" * 128, "host:1{x}"])
def test_accepted_worker_ids(text: str) -> None:
    assert ids.validate_worker_id(text) == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must not be empty"),
        ("n" * 129, "must be at most 128 bytes, got 129"),
        ("a b", "must be printable and without whitespace"),
        ("a\u00a0b", "must be printable and without whitespace"),
        ("a\x1bb", "must be printable and without whitespace"),
        ("a:b", "must not contain ':', '{' or '}'"),
        ("a{b", "must not contain ':', '{' or '}'"),
        ("a}b", "must not contain ':', '{' or '}'"),
    ],
)
def test_refused_namespaces(text: str, problem: str) -> None:
    with pytest.raises(ValidationError) as error:
        ids.validate_namespace(text)
    assert detail_of(error) == f"namespace: {problem}"
    assert error.value.http_status == 400


@pytest.mark.parametrize("text", ["default", "n" * 128, "größe", "team/a.b-c_d"])
def test_accepted_namespaces(text: str) -> None:
    assert ids.validate_namespace(text) == text


def test_free_text_limits() -> None:
    assert ids.validate_text("", "idempotency_key") == ""
    assert ids.validate_text("k" * 1024, "idempotency_key")
    with pytest.raises(ValidationError) as error:
        ids.validate_text("k" * 1025, "idempotency_key")
    assert detail_of(error) == "idempotency_key: must be at most 1024 bytes, got 1025"
    with pytest.raises(ValidationError) as error:
        ids.validate_text("k" * 513, "idempotency_key", limit=512)
    assert detail_of(error) == "idempotency_key: must be at most 512 bytes, got 513"
    with pytest.raises(ValidationError) as error:
        ids.validate_text("", "execution_kind", required=True)
    assert detail_of(error) == "execution_kind: must not be empty"
    with pytest.raises(ValidationError) as error:
        ids.validate_text("é" * 513, "creator_identity")
    assert detail_of(error) == "creator_identity: must be at most 1024 bytes, got 1026"
    assert ids.validate_text("", "creator_identity") == ""


@pytest.mark.parametrize("value", [None, 7, b"bytes"])
def test_values_that_are_not_text(value: object) -> None:
    for check in (ids.validate_lane, ids.validate_worker_id, ids.validate_namespace):
        with pytest.raises(ValidationError) as error:
            check(value)  # pyright: ignore[reportArgumentType]
        assert f"must be text, got {type(value).__name__}" in detail_of(error)
        assert error.value.http_status == 422
    with pytest.raises(IdParseError):
        ids.validate_uuid(value, "lease_id")  # pyright: ignore[reportArgumentType]


def test_uuids_of_any_version_are_accepted_in_canonical_form() -> None:
    assert ids.validate_uuid(str(UUID(int=0)), "lease_id") == str(UUID(int=0))
    for wrong in (UUID_B.upper(), UUID_B + "\n", f"{{{UUID_B}}}", UUID_B.replace("-", "")):
        with pytest.raises(IdParseError) as error:
            ids.validate_uuid(wrong, "lease_id")
        assert error.value.detail.startswith("lease_id: InvalidUuid")


class Carrier(msgspec.Struct):
    execution_id: ExecutionId
    partition: PartitionKey | None = None


def test_names_stand_for_the_same_uuid_everywhere() -> None:
    # Clients of other versions derive the same ids, so they never change.
    assert ids.quota_id("openai") == "6a6dbe86-3f64-5881-aed7-f920e5a6150c"
    assert ids.budget_id("openai") == "1e606241-6d01-5698-b71d-d4116c35bf45"
    assert ids.quota_id(UUID_A) == ids.budget_id(UUID_A.upper()) == UUID_A


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "quota: must not be empty"),
        ("x" * 257, "quota: must be at most 256 bytes, got 257"),
        ("a\nb", "quota: must be printable"),
        (7, "quota: must be text, got int"),
    ],
)
def test_names_that_are_refused(name: str, problem: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ids.quota_id(name)
    assert detail_of(caught) == problem


def test_ids_travel_through_msgspec_with_the_hooks() -> None:
    carrier = Carrier(ExecutionId(f"{{fp:1}}:{UUID_A}"), PartitionKey("{fp:1}"))
    data = msgspec.json.encode(carrier, enc_hook=ids.enc_hook)
    assert msgspec.json.decode(data, type=Carrier, dec_hook=ids.dec_hook) == carrier
    for wrong in (b'"x"', b"5", b"[]"):
        data = b'{"execution_id":' + wrong + b"}"
        with pytest.raises(IdParseError):
            msgspec.json.decode(data, type=Carrier, dec_hook=ids.dec_hook)


def test_the_hooks_refuse_what_they_do_not_know() -> None:
    with pytest.raises(TypeError, match="cannot encode object"):
        ids.enc_hook(object())
    with pytest.raises(TypeError, match="cannot decode int"):
        ids.dec_hook(int, "1")
