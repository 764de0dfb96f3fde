"""What every route accepts in its body: null, repeated ids, `now`, and numbers of every size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin

import msgspec
import pytest

from flowfabric.server.bodies import U64
from flowfabric.server.routing import Route
from tests.server.status_rows import A_TO_B, ROWS, SIGNAL
from tests.server.test_statuses import PUBLIC, filled, path_of, sent
from tests.support.http import Http, Response
from tests.support.shapes import EXECUTION, LEAST, UUID
from tests.support.subjects import Facts, Subjects

WRITES = [name for name, route in PUBLIC.items() if route.method in ("POST", "PUT")]
NOUNS = {
    "executions": "execution_id",
    "flows": "flow_id",
    "budgets": "budget_id",
    "quotas": "quota_policy_id",
}
FIELDS = {"lane": "lane_id", "instance": "worker_instance_id"}
OTHERS = {
    "execution_id": f"{{fp:7}}:{UUID[:-1]}6",
    "lane_id": "other",
    "worker_id": "other",
    "worker_instance_id": "other",
}


def parts(kind: Any) -> tuple[Any, ...]:
    """The types of a field; null and absence are none."""
    if get_origin(kind) not in (Union, UnionType):
        return (kind,)
    absent = (type(None), msgspec.UnsetType)
    return tuple(each for each in get_args(kind) if each not in absent)


def is_collection(kind: Any) -> bool:
    return any(get_origin(each) in (list, dict, tuple) for each in parts(kind))


def struct_of(route: Route) -> Any:
    """The struct of a body, or of the items of one."""
    kind = route.documented or route.body
    if get_origin(kind) is list:
        (kind,) = get_args(kind)
    return kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None


def inside(kind: Any, value: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Every object of a body with the struct that it decodes into."""
    if isinstance(value, list):
        for each in cast("list[Any]", value):
            yield from inside(kind, each)
        return
    for field in msgspec.structs.fields(kind):
        for part in parts(field.type):
            found = get_args(part)[0] if get_origin(part) is list else part
            if isinstance(found, type) and issubclass(found, msgspec.Struct):
                yield from inside(found, value.get(field.encode_name) or [])
    yield kind, value


Change = Callable[[Any, Facts], Any]


def adding(more: Mapping[str, Any]) -> Change:
    """Adds fields to a body."""

    def change(body: Any, _: Facts) -> Any:
        return body | more

    return change


async def call(subjects: Subjects, name: str, change: Change) -> tuple[Response, Facts]:
    """The answer to the first row of a route, which succeeds, with a changed body."""
    route, row = PUBLIC[name], ROWS[name][0]
    facts = await subjects.make(row.subject)
    body = filled(row.body, facts)
    body = change({} if body is None else body, facts)
    headers = filled(dict(row.headers), facts)
    answer = await sent(subjects.http, route, path_of(route, facts), body, headers)
    return answer, facts


async def test_null_is_as_good_as_absent(subjects: Subjects) -> None:
    """10 §1: in every optional field that is neither a list nor a map."""
    count = 0
    for name in WRITES:
        kind = struct_of(PUBLIC[name])
        if kind is None:
            continue

        def nulls(body: Any, _: Facts, kind: Any = kind) -> Any:
            nonlocal count
            for of, value in inside(kind, body):
                for field in msgspec.structs.fields(of):
                    if field.required or is_collection(field.type):
                        continue
                    count += field.encode_name not in value
                    value.setdefault(field.encode_name, None)
            return body

        answer, _ = await call(subjects, name, nulls)
        assert answer.status == ROWS[name][0].status, (name, answer.body)
        if "results" in answer.json:
            # 404: the budget of the row does not exist.
            assert {row["status"] for row in answer.json["results"]} <= {200, 201, 404}, name
    assert count > 150


async def test_null_in_nested_objects(http: Http, subjects: Subjects) -> None:
    facts = await subjects.make("flow")
    edge = {"upstream": facts["a"], "kind": None, "input_name": None, "edge_id": None}
    member = LEAST | {"flow_id": facts["id"], "depends_on": [edge | {"data_passing_ref": None}]}
    made = await http.post("/v1/executions", member)
    assert made.json["Created"]["public_state"] == "waiting_children"
    nodes = [{"key": key, "execution_kind": "x", "policy": None} for key in "ab"]
    edges = [{"from": "a", "to": "b", "kind": None, "edge_id": None}]
    policy = {"kind": "any_of", "on_satisfied": "let_run", "spare_shared": None, "k": None}
    graph = {"flow_kind": "x", "namespace": "default", "nodes": nodes, "edges": edges}
    graph |= {"groups": [{"node": "b", "policy": policy}], "hold": None, "flow_id": None}
    assert (await http.post("/v1/flows/submit", graph)).status == 201


@pytest.mark.parametrize("field", ["tags", "depends_on", "input_payload"])
async def test_lists_and_maps_are_not_null(http: Http, field: str) -> None:
    answer = await http.post("/v1/executions", LEAST | {field: None})
    assert answer.kind == (422, "invalid_input")
    assert answer.json["detail"].startswith(f"{field}: expected ")


def ids_of(route: Route) -> dict[str, str]:
    """The fields that repeat the parameters of a path."""
    before = dict(zip(route.template.split("/")[1:], route.template.split("/"), strict=False))
    named = {each: FIELDS.get(each, each) for each in route.names}
    if "id" in named:
        named["id"] = NOUNS[before["{id}"]]
    return named


REPEATING = [
    name
    for name in WRITES
    if PUBLIC[name].names and struct_of(PUBLIC[name]) is not None and "{name}" not in name
]


async def test_a_body_may_repeat_the_ids_of_its_path(subjects: Subjects) -> None:
    assert len(REPEATING) == 26
    for name in REPEATING:
        named = ids_of(PUBLIC[name])

        def repeats(body: Any, facts: Facts, named: dict[str, str] = named) -> Any:
            return body | {field: facts[each] for each, field in named.items()}

        answer, _ = await call(subjects, name, repeats)
        assert answer.status == ROWS[name][0].status, (name, answer.body)


async def test_ids_of_body_and_path_must_agree(subjects: Subjects) -> None:
    for name in REPEATING:
        for field in ids_of(PUBLIC[name]).values():
            other = {field: OTHERS.get(field, UUID)}
            answer, _ = await call(subjects, name, adding(other))
            text = f"path {field} does not match body {field}"
            assert answer.kind == (400, "invalid_input"), (name, answer.body)
            assert (answer.json["error"], answer.json["detail"]) == (text, text), name


@pytest.mark.parametrize("now", ["x", None, -1.5, [1], {"a": {"b": 2**70}}])
async def test_now_is_ignored_everywhere(subjects: Subjects, now: Any) -> None:
    for name in WRITES:
        if struct_of(PUBLIC[name]) is None or isinstance(ROWS[name][0].body, list):
            continue
        more = {"now": now, "unheard_of": now}
        answer, _ = await call(subjects, name, adding(more))
        assert answer.status == ROWS[name][0].status, (name, answer.body)


# --- numbers --------------------------------------------------------------------------------


async def test_every_u64_ends_at_two_to_the_64th(subjects: Subjects) -> None:
    """Within its type, a rule or the operation decides, and never a fault."""
    seen: set[str] = set()
    for name in WRITES:
        kind = struct_of(PUBLIC[name])
        if kind is None or isinstance(ROWS[name][0].body, list):
            continue
        for field in msgspec.structs.fields(kind):
            if U64 not in parts(field.type):
                continue
            seen.add(field.name)
            for number, problem in (
                (2**64, f"{field.name}: expected int from 0 to {2**64 - 1}"),
                (-1, f"{field.name}: expected int from 0 to {2**64 - 1}"),
                (5.0, f"{field.name}: expected int, got float"),
                (True, f"{field.name}: expected int, got bool"),
                (2**64 - 1, ""),
                (2**63, ""),
            ):
                given = {field.name: number}
                answer, _ = await call(subjects, name, adding(given))
                said = (name, given, answer.body)
                if problem:
                    assert answer.kind == (422, "invalid_input"), said
                    assert answer.json["detail"] == problem, said
                else:
                    assert answer.status in (200, 201, 400, 409), said
    assert len(seen) > 15


U64_MAX = 2**64 - 1
DECIDED = [
    ("POST /v1/quotas", {"max_concurrent": U64_MAX}, (400, "invalid_quota_spec")),
    ("PUT /v1/quotas/{id}", {"max_concurrent": 2**63}, (400, "invalid_quota_spec")),
    ("POST /v1/budgets", {"hard_limits": [U64_MAX]}, (400, "invalid_input")),
    ("POST /v1/budgets", {"soft_limits": [2**53]}, (400, "invalid_input")),
    ("PUT /v1/budgets/{id}", {"hard_limits": {"tokens": U64_MAX}}, (400, "invalid_input")),
    ("POST /v1/budgets/{id}/usage", {"dimensions": {"tokens": U64_MAX}}, (400, "invalid_input")),
    ("POST /v1/workers/{worker_id}/claim", {"grant_ttl_ms": U64_MAX}, (400, "invalid_input")),
    ("POST /v1/executions/{id}/reclaim", {"grant_ttl_ms": U64_MAX}, (400, "invalid_input")),
    ("POST /v1/executions/{id}/signal", {"dedup_ttl_ms": U64_MAX}, (400, "invalid_input")),
    ("POST /v1/executions/{id}/resume", {"resume_delay_ms": U64_MAX}, (400, "invalid_input")),
    ("POST /v1/flows/{id}/cancel", {"grace_ms": U64_MAX}, (400, "invalid_grace_ms")),
    (
        "POST /v1/flows/{id}/edges",
        {"expected_graph_revision": U64_MAX},
        (409, "stale_graph_revision"),
    ),
]


@pytest.mark.parametrize(
    ("name", "change", "kind"), DECIDED, ids=[f"{d[0]} {d[1]}" for d in DECIDED]
)
async def test_rules_decide_on_the_largest_numbers(
    subjects: Subjects, name: str, change: dict[str, Any], kind: tuple[int, str]
) -> None:
    answer, _ = await call(subjects, name, adding(change))
    assert answer.kind == kind, answer.body


async def test_the_largest_epoch_is_a_stale_one(subjects: Subjects) -> None:
    facts = await subjects.make("running")
    lease = {"lease_id": UUID, "lease_epoch": U64_MAX, "attempt_id": UUID}
    body = {"execution_id": facts["id"], "reason": "x", "source": "lease_holder"} | lease
    answer = await subjects.http.post(f"/v1/executions/{facts['id']}/cancel", body)
    assert answer.kind == (409, "stale_lease")


NUMBERS = [
    ("priority", "i32", ["2147483648", "-2147483649", "1e3", "5.0", "1" + "0" * 400]),
    ("partition_id", "u16", ["65536", "-1", "1e3", "1" + "0" * 400]),
    ("delay_until", "i64", [str(2**63), str(-(2**63) - 1), "1e3", "1" + "0" * 400]),
    ("execution_deadline_at", "i64", [str(2**64), "1.0", "1e400"]),
]


@pytest.mark.parametrize(("field", "_type", "texts"), NUMBERS, ids=[each[1] for each in NUMBERS])
async def test_numbers_outside_their_types_do_not_decode(
    http: Http, field: str, _type: str, texts: list[str]
) -> None:
    for text in texts:
        body = msgspec.json.encode(LEAST)[:-1] + f',"{field}":{text}}}'.encode()
        answer = await http.post("/v1/executions", body, content_type="application/json")
        assert answer.kind == (422, "invalid_input"), text[:30]
        assert answer.json["detail"].startswith(f"{field}: "), text[:30]


async def test_numbers_of_any_size_are_json(http: Http) -> None:
    for text in ("1" + "0" * 400, "1e999", "-1e-999"):
        body = msgspec.json.encode(LEAST)[:-1] + f',"other":[{text}]}}'.encode()
        made = await http.post("/v1/executions", body, content_type="application/json")
        assert made.status == 201, text[:10]


@pytest.mark.parametrize("created_at", [-5, 0, 2**63 - 1])
async def test_the_time_of_a_signal_is_signed(subjects: Subjects, created_at: int) -> None:
    for name in (
        f"POST {path}"
        for path in (
            "/v1/executions/{id}/signal",
            "/v1/callbacks/executions/{id}/waitpoints/{waitpoint_id}",
        )
    ):
        answer, _ = await call(subjects, name, adding({"created_at": created_at}))
        assert answer.status == 200, answer.body
        over = {"created_at": 2**63}
        answer, _ = await call(subjects, name, adding(over))
        assert answer.kind == (422, "invalid_input")


# --- ids ------------------------------------------------------------------------------------


async def test_uuids_may_be_written_in_upper_case_or_without_hyphens(http: Http) -> None:
    """10 §1: lower case with hyphens is how they are written, not how they must be read."""
    flow_id = "abcdef01-2222-4333-8444-55555555555a"
    for text, status in (
        (flow_id.upper(), 201),
        (flow_id.replace("-", ""), 200),
        (flow_id, 200),
    ):
        body = {"flow_id": text, "flow_kind": "x", "namespace": "default"}
        answer = await http.post("/v1/flows", body)
        assert answer.status == status, text
        ((said,),) = (each.values() for each in answer.json.values())
        assert said == flow_id
        found = await http.get(f"/v1/flows/{text}")
        assert (found.status, found.json["flow_id"]) == (200, flow_id)
        cancel = {"flow_id": text.upper(), "reason": "", "cancellation_policy": "flow_only"}
        assert (await http.post(f"/v1/flows/{text}/cancel", cancel)).status == 200
    budget = {"policy": {"budget_ids": [flow_id.upper()]}}
    assert (await http.post("/v1/executions", LEAST | budget)).status == 201


@pytest.mark.parametrize(
    "text",
    ["", "x", UUID[:-1], f"{{{UUID}}}", f"urn:uuid:{UUID}", UUID.replace("-", "", 1), UUID + "\n"],
)
async def test_other_texts_are_no_uuids(http: Http, text: str) -> None:
    body = {"flow_id": text, "flow_kind": "x", "namespace": "default"}
    answer = await http.post("/v1/flows", body)
    assert answer.kind == (422, "invalid_input")
    assert answer.json["detail"] == "flow_id: must be a UUID"
    body = {"execution_id": EXECUTION, "reason": "x", "source": "lease_holder"}
    for field in ("lease_id", "attempt_id"):
        answer = await http.post(f"/v1/executions/{EXECUTION}/cancel", body | {field: text})
        assert answer.kind == (422, "invalid_input")
        assert answer.json["detail"] == f"{field}: must be a UUID"


async def test_paths_and_queries_take_compact_ids_and_bodies_do_not(
    http: Http, subjects: Subjects
) -> None:
    """10 §11.6 is about bodies; elsewhere 01 §1.2 holds."""
    facts = await subjects.make("flow")
    compact = facts["a"].replace("{fp:", "").replace("}:", "-")
    state = await http.get(f"/v1/executions/{compact}/state")
    assert (state.status, state.json) == (200, "waiting")
    query = f"upstream_execution_id={compact}"
    edges = (await http.get(f"/v1/flows/{facts['id']}/edges?{query}")).json["edges"]
    assert [edge["upstream_execution_id"] for edge in edges] == [facts["a"]]
    body = {"execution_id": compact, "reason": "x"}
    answer = await http.post(f"/v1/executions/{compact}/cancel", body)
    assert answer.kind == (422, "invalid_input")
    assert answer.json["detail"] == f"execution_id: must have its canonical form {facts['a']}"


async def test_partitions_that_do_not_exist(http: Http, subjects: Subjects) -> None:
    """10 §1: an index that is not below the count is 400 `invalid_input` in bodies and paths."""
    facts = await subjects.make("flow")
    far = f"{{fp:300}}:{UUID}"
    edge = filled(A_TO_B, facts) | {"upstream_execution_id": far}
    flow = f"/v1/flows/{facts['id']}"
    apply = {"flow_id": facts["id"], "edge_id": UUID}
    for path, body in (
        ("/v1/executions", LEAST | {"execution_id": far}),
        ("/v1/executions", LEAST | {"flow_id": facts["id"], "depends_on": [{"upstream": far}]}),
        (f"{flow}/members", {"flow_id": facts["id"], "execution_id": far}),
        (f"{flow}/edges", edge),
        (f"{flow}/edges/apply", apply | {"upstream_execution_id": far}),
        (f"{flow}/edges/apply", apply | {"downstream_execution_id": far}),
        (f"/v1/executions/{far}/cancel", {"execution_id": far, "reason": "x"}),
    ):
        answer = await http.post(path, body)
        assert answer.kind == (400, "invalid_input"), (path, answer.body)
    signal = filled(SIGNAL, await subjects.make("unknown"))
    answer = await http.post(f"/v1/executions/{far}/signal", signal | {"execution_id": far})
    assert answer.kind == (400, "invalid_input")
    for end in ("upstream_execution_id", "downstream_execution_id"):
        answer = await http.get(f"{flow}/edges?{end}={far}")
        assert answer.json["error"].startswith(f"invalid_input: {end}: partition 300")


# --- bytes ----------------------------------------------------------------------------------

BOTH = [
    ("POST /v1/executions", "input_payload"),
    ("POST /v1/executions/{id}/signal", "payload"),
    ("POST /v1/executions/{id}/waitpoints/{waitpoint_id}/approve", "payload"),
    ("POST /v1/callbacks/executions/{id}/waitpoints/{waitpoint_id}", "payload"),
]


@pytest.mark.parametrize("numbers", [[], [1]])
async def test_bytes_are_given_in_one_form(subjects: Subjects, numbers: list[int]) -> None:
    def detail(field: str) -> str:
        return f"{field}_b64: cannot be combined with {field}: send only one of them"

    for name, field in BOTH:
        both = {field: numbers, f"{field}_b64": "YQ=="}
        answer, _ = await call(subjects, name, adding(both))
        assert answer.kind == (400, "invalid_input"), name
        assert answer.json["detail"] == detail(field), name
    node = {"key": "n", "execution_kind": "x", "input_payload": numbers, "input_payload_b64": ""}
    graph = {"flow_kind": "x", "namespace": "default", "nodes": [node]}
    answer = await subjects.http.post("/v1/flows/submit", graph)
    assert (answer.status, answer.json["detail"]) == (400, detail("nodes[0].input_payload"))


# --- which problem decides ------------------------------------------------------------------

ORDER: list[tuple[str, tuple[int, str], str]] = [
    # Document order decides between what does not decode and unknown or refused nested fields.
    ('{"policy":{"nope":1},"namespace":5}', (400, "invalid_policy_json"), "policy.nope: unknown"),
    ('{"namespace":5,"policy":{"nope":1}}', (422, "invalid_input"), "namespace: expected str"),
    ('{"depends_on":[{"zz":1}]}', (400, "invalid_input"), "depends_on[0].zz: unknown field"),
    ('{"depends_on":[{"kind":1,"zz":1}]}', (422, "invalid_input"), "depends_on[0].kind: expected"),
    # A missing field counts at the end of its object.
    (
        '{"depends_on":[{}],"namespace":5}',
        (422, "invalid_input"),
        "depends_on[0].upstream: missing",
    ),
    ('{"priority":"x"}', (422, "invalid_input"), "priority: expected int"),
    # Values are looked at when all of it has decoded.
    (
        '{"namespace":"","execution_kind":"x","partition_id":-1}',
        (422, "invalid_input"),
        "partition_id: expected int >= 0",
    ),
]


@pytest.mark.parametrize(("text", "kind", "detail"), ORDER, ids=[each[0] for each in ORDER])
async def test_the_first_problem_of_a_body_decides(
    http: Http, text: str, kind: tuple[int, str], detail: str
) -> None:
    answer = await http.post("/v1/executions", text.encode(), content_type="application/json")
    assert answer.kind == kind
    assert answer.json["detail"].startswith(detail)


async def test_the_body_comes_before_the_path_and_the_path_before_rules(http: Http) -> None:
    policy = {"nodes": [{"key": "n", "execution_kind": "x", "policy": {"nope": 1}}]}
    refused = await http.post("/v1/flows/x/extend", policy)
    assert refused.kind == (400, "invalid_policy_json")
    empty = await http.post("/v1/flows/x/extend", {})
    assert empty.json["error"] == "invalid flow_id: InvalidUuid: 'x'"


HUGE = [
    ({"priority": "1e999"}, 422, "policy.priority: must be a whole number"),
    ({"priority": "1" + "0" * 400}, 422, "policy.priority: must be from -2147483648 to 2147483647"),
    ({"retry_policy": '{"max_retries":1e999}'}, 422, "policy.retry_policy.max_retries: must be a"),
]


@pytest.mark.parametrize(("policy", "status", "detail"), HUGE, ids=["float", "int", "nested"])
async def test_a_huge_number_in_a_policy_is_named(
    http: Http, policy: dict[str, str], status: int, detail: str
) -> None:
    ((field, text),) = policy.items()
    inside = f'"policy":{{"{field}":{text}}}'
    body = msgspec.json.encode(LEAST)[:-1] + f",{inside}}}".encode()
    answer = await http.post("/v1/executions", body, content_type="application/json")
    assert answer.kind == (status, "invalid_policy_json")
    assert answer.json["detail"].startswith(detail)
    graph = (
        f'{{"flow_kind":"x","namespace":"d","nodes":[{{"key":"n","execution_kind":"x",{inside}}}]}}'
    )
    answer = await http.post("/v1/flows/submit", graph.encode(), content_type="application/json")
    assert answer.kind == (status, "invalid_policy_json")
    assert answer.json["detail"].startswith(f"nodes[0].{detail}")
