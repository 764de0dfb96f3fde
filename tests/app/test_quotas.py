"""`quota=`: the option of tasks and submissions that attaches a quota."""

from __future__ import annotations

from typing import Any

import pytest

import flowfabric as ff
from flowfabric.core.errors import ValidationError


def attached(task: ff.Task[..., Any]) -> str | None:
    policy = task.shared.policy
    return None if policy is None else policy.quota_policy_id


def test_the_quota_of_a_task_and_of_a_submission() -> None:
    app = ff.Fabric("unix:///nowhere")

    @app.task(quota="openai", retry=3)
    async def ask() -> None: ...

    @app.task
    async def free() -> None: ...

    assert attached(ask) == attached(ask.options(priority=5)) == ff.quota_id("openai")
    assert attached(ask.options(quota="maps")) == ff.quota_id("maps")
    assert attached(free) is None
    assert attached(free.options(quota="maps")) == ff.quota_id("maps")
    assert attached(app.named("elsewhere", quota="maps")) == ff.quota_id("maps")
    changed = ask.options(quota="maps").shared.policy
    assert changed is not None
    assert changed.retry_policy is not None


def test_names_belong_to_the_namespace() -> None:
    app = ff.Fabric("unix:///nowhere", namespace="tenant")

    @app.task(quota="openai")
    async def ask() -> None: ...

    assert attached(ask) == ff.quota_id("openai", "tenant") != ff.quota_id("openai")


@pytest.mark.parametrize("name", ["", 5, ["openai"]])
def test_names_are_checked(name: Any) -> None:
    app = ff.Fabric("unix:///nowhere")
    with pytest.raises(ValidationError, match="quota: must"):
        app.task(quota=name)
    with pytest.raises(ValidationError, match="quota: must"):
        app.named("ask", quota=name)
