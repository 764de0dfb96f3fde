"""Finds keys nobody owns: every test ends with this look at the whole keyspace."""

from __future__ import annotations

import re
from typing import Any

from flowfabric.engine.backend import Backend

_EXECUTION = re.compile(
    r"^ff:(?:exec|attempt|stream):(?P<tag>\{fp:\d+\}):(?P<id>\{fp:\d+\}:[0-9a-f-]{36}):(?P<part>.+)$"
)
_EXECUTION_PARTS = re.compile(
    r"^(core|payload|result|policy|tags|history|claim_grant|steps|deps:unresolved"
    r"|suspension:current(:satisfied_set(:signals)?)?|suspension:met|waitpoints(:pending)?|signals"
    r"|\d+(:summary|:meta|:closed)?)$"
)
_INDEX = re.compile(
    r"^ff:idx:\{fp:\d+\}:(all_executions|lease_expiry|attempt_timeout|execution_deadline"
    r"|purge_backlog|suspension_timeout|pending_waitpoint_expiry|worker:\S+:leases"
    r"|lane:[^:]+:(eligible(:.+)?|sigs|delayed|active|reclaimable(:.+)?|terminal|config|suspended"
    r"|blocked:\w+|claimed:.+))$"
)
_OTHER = re.compile(
    r"^(ff:config:partitions|ff:idx:(lanes|namespaces|partitions)|ff:lane:.+:config"
    r"|ff:sec:\{fp:\d+\}:waitpoint_hmac|ff:wp:.+|ff:signal:.+|ff:sigdedup:.+|ff:dedup:suspend:.+"
    r"|ff:part:\{fp:\d+\}:events|ff:wake:.+|ff:idem:.+"
    r"|ff:worker:\{.+\}:(events|.+:(alive|caps))|ff:idx:\{.+\}:workers|ff:leader:.+)$"
)
_MUST_EXPIRE = re.compile(r"(:claim_grant$|:claimed:|^ff:idem:|:alive$|:caps$|^ff:leader:)")


# Tags are the user's own: an empty one is a value.
_EMPTY_FIELDS = """
local found = {}
for _, key in ipairs(redis.call('KEYS', 'ff:*')) do
  if redis.call('TYPE', key).ok == 'hash' and not string.find(key, ':tags$') then
    local flat = redis.call('HGETALL', key)
    for i = 2, #flat, 2 do
      if flat[i] == '' then found[#found + 1] = 'empty field ' .. flat[i - 1] .. ': ' .. key end
    end
  end
end
return found
"""


async def find_leaks(backend: Backend) -> list[str]:
    """What is wrong with the keyspace, as sentences; empty when all is well."""
    call = backend.transport.call
    names: Any = await call("KEYS", "*")
    known = {name.decode() for name in names}
    problems: list[str] = []
    for name in sorted(known):
        owned = _EXECUTION.match(name)
        if owned:
            if not _EXECUTION_PARTS.match(owned["part"]):
                problems.append(f"unknown kind of execution key: {name}")
            if f"ff:exec:{owned['tag']}:{owned['id']}:core" not in known:
                problems.append(f"execution key without a record: {name}")
        elif not _INDEX.match(name) and not _OTHER.match(name):
            problems.append(f"unknown key: {name}")
        if _MUST_EXPIRE.search(name):
            ttl: Any = await call("PTTL", name)
            if ttl == -1:
                problems.append(f"temporary key without a time to live: {name}")
    empty: Any = await call("EVAL", _EMPTY_FIELDS, 0)
    problems += sorted(each.decode() for each in empty)
    return problems + await _drift(backend, known)


async def _drift(backend: Backend, known: set[str]) -> list[str]:
    problems: list[str] = []
    for name in sorted(known):
        match = re.match(r"^ff:idx:(\{fp:\d+\}):all_executions$", name)
        if not match:
            continue
        members: Any = await backend.transport.call("ZRANGE", name, 0, -1)
        ids = [member.decode() for member in members]
        verdicts = await backend.reconcile_execution_index(match[1], ids, "check")
        problems += [
            f"{execution_id}: {verdict}"
            for execution_id, verdict in zip(ids, verdicts, strict=True)
            if verdict != "consistent"
        ]
    return problems
