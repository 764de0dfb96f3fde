"""Error replies and socket failures as typed errors that say what to do next."""

import os
import ssl
from typing import Final

from flowfabric.core.errors import TransportError

# First word of an error reply → kind, and advice where it is more exact than the kind's own hint.
_WORDS: Final[dict[str, tuple[str, str]]] = {
    "NOAUTH": (
        "auth",
        "set FF_PASSWORD, and FF_USERNAME for an ACL user, or write valkey://user:password@…",
    ),
    "WRONGPASS": ("auth", "the user name or password is wrong, or the ACL user is disabled"),
    "NOPERM": ("auth", "grant it to the ACL user of this connection"),
    "LOADING": ("busy_loading", ""),
    "OOM": ("out_of_memory", ""),
    "READONLY": ("read_only", ""),
    "MASTERDOWN": ("cluster", "the replica lost its primary"),
    "UNBLOCKED": ("read_only", "the server became a replica"),
    "BUSY": ("busy_script", "FUNCTION KILL stops a function that has not written yet"),
    "CLUSTERDOWN": ("cluster", "not every slot is served; see CLUSTER INFO"),
    "TRYAGAIN": ("cluster", "the slot is being moved"),
    "CROSSSLOT": ("protocol", "the keys of one call must share one hash tag"),
    "NOPROTO": ("protocol", "use Valkey 8.0 or newer"),
    "MISCONF": ("cannot_persist", ""),
    "NOREPLICAS": ("no_replicas", ""),
}
_NO_TLS: Final = "check that this is its TLS port; without TLS, write valkey:// or FF_TLS=0"
_SINGLE: Final = "this is a single server: write valkey:// without +cluster, or FF_CLUSTER=0"
# The same for words within a reply, in lower case. In a function, the server leaves the first out.
_MARKS: Final[dict[str, tuple[str, str]]] = {
    "function not found": ("script_not_loaded", ""),
    "function not loaded": ("script_not_loaded", ""),
    "no matching function": ("script_not_loaded", ""),
    "err protocol error": ("protocol", ""),
    "err unknown command": ("protocol", ""),
    "cluster support disabled": ("other", _SINGLE),
    "err max number of clients": ("transport", "raise maxclients"),
    "acl failure in script": _WORDS["NOPERM"],
    "access a non local key": _WORDS["TRYAGAIN"],
    "while the cluster is down": _WORDS["CLUSTERDOWN"],
}


class RedirectError(TransportError):
    """A cluster node names another one: for all calls (`MOVED`) or for this one (`ASK`)."""

    def __init__(self, text: str) -> None:
        super().__init__("cluster", f"{text} (use valkey+cluster:// or FF_CLUSTER=1)")
        self.args = (text,)
        word, slot, endpoint = text.split()[:3]
        host, _, port = endpoint.rpartition(":")
        self.endpoint = endpoint
        self.asking = word == "ASK"
        self.slot = int(slot)
        # An empty host means the node that answered.
        self.host = host.strip("[]")
        self.port = int(port)


def from_reply(text: str) -> TransportError:
    """The typed error for one error reply, for example `NOAUTH Authentication required.`."""
    if text.startswith(("MOVED ", "ASK ")):
        return RedirectError(text)
    if text.startswith("NOAUTH HELLO"):
        # The server's own text is written for authors of clients.
        text = "NOAUTH Authentication required."
    lowered = text.lower()
    marked = (found for mark, found in _MARKS.items() if mark in lowered)
    kind, advice = next(marked, None) or _WORDS.get(text.partition(" ")[0], ("other", ""))
    return TransportError(kind, f"{text} ({advice})" if advice else text)


def from_connect(error: BaseException, peer: str, *, tls: bool = False) -> TransportError:
    """The typed error for a failed connect: nothing was sent, so it is never ambiguous."""
    if isinstance(error, ssl.SSLCertVerificationError):
        problem = getattr(error, "verify_message", "") or str(error)
        reason = f"the certificate of {peer} is not trusted: {problem}"
        return TransportError("auth", f"{reason} (set FF_TLS_CA to the right CA file)")
    # A port without TLS hangs up on a TLS handshake, or waits for more of it.
    no_tls = tls and isinstance(error, (ssl.SSLError, TimeoutError, ConnectionResetError))
    advice = f" ({_NO_TLS})" if no_tls else ""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if isinstance(error, TimeoutError):
        reason = "it did not answer in time"
    elif isinstance(error, ConnectionError) and error.errno:
        # The event loop replaces the system's message with the address.
        reason = os.strerror(error.errno)
    return TransportError("transport", f"no connection to {peer}: {reason}{advice}")


def lost(peer: str, reason: str, *, sent: bool, kind: str = "transport") -> TransportError:
    """The typed error for a lost connection; a call that was sent may have run."""
    fate = "" if sent else "; the call was not sent"
    return TransportError(kind, f"{peer}: {reason}{fate}", ambiguous=sent)


def timed_out(peer: str, *, sent: bool) -> TransportError:
    """The typed error for a call past its deadline; one that was sent may still run."""
    unsent = "the deadline passed before the call could be sent"
    fate = "no reply before the deadline" if sent else unsent
    return TransportError("timeout", f"{peer}: {fate}", ambiguous=sent)
