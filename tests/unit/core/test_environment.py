"""One way to read each kind of setting."""

from __future__ import annotations

import pytest

from flowfabric.core.environment import flag, whole_number
from flowfabric.core.errors import ConfigError


@pytest.mark.parametrize("text", ["1", "true", "TRUE", " yes ", "on"])
def test_on(text: str) -> None:
    assert flag({"FF_TLS": text}, "FF_TLS")


@pytest.mark.parametrize("text", ["0", "false", "No", "off", "", " "])
def test_off(text: str) -> None:
    assert not flag({"FF_TLS": text}, "FF_TLS")
    assert not flag({}, "FF_TLS")


@pytest.mark.parametrize("text", ["ture", "2", "enabled", "-"])
def test_what_is_neither_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"invalid value for FF_TLS: write 1 or 0"):
        flag({"FF_TLS": text}, "FF_TLS")


@pytest.mark.parametrize("text", ["-1", "0", "1.5", "10", "1e1", "²", "9" * 5000])
def test_a_number_outside_its_limits(text: str) -> None:
    with pytest.raises(ConfigError, match=r"invalid value for FF_N: must be 1 to 9, not "):
        whole_number({"FF_N": text}, "FF_N", 3, 1, 9)


def test_numbers() -> None:
    assert whole_number({}, "FF_N", 3, 1) == 3
    assert whole_number({"FF_N": ""}, "FF_N", 3, 1) == 3
    assert whole_number({"FF_N": " 07 "}, "FF_N", 3, 1) == 7
    with pytest.raises(ConfigError, match=r"must be a whole number of at least 1, not 'x'"):
        whole_number({"FF_N": "x"}, "FF_N", 3, 1)
