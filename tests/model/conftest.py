"""Assertions of the helper modules are explained like those of tests."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    *("tests.model.lives", "tests.model.model", "tests.model.observe"),
    *("tests.model.flow_lives", "tests.model.flow_audit"),
)
