"""The real command: boot, settings, shutdown, several servers on one deployment."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from flowfabric.cli.main import main
from flowfabric.core.state import PublicState
from flowfabric.server.config import ServerConfig, effective, layered
from tests.server.conftest import SECRET, running
from tests.support.command import Cli
from tests.support.engine import Engine
from tests.support.http import Http
from tests.support.sdk import until
from tests.support.server import free_port

LEAST = {"namespace": "default", "execution_kind": "resize"}


async def test_without_settings_it_runs_on_its_own_embedded_valkey(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    async with running(cli) as (server, http):
        assert (await http.get("/readyz")).json == {"status": "ready"}
        assert (await http.post("/v1/executions", LEAST)).status == 201
        text = "\n".join(server.seen)
        assert text.count("no API token") == 2
        server.send(signal.SIGTERM)
        assert (await server.end()).code == 0
    assert (tmp_path / ".flowfabric").is_dir()


async def test_an_external_valkey_needs_the_secret(cli: Cli) -> None:
    done = await cli("server", FF_WAITPOINT_HMAC_SECRET="")
    assert done.code == 1
    assert "FF_WAITPOINT_HMAC_SECRET is not set" in done.err


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"FF_LISTEN_ADDR": "0.0.0.0:0"}, "invalid value for FF_LISTEN_ADDR: 0.0.0.0 is not a"),
        ({"FF_LISTEN_ADDR": "nope"}, "invalid value for FF_LISTEN_ADDR: must be host:port"),
        ({"FF_API_TOKEN": "a\nb"}, "invalid value for FF_API_TOKEN: contains characters"),
        ({"FF_CORS_ORIGINS": " , "}, "invalid value for FF_CORS_ORIGINS"),
        ({"FF_BODY_LIMIT_LARGE": "1MB"}, "invalid value for FF_BODY_LIMIT_LARGE"),
        ({"FF_MAX_EVENT_STREAMS": "0"}, "invalid value for FF_MAX_EVENT_STREAMS"),
        ({"FF_LANES": "a,a"}, "invalid value for FF_LANES"),
        ({"FF_WAITPOINT_HMAC_SECRET": "zz"}, "invalid value for FF_WAITPOINT_HMAC_SECRET"),
        ({"FF_SCANNERS_DISABLED": "nope"}, "invalid value for FF_SCANNERS_DISABLED"),
        ({"FF_BACKEND": "oracle"}, "invalid value for FF_BACKEND"),
        ({"FF_TRACING": "maybe"}, "invalid value for FF_TRACING"),
        ({"FF_LOG_LEVEL": "loud"}, "invalid value for FF_LOG_LEVEL"),
        ({"FF_EVENTS_MAXLEN": "x"}, "invalid value for FF_EVENTS_MAXLEN"),
        ({"FF_CASCADE_INLINE_EDGES": "0"}, "invalid value for FF_CASCADE_INLINE_EDGES"),
        ({"FF_DEV_MODE": "ture"}, "invalid value for FF_DEV_MODE: write 1 or 0"),
        ({"FF_FORCE_LUA_RELOAD": "ture"}, "invalid value for FF_FORCE_LUA_RELOAD: write 1 or 0"),
        ({"FF_TLS_CA": "/nope"}, "invalid value for FF_TLS_CA: cannot read /nope: No such file"),
        ({"FF_HOST": "h"}, "FF_WAITPOINT_HMAC_SECRET is not set: a server on an external Valkey"),
        ({"FF_URL": "valkey://h"}, "FF_WAITPOINT_HMAC_SECRET is not set"),
        ({"FF_URL": "http://h"}, "FF_URL: this is the address of a FlowFabric server"),
        (
            {"FF_URL": "valkeys://h", "FF_WAITPOINT_HMAC_SECRET": SECRET, "FF_TLS_CA": __file__},
            "see FF_TLS_CA",
        ),
        ({"FF_SENTRY_DSN": "nope"}, "invalid value for FF_SENTRY_DSN: must have the form"),
        ({"FF_SENTRY_DSN": "https://k@h/1"}, "Install it with `pip install sentry-sdk`"),
    ],
)
def test_a_bad_setting_is_named(
    variables: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as done:
        main(["server", "--check-config"])
    assert done.value.code == 1
    assert message in capsys.readouterr().err


async def test_a_backend_that_this_version_lacks_exits_with_2(cli: Cli) -> None:
    for command in ("server", "config", "ps"):
        done = await cli(command, FF_BACKEND="Postgres")
        assert done.code == 2, command
        assert "no postgres backend" in done.err


async def test_check_config_connects_to_nothing(cli: Cli) -> None:
    done = await cli("server", "--check-config", FF_URL="valkey://127.0.0.1:1")
    assert (done.code, done.out) == (0, "The settings are valid.\n")


async def test_check_config_prints_json_and_warns_of_a_missing_tokens_file(
    cli: Cli, tmp_path: Path
) -> None:
    done = await cli("server", "--check-config", "--json")
    assert (done.code, done.objects) == (0, [{"valid": True, "warnings": []}])
    missing = {"FF_API_TOKENS_FILE": str(tmp_path / "tokens.toml")}
    done = await cli("server", "--check-config", "--json", **missing)
    (warning,) = done.objects[0]["warnings"]
    assert warning == (
        f"FF_API_TOKENS_FILE: {tmp_path}/tokens.toml does not exist, so no token of it is valid. "
        "Create one with: flowfabric tokens create"
    )
    done = await cli("server", "--check-config", **missing)
    assert done.out == f"warning: {warning}\nThe settings are valid.\n"
    async with running(cli, **missing) as (server, http):
        assert warning in "\n".join(server.seen)
        assert (await http.get("/v1/executions")).status == 401


async def test_settings_without_an_effect_are_warnings(cli: Cli) -> None:
    """They are noticed before the log is set up."""
    doubtful = {"FF_HOST": "other", "FF_CORS_ORIGINS": "https://a.example,https://\xe9.example"}
    said = (
        "FF_URL sets the address, so these have no effect: FF_HOST",
        "ignored origins in FF_CORS_ORIGINS that cannot be sent as headers",
    )
    done = await cli("server", "--check-config", "--json", **doubtful)
    (checked,) = done.objects
    assert sorted(checked["warnings"]) == sorted(said)
    async with running(cli, **doubtful) as (server, _):
        for line in said:
            assert "\n".join(server.seen).count(line) == 1, server.seen
    done = await cli("ps", **doubtful)
    assert (done.code, done.err) == (0, "")


async def test_a_misspelled_variable_is_a_warning(cli: Cli) -> None:
    variables = {"FF_LISTN_ADDR": "127.0.0.1:9", "FF_WAITPOINT_TOKEN": "k1:0", "FF_FOX": "1"}
    done = await cli("server", "--check-config", **variables)
    said = "FF_LISTN_ADDR is not a setting; did you mean FF_LISTEN_ADDR?"
    assert done.out == f"warning: {said}\nThe settings are valid.\n"


async def test_with_json_every_line_is_an_object(cli: Cli) -> None:
    async with cli.start("server", "--listen", "127.0.0.1:0", "--json") as server:
        ready = json.loads(await server.line('"action":"server_ready"'))
        assert ready["address"].startswith("http://127.0.0.1:")
        assert ready["tokens"] == "none: open to this machine"
        server.send(signal.SIGTERM)
        done = await server.end()
    assert all(json.loads(line)["level"] for line in done.out.splitlines())


async def test_without_http_only_the_scanners_run(cli: Cli, engine: Engine) -> None:
    port = free_port()
    variables = {"FF_LISTEN_ADDR": f"127.0.0.1:{port}", "FF_DELAYED_PROMOTER_INTERVAL_MS": "100"}
    delayed = await engine.create(delay_until=await engine.now() + 200)
    async with cli.start("server", "--no-http", **variables) as server:
        await server.line("none: only the scanners run")
        await server.line("Ready. Ctrl-C or SIGTERM stops it.")

        async def is_promoted() -> bool:
            state = await engine.backend.reads.read_execution_state(delayed)
            return state is PublicState.WAITING

        await until(is_promoted, "a scanner")
        with pytest.raises(OSError):
            await Http(("127.0.0.1", port)).get("/livez")
        server.send(signal.SIGTERM)
        done = await server.end()
    assert done.code == 0, done.out
    assert "no API token" not in done.out
    refused = await cli("server", "--no-http", "--listen", "127.0.0.1:0")
    assert (refused.code, "--no-http serves none" in refused.err) == (2, True)


async def test_a_port_in_use_is_said_and_exits_with_1(cli: Cli) -> None:
    async with running(cli) as (_, http):
        host, port = http.address
        done = await cli("server", "--listen", f"{host}:{port}")
        assert done.code == 1
        assert f"cannot listen on {host}:{port}" in done.err


async def test_settings_come_from_flags_then_the_environment_then_the_file(
    cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "ff.toml"
    file.write_text(
        'FF_LANES = ["a", "b"]\nFF_MAX_EVENT_STREAMS = 5\nFF_API_TOKEN = "s3cret"\n'
        "FF_SHUTDOWN_TIMEOUT_S = 7\n"
    )
    done = await cli(
        *("config", "--json", "--config", str(file), "--set", "FF_SHUTDOWN_TIMEOUT_S=9"),
        FF_MAX_EVENT_STREAMS="6",
    )
    assert done.code == 0, done.err
    found = {each["name"]: (each["value"], each["source"]) for each in done.objects}
    assert found["FF_LANES"] == ("a,b", "file")
    assert found["FF_MAX_EVENT_STREAMS"] == ("6", "environment")
    assert found["FF_SHUTDOWN_TIMEOUT_S"] == ("9", "flag")
    assert found["FF_API_TOKEN"] == ("<redacted>", "file")
    assert found["FF_URL"] == (cli.environment["FF_URL"], "environment")
    assert found["FF_LISTEN_ADDR"] == ("0.0.0.0:9090", "default")
    assert found["FF_TRACING"] == ("0", "default")
    assert found["FF_SENTRY_ENVIRONMENT"] == ("production", "default")
    assert found["FF_PORT"] == ("6379", "default")
    assert found["FF_CONFIG_FILE"] == (str(file), "flag")
    assert found["FF_POSTGRES_POOL_SIZE"] == ("10", "default")
    assert found["FF_SQLITE_PATH"] == (":memory:", "default")
    assert "s3cret" not in done.out


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("valkey://app:s3cret@h.example:6379/2", "valkey://app:<redacted>@h.example:6379/2"),
        ("valkey://app:s3:cret@h.example", "valkey://app:<redacted>@h.example"),
        ("valkey://app:s3@cret@h.example/0", "valkey://app:<redacted>@h.example/0"),
        ("valkey://a@pp:s3cret@h.example", "valkey://a@pp:<redacted>@h.example"),
        ("valkeys://:s3:@cret@h.example", "valkeys://:<redacted>@h.example"),
        ("valkey+cluster://app:s3cret@a:1,b:2", "valkey+cluster://app:<redacted>@a:1,b:2"),
        ("unix://app:s3cret@/run/valkey.sock", "unix://app:<redacted>@/run/valkey.sock"),
        ("valkey://[::1]:6379/0", "valkey://[::1]:6379/0"),
    ],
)
def test_config_shows_an_address_without_its_password(
    given: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FF_URL", given)
    monkeypatch.setenv("FF_WAITPOINT_HMAC_SECRET", SECRET)
    with pytest.raises(SystemExit) as done:
        main(["config", "--json"])
    out = capsys.readouterr().out
    assert done.value.code == 0
    found = {each["name"]: each["value"] for each in map(json.loads, out.splitlines())}
    assert found["FF_URL"] == shown
    assert not {"s3", "cret"} & set(re.split(r"\W", out))


def test_the_later_layer_wins_over_the_other_unit_of_an_interval() -> None:
    stem = "FF_LEASE_EXPIRY_INTERVAL"
    in_s, in_ms = {f"{stem}_S": "2"}, {f"{stem}_MS": "500"}
    assert layered(in_ms, in_s, {}) == {f"{stem}_MS": ("500", "environment")}
    assert layered(in_ms, {}, in_s) == {f"{stem}_S": ("2", "flag")}
    shown = {each.name: each.value for each in effective(layered({}, {}, in_s), ServerConfig())}
    assert (shown[f"{stem}_S"], shown[f"{stem}_MS"]) == ("2", "")
    assert shown["FF_DELAYED_PROMOTER_INTERVAL_MS"] == "750"
    assert layered(in_ms | in_s, {}, {}).keys() == {f"{stem}_S", f"{stem}_MS"}


def test_secrets_of_stores_to_come_are_redacted() -> None:
    given = layered({"FF_POSTGRES_URL": "postgres://u:s3cret@h/db"}, {}, {})
    shown = {each.name: each.value for each in effective(given, ServerConfig())}
    assert shown["FF_POSTGRES_URL"] == "<redacted>"


FAKE_SENTRY = """
import json, pathlib
def init(**options):
    pathlib.Path("reports.json").write_text(json.dumps(options))
"""


async def test_errors_are_reported_if_a_dsn_is_set(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "sentry_sdk.py").write_text(FAKE_SENTRY)
    found = os.pathsep.join((str(tmp_path), cli.environment.get("PYTHONPATH", "")))
    dsn = {"FF_SENTRY_DSN": "https://key@sentry.example/1", "PYTHONPATH": found}
    async with running(cli, FF_SENTRY_RELEASE="shop-7", **dsn) as (server, _):
        options = json.loads((tmp_path / "reports.json").read_text())
        server.send(signal.SIGTERM)
        await server.end()
    assert options["dsn"] == dsn["FF_SENTRY_DSN"]
    assert (options["environment"], options["release"]) == ("production", "shop-7")
    # Payloads and secrets stay here.
    assert options["include_local_variables"] is options["send_default_pii"] is False
    assert options["max_request_body_size"] == "never"
    shown = await cli("config", **dsn)
    assert "key@sentry" not in shown.out


@pytest.mark.parametrize(
    ("options", "variables", "said"),
    [
        (("--listen", "127.0.0.1:0"), {}, "none: open to this machine"),
        (
            ("--listen", "0.0.0.0:0"),
            {"FF_ALLOW_INSECURE": "1"},
            "none: open to everyone who can reach this address",
        ),
        (("--listen", "127.0.0.1:0"), {"FF_API_TOKEN": "s3cret"}, "required"),
    ],
)
async def test_the_banner_says_who_can_call(
    cli: Cli, options: tuple[str, ...], variables: dict[str, str], said: str
) -> None:
    async with cli.start("server", *options, **variables) as server:
        line = await server.line("tokens  ")
        assert line.split(maxsplit=1) == ["tokens", said]


async def test_an_ipv6_address_is_written_as_in_a_url(cli: Cli) -> None:
    async with cli.start("server", "--listen", "[::1]:0") as server:
        line = await server.line("  address  ")
        url = line.split()[1]
        assert url.startswith("http://[::1]:")
        port = int(url.rpartition(":")[2])
        assert (await Http(("::1", port)).get("/readyz")).status == 200
        server.send(signal.SIGTERM)
        # Logs have a thread of their own, so this line may come after the banner.
        assert f"HTTP API listening on [::1]:{port}" in (await server.end()).out
    shown = await cli("config", "--json", FF_LISTEN_ADDR="[::1]:9090")
    found = {each["name"]: each["value"] for each in shown.objects}
    assert found["FF_LISTEN_ADDR"] == "[::1]:9090"


async def test_a_misspelt_setting_is_refused_with_advice(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "ff.toml"
    file.write_text('FF_LANE = "a"\n')
    done = await cli("server", "--check-config", "--config", str(file))
    assert done.code == 1
    assert "there is no setting 'FF_LANE'; did you mean FF_LANES?" in done.err
    file.write_text('FF_CONFIG_FILE = "other.toml"\n')
    done = await cli("server", "--check-config", "--config", str(file))
    assert "FF_CONFIG_FILE can only be set in the environment" in done.err
