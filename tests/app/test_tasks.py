"""What `@app.task` takes, and how calls are fitted to a signature."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.app.tasks import SUBMIT_OPTIONS

URL = "valkey://127.0.0.1:1"


@pytest.fixture
def app() -> ff.Fabric:
    """Never connected."""
    return ff.Fabric(URL)


def test_the_options_of_submit_are_known() -> None:
    for face in (ff.Fabric, ff.SyncFabric):
        parameters = inspect.signature(face.submit).parameters.values()
        named = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
        assert named == SUBMIT_OPTIONS


def function_with(parameters: str) -> Any:
    """A function with these parameters."""
    space: dict[str, Any] = {}
    exec(f"def ship({parameters}): ...", space)
    return space["ship"]


@pytest.mark.parametrize("option", sorted(SUBMIT_OPTIONS))
def test_a_parameter_that_submit_would_take_for_itself_is_refused(
    app: ff.Fabric, option: str
) -> None:
    for parameters in (f"order, {option}", f"order, *, {option}=1"):
        with pytest.raises(ff.ConfigError, match="rename the parameter") as caught:
            app.task()(function_with(parameters))
        assert (caught.value.field, app.tasks) == (option, {})
    # By position only, there is no doubt whose it is.
    app.task()(function_with(f"{option}, /, order"))


def test_a_number_of_retries_is_a_retry_policy(app: ff.Fabric) -> None:
    short = app.task("short", retry=3)(function_with(""))
    long = app.task("long", retry=ff.Retry(3))(function_with(""))
    assert short.policy is not None
    assert short.policy == long.policy


@pytest.mark.parametrize("retry", [True, "3", 1.5])
def test_other_retries_are_refused(app: ff.Fabric, retry: Any) -> None:
    with pytest.raises(ff.ConfigError, match=r"task\.retry: must be a Retry or a number"):
        app.task(retry=retry)(function_with(""))
