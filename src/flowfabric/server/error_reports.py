"""Reports of errors to Sentry, if a DSN is set and the program has the package for it."""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from urllib.parse import urlsplit

from flowfabric.core.environment import invalid
from flowfabric.core.errors import ConfigError
from flowfabric.core.version import __version__

DSN = "FF_SENTRY_DSN"
DEFAULTS = {
    DSN: "",
    "FF_SENTRY_ENVIRONMENT": "production",
    "FF_SENTRY_RELEASE": __version__,
}
_PACKAGE = "sentry_sdk"


def check_error_reports(environ: Mapping[str, str]) -> bool:
    """Whether errors should be reported; raises `ConfigError` if they cannot be."""
    dsn = environ.get(DSN, "").strip()
    if not dsn:
        return False
    try:
        parts = urlsplit(dsn)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.username or not parts.path.strip("/"):
        # Do not show the value, which is a credential.
        raise invalid(DSN, "must have the form https://key@host/project")
    if find_spec(_PACKAGE) is None:
        problem = f"{DSN} is set, but the package sentry-sdk is not installed"
        advice = f"Install it with `pip install sentry-sdk`, or unset {DSN}"
        raise ConfigError("environment", f"{problem}. {advice}")
    return True


def start_error_reports(environ: Mapping[str, str]) -> None:
    """Start reporting logged errors; without a DSN, do nothing."""
    if not check_error_reports(environ):
        return
    chosen = {name: environ.get(name, "").strip() or value for name, value in DEFAULTS.items()}
    # Imported only here: it is not a dependency.
    import_module(_PACKAGE).init(
        dsn=chosen[DSN],
        environment=chosen["FF_SENTRY_ENVIRONMENT"],
        release=chosen["FF_SENTRY_RELEASE"],
        # Variables and requests contain payloads, tokens and secrets.
        include_local_variables=False,
        max_request_body_size="never",
        send_default_pii=False,
    )
