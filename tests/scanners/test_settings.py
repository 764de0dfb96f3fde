from __future__ import annotations

import pytest

from flowfabric.core.errors import ConfigError
from flowfabric.scanners import ScannerSettings
from flowfabric.scanners.settings import INTERVALS_S


def test_the_intervals_of_the_specification() -> None:
    settings = ScannerSettings.from_env({})
    assert {name: settings.interval(name) for name in INTERVALS_S} == {
        "lease_expiry": 1.5,
        "delayed_promoter": 0.75,
        "attempt_timeout": 2.0,
        "execution_deadline": 5.0,
        "suspension_timeout": 2.0,
        "pending_wp_expiry": 5.0,
        "doorbell": 2.0,
        "lane_rescore": 1.0,
        "cascade_drain": 1.0,
        "cancel_reconciler": 15.0,
        "dependency_reconciler": 15.0,
        "edge_cancel_dispatcher": 1.0,
        "edge_cancel_reconciler": 10.0,
        "flow_projector": 15.0,
        "index_reconciler": 45.0,
        "retention_trimmer": 60.0,
        "quota_reconciler": 30.0,
        "budget_reset": 15.0,
        "budget_reconciler": 30.0,
        "unblock": 5.0,
        "worker_sweeper": 30.0,
        "worker_drain": 5.0,
    }
    assert settings.filter.is_empty
    assert settings.events_retention_ms == 86_400_000


def test_every_variable() -> None:
    settings = ScannerSettings.from_env(
        {
            "FF_LEASE_EXPIRY_INTERVAL_MS": "250",
            "FF_RETENTION_TRIMMER_INTERVAL_S": "7",
            "FF_DELAYED_PROMOTER_INTERVAL_MS": "1",
            "FF_UNBLOCK_INTERVAL_S": "0",
            "FF_DOORBELL_INTERVAL_S": "",
            "FF_DOORBELL_INTERVAL_MS": "300",
            "FF_SCANNERS_DISABLED": " index_reconciler, doorbell ",
            "FF_SCANNER_NAMESPACE": "acme",
            "FF_SCANNER_INSTANCE_TAG": "cell=eu=1",
            "FF_EVENTS_RETENTION_MS": "1000",
        }
    )
    assert settings.interval("lease_expiry") == 0.25
    assert settings.interval("retention_trimmer") == 7
    assert settings.interval("delayed_promoter") == 0.1, "the least that is effective"
    assert settings.interval("unblock") == 0.1
    assert settings.interval("doorbell") == 0.3
    assert settings.disabled == {"index_reconciler", "doorbell"}
    assert settings.filter.namespace == "acme"
    assert settings.filter.instance_tag == ("cell", "eu=1")
    assert settings.events_retention_ms == 1000


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FF_LEASE_EXPIRY_INTERVAL_S", "soon"),
        ("FF_LEASE_EXPIRY_INTERVAL_S", "1.5"),
        ("FF_LEASE_EXPIRY_INTERVAL_S", str(2**64)),
        ("FF_LEASE_EXPIRY_INTERVAL_MS", "-1"),
        ("FF_SCANNERS_DISABLED", "lease_expiry,nonsense"),
        ("FF_SCANNER_NAMESPACE", "no spaces"),
        ("FF_SCANNER_INSTANCE_TAG", "cell"),
        ("FF_SCANNER_INSTANCE_TAG", "=eu"),
        ("FF_SCANNER_INSTANCE_TAG", "cell="),
        ("FF_EVENTS_RETENTION_MS", "0"),
        ("FF_EVENTS_RETENTION_MS", "1e3"),
    ],
)
def test_a_bad_value_is_named(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"invalid value for {variable}: "):
        ScannerSettings.from_env({variable: value})


def test_both_units_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"FF_LEASE_EXPIRY_INTERVAL_MS: .*_S is also set"):
        ScannerSettings.from_env(
            {"FF_LEASE_EXPIRY_INTERVAL_S": "1", "FF_LEASE_EXPIRY_INTERVAL_MS": "1000"}
        )
