from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.errors import ConfigError
from flowfabric.valkey.address import Address, _warn_ignored, from_env, from_url, parse_url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("valkey://db:6380", Address(host="db", port=6380)),
        ("valkey://db", Address(host="db", port=6379)),
        ("valkey://db:6380/3", Address(host="db", port=6380, db=3)),
        ("valkey://u:p%40ss@db", Address(host="db", username="u", password="p@ss")),
        ("valkey://:secret@db", Address(host="db", password="secret")),
        ("valkey://[::1]:7000", Address(host="::1", port=7000)),
        ("valkeys://db", Address(host="db", tls=True)),
        ("unix:///run/v.sock", Address(socket_path="/run/v.sock")),
        ("unix://rel/v.sock", Address(socket_path="rel/v.sock")),
        ("unix:///run/v.sock?db=2", Address(socket_path="/run/v.sock", db=2)),
        (
            "unix://u:p@/run/v.sock",
            Address(socket_path="/run/v.sock", username="u", password="p"),
        ),
        (
            "valkey+cluster://a:7001,b:7002,c",
            Address(host="a", port=7001, seeds=(("a", 7001), ("b", 7002), ("c", 6379))),
        ),
        (
            "valkeys+cluster://u:p@a",
            Address(
                host="a",
                tls=True,
                username="u",
                password="p",
                seeds=(("a", 6379),),
            ),
        ),
    ],
)
def test_url_forms(url: str, expected: Address) -> None:
    assert parse_url(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "redis://db",
        "db:6379",
        "",
        "valkey://",
        "valkey://db:0",
        "valkey://db:70000",
        "valkey://db:x",
        "valkey://db/x",
        "valkey://db/-1",
        "valkey://user@db",
        "valkey://a:1,b:2",
        "valkey+cluster://a/1",
        "valkey://db?db=1",
        "valkey://db#x",
        "unix://",
        "unix:///run/v.sock?timeout=1",
    ],
)
def test_bad_urls_name_the_variable(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(url)
    assert caught.value.message.startswith("invalid value for FF_URL: ")


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("redis://db:6380", "redis:// is not supported; write valkey://"),
        ("rediss://u:hunter2@db", "rediss:// is not supported; write valkeys://"),
        ("127.0.0.1:6379", "write valkey://127.0.0.1:6379 "),
        ("localhost", "write valkey://localhost "),
        ("[::1]:6379", "write valkey://[::1]:6379 "),
        ("u:hunter2@db", "unknown form; use valkey://"),
        ("http://db", "this is the address of a FlowFabric server"),
    ],
)
def test_other_forms_lead_to_the_right_one(url: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(url)
    assert caught.value.message.startswith(f"invalid value for FF_URL: {advice}")
    assert "hunter2" not in caught.value.message


@pytest.mark.parametrize(
    "url",
    [
        "valkey://user:hunter2@db:notaport",
        "valkey://user:hunter2",
        "valkey://:hunter2",
        "valkey://user:a/hunter2@db:1",
        "valkey://user:1/hunter2@db:1",
        "valkey://user:a?hunter2@db:1",
        "valkey://user:a#hunter2@db:1",
        "valkey://user:a[hunter2@db:1",
        "valkey://user:a]hunter2@db:1",
        "valkey://user:hunter2\u2100@db:1",
        "valkey://user:hunter2 @db:x",
        "valkey+cluster://user:hunter2@a:1,b:x",
        "valkey:user:hunter2@db",
        "user:hunter2@db",
        "unix://user:a/hunter2@/run/v.sock",
        "unix://user:a?hunter2@/run/v.sock",
        "unix:///run/v.sock?db=hunter2",
        "https://user:hunter2@db",
    ],
)
def test_a_bad_url_never_shows_the_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(url)
    assert "hunter2" not in str(caught.value)
    assert "invalid value for FF_URL: " in str(caught.value)


def test_the_password_is_not_in_the_repr() -> None:
    address = parse_url("valkey://user:hunter2@db:1")
    assert "hunter2" not in repr(address)
    assert "***" in repr(address)
    assert "password=None" in repr(parse_url("valkey://db"))


def test_environment_without_address_means_embedded() -> None:
    assert from_env({}) is None
    assert from_env({"FF_PORT": "7000", "FF_URL": " ", "FF_HOST": ""}) is None


def test_environment_variables() -> None:
    environ = {
        "FF_HOST": "db",
        "FF_PORT": "7000",
        "FF_TLS": "TRUE",
        "FF_USERNAME": "u",
        "FF_PASSWORD": "p",
        "FF_TLS_CA": "/ca.pem",
        "FF_DB": "4",
    }
    assert from_env(environ) == Address(
        host="db", port=7000, tls=True, username="u", password="p", tls_ca="/ca.pem", db=4
    )
    cluster = from_env({"FF_HOST": "db", "FF_CLUSTER": "1"})
    assert cluster == Address(host="db", seeds=(("db", 6379),))
    assert from_env({"FF_HOST": "db", "FF_TLS": "yes"}) == Address(host="db", tls=True)
    assert from_env({"FF_HOST": "db", "FF_TLS": "off"}) == Address(host="db")


def test_the_url_wins_and_the_variables_fill_in() -> None:
    environ = {"FF_URL": "valkey://a:1", "FF_HOST": "b", "FF_PASSWORD": "p", "FF_DB": "2"}
    assert from_env(environ) == Address(host="a", port=1, password="p", db=2)
    environ = {"FF_URL": "valkey://u:q@a:1/7", "FF_USERNAME": "x", "FF_PASSWORD": "p", "FF_DB": "2"}
    assert from_env(environ) == Address(host="a", port=1, username="u", password="q", db=7)


@pytest.mark.parametrize(
    ("environ", "variable"),
    [
        ({"FF_PORT": "x"}, "FF_PORT"),
        ({"FF_PORT": "0"}, "FF_PORT"),
        ({"FF_PORT": "65536"}, "FF_PORT"),
        ({"FF_PORT": "12ab"}, "FF_PORT"),
        ({"FF_DB": "-1"}, "FF_DB"),
        ({"FF_DB": "1", "FF_CLUSTER": "1"}, "FF_DB"),
        ({"FF_TLS": "ture"}, "FF_TLS"),
        ({"FF_CLUSTER": "2"}, "FF_CLUSTER"),
        ({"FF_USERNAME": "u"}, "FF_USERNAME"),
        ({"FF_URL": "http://x"}, "FF_URL"),
        ({"FF_URL": "valkey://db", "FF_DB": "x"}, "FF_DB"),
    ],
)
def test_bad_variables(environ: dict[str, str], variable: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_env({"FF_HOST": "db", **environ})
    assert caught.value.message.startswith(f"invalid value for {variable}: ")


@pytest.mark.parametrize(
    ("variable", "value"),
    [("FF_PORT", "x"), ("FF_DB", "-1"), ("FF_TLS", "ture"), ("FF_CLUSTER", "maybe")],
)
def test_bad_variables_are_refused_where_they_are_not_used(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"invalid value for {variable}: "):
        from_env({variable: value})


def test_a_node_keeps_credentials_and_drops_the_seeds() -> None:
    node = parse_url("valkeys+cluster://u:p@a:1,b:2").node("c", 3)
    assert node == Address(host="c", port=3, username="u", password="p", tls=True)
    assert node.peer == "c:3"
    assert parse_url("valkey://[::1]:5").peer == "[::1]:5"
    assert parse_url("unix:///x.sock").peer == "unix:/x.sock"


def test_with_a_url_the_variables_of_the_address_are_ignored_and_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _warn_ignored.cache_clear()
    environ = {
        "FF_URL": "valkey://u:hunter2@db:1",
        "FF_HOST": "other",
        "FF_PORT": "x",
        "FF_TLS": "1",
        "FF_CLUSTER": "maybe",
    }
    expected = Address(host="db", port=1, username="u", password="hunter2")
    assert from_env(environ) == from_env(environ) == expected
    told = "FF_URL sets the address, so these have no effect: FF_HOST, FF_PORT, FF_TLS, FF_CLUSTER"
    assert caplog.messages == [f"{told}. TLS is used only with valkeys://"]
    caplog.clear()
    assert from_env({"FF_URL": "valkey://db", "FF_HOST": "", "FF_TLS": " "}) == Address(host="db")
    assert from_env({"FF_HOST": "db", "FF_TLS": "0"}) == Address(host="db")
    assert from_url("valkey://db", {"FF_HOST": "other"}) == Address(host="db")
    assert caplog.messages == []
    assert from_url("valkey://db", {"FF_TLS": "1"}) == Address(host="db")
    assert caplog.messages == [
        "url sets the address, so these have no effect: FF_TLS. TLS is used only with valkeys://"
    ]


def test_a_url_in_code_is_completed_from_the_environment() -> None:
    environ = {
        "FF_USERNAME": "u",
        "FF_PASSWORD": "p",
        "FF_TLS_CA": "ca.pem",
        "FF_TLS_CERT": "me.pem",
        "FF_TLS_KEY": "me.key",
        "FF_URL": "valkey://another",
        "FF_HOST": "another",
    }
    files: dict[str, Any] = {"tls_ca": "ca.pem", "tls_cert": "me.pem", "tls_key": "me.key"}
    expected = Address(host="db", tls=True, username="u", password="p", **files)
    assert from_url("valkeys://db", environ) == expected
    own = from_url("valkeys://v:q@db", environ)
    assert (own.username, own.password) == ("v", "q")
    assert from_env(environ) == Address(host="another", username="u", password="p", **files)


def test_a_key_without_its_certificate_is_refused() -> None:
    with pytest.raises(ConfigError, match="FF_TLS_KEY"):
        from_url("valkeys://db", {"FF_TLS_KEY": "me.key"})
