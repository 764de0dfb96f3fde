"""Bodies of answers with words in place of ids and times, so that tests compare them whole."""

from __future__ import annotations

import re
from typing import Any

from tests.support.http import Response

UUID = "11111111-2222-4333-8444-555555555555"
EXECUTION = f"{{fp:7}}:{UUID}"
LEAST = {"namespace": "default", "execution_kind": "resize"}
BUDGET: dict[str, Any] = {
    "budget_id": UUID,
    "scope_type": "lane",
    "scope_id": "default",
    "enforcement_mode": "strict",
    "on_hard_limit": "fail",
    "on_soft_limit": "warn",
    "reset_interval_ms": 0,
    "dimensions": ["tokens"],
    "hard_limits": [10],
    "soft_limits": [5],
}
_uuid = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}").fullmatch
_id = re.compile(r"\{fp:\d+\}:[0-9a-f-]{36}").fullmatch
_ms = re.compile(r"1[5-9]\d{11}").fullmatch


def shape(value: Any) -> Any:
    """A body with words in place of ids and times."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list):
        return [shape(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, int) and _ms(str(value)):
        return "<ms>"
    if not isinstance(value, str):
        return value
    if _uuid(value):
        return "<uuid>"
    return "<execution>" if _id(value) else "<ms text>" if _ms(value) else value


def expect(answer: Response, status: int, body: Any) -> Any:
    """The body of the answer, which must have this status and shape."""
    assert (answer.status, shape(answer.json)) == (status, body)
    assert answer.headers["content-type"] == "application/json"
    return answer.json


SUMMARY = {
    "execution_id": "<execution>",
    "namespace": "default",
    "lane_id": "default",
    "execution_kind": "resize",
    "public_state": "waiting",
    "priority": 0,
    "created_at": "<ms text>",
    "total_attempt_count": 0,
    "completed_at": None,
    "progress_pct": None,
    "worker_instance_id": None,
}
