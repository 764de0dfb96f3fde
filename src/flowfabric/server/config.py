"""The settings of a server: from the environment, a file and flags, checked at start (10 §7)."""

import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self, cast

import msgspec

from flowfabric.core.environment import flag, invalid, whole_number
from flowfabric.core.errors import ConfigError
from flowfabric.core.text import host_port
from flowfabric.engine.api.secrets import DEFAULT_GRACE_MS, GRACE_VARIABLE, SECRET_VARIABLE
from flowfabric.engine.connect import check_backend
from flowfabric.engine.http.address import TOKEN_VARIABLE, configured_token
from flowfabric.engine.layers import tracing
from flowfabric.scanners.settings import INTERVALS_S, ScannerSettings
from flowfabric.server.cors import parse_origins
from flowfabric.server.error_reports import DEFAULTS as SENTRY_DEFAULTS
from flowfabric.server.error_reports import DSN, check_error_reports

DEFAULT_PORT = 9090
FILE_VARIABLE = "FF_CONFIG_FILE"
_ALIKE = 0.85
"""How similar a name must be to be taken for a misspelled setting."""
_U32 = 2**32 - 1
_U64 = 2**64 - 1
Source = Literal["default", "file", "environment", "flag"]

# Name, default as it is shown, and whether the value is a secret.
_SETTINGS: tuple[tuple[str, str, bool], ...] = (
    (FILE_VARIABLE, "", False),
    ("FF_URL", "", False),
    ("FF_HOST", "", False),
    ("FF_PORT", "6379", False),
    ("FF_DB", "0", False),
    ("FF_USERNAME", "", False),
    ("FF_PASSWORD", "", True),
    ("FF_TLS", "0", False),
    ("FF_TLS_CA", "", False),
    ("FF_TLS_CERT", "", False),
    ("FF_TLS_KEY", "", False),
    ("FF_CLUSTER", "0", False),
    ("FF_DATA_DIR", ".flowfabric", False),
    ("FF_VALKEY_BINARY", "", False),
    ("FF_FLOW_PARTITIONS", "256", False),
    ("FF_BUDGET_PARTITIONS", "32", False),
    ("FF_QUOTA_PARTITIONS", "32", False),
    ("FF_LANES", "default", False),
    ("FF_MAX_PAYLOAD_BYTES", "1048576", False),
    (SECRET_VARIABLE, "", True),
    (GRACE_VARIABLE, str(DEFAULT_GRACE_MS), False),
    ("FF_LISTEN_ADDR", "", False),
    ("FF_ALLOW_INSECURE", "0", False),
    (TOKEN_VARIABLE, "", True),
    ("FF_API_TOKENS_FILE", "", False),
    ("FF_METRICS_AUTH", "0", False),
    ("FF_CORS_ORIGINS", "*", False),
    ("FF_MAX_CONCURRENT_STREAM_OPS", "64", False),
    ("FF_MAX_CONCURRENT_TAIL", "", False),
    ("FF_MAX_EVENT_STREAMS", "256", False),
    ("FF_MAX_CONCURRENT_REQUESTS", "1024", False),
    ("FF_MAX_REMOTE_CLAIMS", "4096", False),
    ("FF_BODY_LIMIT_LARGE", "1048576", False),
    ("FF_BODY_LIMIT_MEDIUM", "262144", False),
    ("FF_BODY_LIMIT_CONTROL", "65536", False),
    ("FF_BODY_LIMIT_BULK", "8388608", False),
    ("FF_SHUTDOWN_TIMEOUT_S", "30", False),
    ("FF_EVENTS_MAXLEN", "10000", False),
    ("FF_EVENTS_RETENTION_MS", "86400000", False),
    ("FF_CASCADE_INLINE_EDGES", "128", False),
    ("FF_SCANNERS_DISABLED", "", False),
    ("FF_SCANNER_NAMESPACE", "", False),
    ("FF_SCANNER_INSTANCE_TAG", "", False),
    ("FF_BACKEND", "valkey", False),
    # Settings of stores that this version lacks, so that one file can serve several versions.
    ("FF_POSTGRES_URL", "", True),
    ("FF_POSTGRES_POOL_SIZE", "10", False),
    ("FF_SQLITE_PATH", ":memory:", False),
    ("FF_SQLITE_POOL_SIZE", "4", False),
    ("FF_DEV_MODE", "0", False),
    ("FF_FORCE_LUA_RELOAD", "0", False),
    ("FF_LOG_LEVEL", "info", False),
    ("FF_LOG_FORMAT", "text", False),
    (tracing.VARIABLE, "0", False),
    *((name, default, name == DSN) for name, default in SENTRY_DEFAULTS.items()),
    *(
        (f"FF_{name.upper()}_INTERVAL_MS", f"{s * 1000:g}", False)
        for name, s in INTERVALS_S.items()
    ),
    *((f"FF_{name.upper()}_INTERVAL_S", "", False) for name in INTERVALS_S),
)
_OTHER_UNIT = {
    f"FF_{name.upper()}_INTERVAL_{unit}": f"FF_{name.upper()}_INTERVAL_{other}"
    for name in INTERVALS_S
    for unit, other in (("S", "MS"), ("MS", "S"))
}
"""Each interval with its name in the other unit; a later layer may use either name."""
_REDACTED = "<redacted>"
# As it is parsed: from the first colon to the last @ before the path.
_password = re.compile(r"(://[^:/]*:)[^/]*(@)")
NAMES = tuple(name for name, _, _ in _SETTINGS)


class BodyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The largest request bodies, in bytes, by kind of route."""

    large: int = 1_048_576
    medium: int = 262_144
    control: int = 65_536
    bulk: int = 8_388_608


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one server process.

    >>> ServerConfig.from_env({"FF_API_TOKEN": "s3cret"}).listen
    ('0.0.0.0', 9090)
    """

    listen: tuple[str, int] = ("127.0.0.1", DEFAULT_PORT)
    api_token: str | None = None
    tokens_file: Path | None = None
    metrics_auth: bool = False
    """Whether `/metrics` needs a token."""
    cors_origins: frozenset[str] | None = None
    """None means any origin."""
    limits: BodyLimits = BodyLimits()
    max_event_streams: int = 256
    max_requests: int = 1024
    max_remote_claims: int = 4096
    shutdown_timeout_s: int = 30
    hmac_grace_ms: int = DEFAULT_GRACE_MS
    has_hmac_secret: bool = False
    insecure: bool = False
    scanners: ScannerSettings = ScannerSettings()

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """The settings of the environment; a bad value is a `ConfigError` that names it."""
        env = os.environ if environ is None else environ
        check_backend(env)
        flag(env, tracing.VARIABLE)
        check_error_reports(env)
        tokens = env.get("FF_API_TOKENS_FILE") or None
        token = configured_token(env)
        limits = {
            name: whole_number(env, f"FF_BODY_LIMIT_{name.upper()}", default, 1, _U32)
            for name, default in msgspec.structs.asdict(BodyLimits()).items()
        }
        has_token = token is not None or tokens is not None
        insecure = flag(env, "FF_ALLOW_INSECURE")
        listen = _listen(env.get("FF_LISTEN_ADDR", "").strip(), has_token=has_token)
        if not has_token and not insecure and not is_loopback(listen[0]):
            raise invalid(
                "FF_LISTEN_ADDR",
                f"{listen[0]} is not a loopback address, and no token is configured. Set "
                "FF_API_TOKEN or FF_API_TOKENS_FILE, or FF_ALLOW_INSECURE=1 to allow all callers",
            )
        metrics_auth = flag(env, "FF_METRICS_AUTH")
        if metrics_auth and not has_token:
            raise invalid("FF_METRICS_AUTH", "needs FF_API_TOKEN or FF_API_TOKENS_FILE")
        return cls(
            listen=listen,
            api_token=token,
            tokens_file=None if tokens is None else Path(tokens),
            metrics_auth=metrics_auth,
            cors_origins=parse_origins(env.get("FF_CORS_ORIGINS")),
            limits=BodyLimits(**limits),
            max_event_streams=whole_number(env, "FF_MAX_EVENT_STREAMS", 256, 1, _U32),
            max_requests=whole_number(env, "FF_MAX_CONCURRENT_REQUESTS", 1024, 1, _U32),
            max_remote_claims=whole_number(env, "FF_MAX_REMOTE_CLAIMS", 4096, 1, _U32),
            shutdown_timeout_s=whole_number(env, "FF_SHUTDOWN_TIMEOUT_S", 30, 0, 86_400),
            hmac_grace_ms=whole_number(env, GRACE_VARIABLE, DEFAULT_GRACE_MS, 0, _U64),
            has_hmac_secret=bool(env.get(SECRET_VARIABLE)),
            insecure=insecure,
            scanners=ScannerSettings.from_env(env),
        )


def _listen(text: str, *, has_token: bool) -> tuple[str, int]:
    if not text:
        return ("0.0.0.0" if has_token else "127.0.0.1", DEFAULT_PORT)  # noqa: S104
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port[:6]) > 65535:
        raise invalid("FF_LISTEN_ADDR", f"must be host:port, such as 127.0.0.1:9090, not {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class SettingValue(msgspec.Struct, frozen=True, kw_only=True):
    """One setting as `flowfabric config` prints it."""

    name: str
    value: str
    source: Source


def load_file(path: Path) -> dict[str, str]:
    """The settings of a TOML file, as they would appear in the environment."""
    try:
        found = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError("config", f"cannot read {path}: {reason or error}") from error
    return {name: _text(name, value) for name, value in found.items() if _known(name, str(path))}


def parse_assignments(given: Sequence[str]) -> dict[str, str]:
    """The settings of `--set NAME=VALUE` flags."""
    found = dict(each.split("=", 1) for each in given if "=" in each)
    if wrong := [each for each in given if "=" not in each]:
        raise ConfigError("config", f"--set {wrong[0]}: write NAME=VALUE")
    return {name: value for name, value in found.items() if _known(name, "--set")}


def _known(name: str, where: str) -> bool:
    if name == FILE_VARIABLE:
        raise ConfigError("config", f"{where}: {name} can only be set in the environment")
    if name in NAMES:
        return True
    [meant] = get_close_matches(name, NAMES, 1) or [""]
    advice = f"; did you mean {meant}?" if meant else ""
    raise ConfigError("config", f"{where}: there is no setting {name!r}{advice}")


def misspelled(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Variables that are not settings, each with the setting whose name resembles it."""
    others = {name for name in environ if name.startswith("FF_")} - set(NAMES)
    found = ((name, get_close_matches(name, NAMES, 1, _ALIKE)) for name in sorted(others))
    return [(name, meant[0]) for name, meant in found if meant]


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, list):
        parts = cast("list[Any]", value)
        if all(isinstance(part, str) for part in parts):
            return ",".join(parts)
    raise invalid(name, "must be a string, a number, true, false or a list of strings")


def layered(
    environ: Mapping[str, str], file: Mapping[str, str], flags: Mapping[str, str]
) -> dict[str, tuple[str, Source]]:
    """Each given setting with its source: a flag beats the environment, which beats the file."""
    found: dict[str, tuple[str, Source]] = {}
    layers: tuple[tuple[Source, Mapping[str, str]], ...] = (
        ("file", file),
        ("environment", {name: environ[name] for name in NAMES if name in environ}),
        ("flag", flags),
    )
    for source, given in layers:
        for name in given:
            if name in _OTHER_UNIT:
                found.pop(_OTHER_UNIT[name], None)
        found |= {name: (value, source) for name, value in given.items()}
    return found


def effective(given: Mapping[str, tuple[str, Source]], config: ServerConfig) -> list[SettingValue]:
    """Every setting with its value, secrets redacted."""
    values: list[SettingValue] = []
    for name, default, secret in _SETTINGS:
        value, source = given.get(name, (default, "default"))
        if source == "default" and _OTHER_UNIT.get(name) in given:
            value = ""
        if name == "FF_LISTEN_ADDR" and not value:
            # It depends on whether there is a token.
            value = host_port(*config.listen)
        if secret and value:
            value = _REDACTED
        elif name == "FF_URL":
            value = _password.sub(rf"\1{_REDACTED}\2", value)
        values.append(SettingValue(name=name, value=value, source=source))
    return values
