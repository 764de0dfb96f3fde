"""Which calls only read: they can be repeated after a lost reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

READ_FUNCTIONS: Final = frozenset(
    {
        "ff_idle_lanes",
        "ff_list_kids",
        "ff_list_suspended",
        "ff_read_waits",
        "ff_scan_due",
        "ff_stream_read",
        "ff_survey",
        "ff_version",
        "ff_waitpoint_token",
    }
)
"""Every function with the flag `no-writes`, and two reads that only record that they ran."""

_COMMANDS: Final = frozenset(
    {
        *("PING", "TIME", "INFO", "GET", "EXISTS", "PTTL"),
        *("HGET", "HMGET", "HGETALL", "HSCAN", "SMEMBERS", "SISMEMBER", "SCARD", "LRANGE"),
        *("ZRANGE", "ZMSCORE", "ZCARD"),
        *("XRANGE", "XREVRANGE", "XREAD", "XINFO"),
    }
)
_SUBCOMMANDS: Final = frozenset(
    {("ACL", "GETUSER"), ("CONFIG", "GET"), ("CLUSTER", "SLOTS"), ("FUNCTION", "LIST")}
)


def is_read(args: Sequence[object]) -> bool:
    """Whether a command changes nothing.

    >>> is_read(("HGETALL", "key")), is_read(("FCALL", "ff_create", 1, "{fp:0}"))
    (True, False)
    """
    if args[0] in _COMMANDS:
        return True
    if args[0] == "FCALL":
        return args[1] in READ_FUNCTIONS
    return tuple(args[:2]) in _SUBCOMMANDS
