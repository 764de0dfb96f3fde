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
