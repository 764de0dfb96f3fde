from __future__ import annotations

import pickle
import ssl

import pytest

from flowfabric.valkey.faults import RedirectError, from_connect, from_reply, lost, timed_out


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        ("NOAUTH Authentication required.", "auth"),
        ("WRONGPASS invalid username-password pair or user is disabled.", "auth"),
        ("NOPERM User x has no permissions to run the 'get' command", "auth"),
        ("LOADING Valkey is loading the dataset in memory", "busy_loading"),
        ("OOM command not allowed when used memory > 'maxmemory'.", "out_of_memory"),
        ("READONLY You can't write against a read only replica.", "read_only"),
        ("BUSY Valkey is busy running a script.", "busy_script"),
        ("MASTERDOWN Link with MASTER is down", "cluster"),
        ("ERR Attempted to access a non local key in a cluster node script: on @x:1.", "cluster"),
        ("ERR Script attempted to access a non local key in a cluster node", "cluster"),
        ("ERR Can not execute a command 'GET' while the cluster is down", "cluster"),
        ("ERR ACL failure in script: No permissions to access a channel script: on @x:1.", "auth"),
        ("UNBLOCKED force unblock from blocking operation, instance state changed", "read_only"),
        ("MISCONF Valkey is configured to save RDB snapshots", "cannot_persist"),
        ("NOREPLICAS Not enough good replicas to write.", "no_replicas"),
        ("CLUSTERDOWN The cluster is down", "cluster"),
        ("TRYAGAIN Multiple keys request during rehashing of slot", "cluster"),
        ("MOVED 3999 127.0.0.1:6381", "cluster"),
        ("ASK 3999 127.0.0.1:6381", "cluster"),
        ("ERR Function not found", "script_not_loaded"),
        ("NOSCRIPT No matching function", "script_not_loaded"),
        ("CROSSSLOT Keys in request don't hash to the same slot", "protocol"),
        ("NOPROTO unsupported protocol version", "protocol"),
        ("ERR Protocol error: invalid bulk length", "protocol"),
        ("ERR unknown command 'HELLO'", "protocol"),
        ("ERR max number of clients reached", "transport"),
        ("ERR syntax error", "other"),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", "other"),
        ("", "other"),
    ],
)
def test_error_replies(reply: str, kind: str) -> None:
    error = from_reply(reply)
    assert error.kind == kind
    assert not error.ambiguous
    assert reply in error.message


@pytest.mark.parametrize(
    ("reply", "asking", "slot", "host", "port"),
    [
        ("MOVED 3999 127.0.0.1:6381", False, 3999, "127.0.0.1", 6381),
        ("ASK 1 host.example:7000", True, 1, "host.example", 7000),
        ("MOVED 0 :6381", False, 0, "", 6381),
        ("MOVED 5 2001:db8::1:6381", False, 5, "2001:db8::1", 6381),
    ],
)
def test_redirects(reply: str, asking: bool, slot: int, host: str, port: int) -> None:
    error = from_reply(reply)
    assert isinstance(error, RedirectError)
    assert (error.asking, error.slot, error.host, error.port) == (asking, slot, host, port)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.slot, copy.port) == (slot, port)


def test_a_greeting_without_a_password_is_answered_for_people() -> None:
    raw = "NOAUTH HELLO must be called with the client already authenticated, otherwise the …"
    error = from_reply(raw)
    assert error.kind == "auth"
    assert error.message.startswith("NOAUTH Authentication required. (set FF_PASSWORD")


def test_connection_failures() -> None:
    assert from_connect(ConnectionRefusedError(111, "Connection refused"), "h:1").safe_to_repeat
    assert "did not answer" in from_connect(TimeoutError(), "h:1").message
    for error in (TimeoutError(), ssl.SSLError(1, "wrong version"), ConnectionResetError(104, "x")):
        assert "its TLS port" in from_connect(error, "h:1", tls=True).message
        assert "TLS?" not in from_connect(error, "h:1").message
    assert "TLS" not in from_connect(ConnectionRefusedError(111, "x"), "h:1", tls=True).message
    untrusted = from_connect(ssl.SSLCertVerificationError(1, "bad"), "h:1")
    assert untrusted.kind == "auth"
    assert not untrusted.retryable
    assert lost("h:1", "gone", sent=True).ambiguous
    assert lost("h:1", "gone", sent=False).safe_to_repeat
    assert timed_out("h:1", sent=True).ambiguous
    assert timed_out("h:1", sent=False).safe_to_repeat
