"""Finds leaked keys: every test ends with this check of the whole keyspace."""

from __future__ import annotations

import re
from typing import Any

from flowfabric.engine.valkey.backend import ValkeyBackend

_ID = r"\{fp:\d+\}:[0-9a-f-]{36}"
_EXECUTION = re.compile(
    rf"^ff:(?:exec|attempt|stream|dedup:suspend):(?P<tag>\{{fp:\d+\}}):(?P<id>{_ID})(?P<part>:.+)?$"
)
_EXECUTION_PARTS = re.compile(
    r"^:(core|payload|result|policy|tags|history|claim_grant|steps"
    r"|suspension:current(:satisfied_set(:signals)?)?|suspension:met|waitpoints(:pending)?|signals"
    r"|\d+(:summary|:meta|:closed)?)$"
)
_FLOW = re.compile(
    r"^(?P<flow>ff:flow:\{fp:\d+\}:[0-9a-f-]{36}):"
    rf"(core|members|member_ids|tags|edges|held|exits|(in|out):(?P<id>{_ID}))$"
)
_WAITPOINT = re.compile(r"^(?P<record>ff:wp:\{fp:\d+\}:[0-9a-f-]{36})(:signals)?$")
_SIGNAL = re.compile(rf"^(?P<record>ff:signal:(?P<id>{_ID}):[0-9a-f-]{{36}})(:payload)?$")
_INDEX = re.compile(
    r"^ff:idx:\{fp:\d+\}:(all_executions|lease_expiry|attempt_timeout|execution_deadline"
    r"|purge_backlog|flow_index|flow_due|cascade_(backlog|failed|poison)|pending_cancel_groups"
    r"|release_backlog|reopen_backlog|replay_backlog|subflow_(outbox|parked)|returns|cancel_backlog|suspension_timeout|pending_waitpoint_expiry|worker:\S+:leases"
    r"|rescore|draining|lane:[^:]+:(eligible(:.+)?|sigs|delayed|active|reclaimable(:.+)?|terminal|config|placed|suspended"
    r"|blocked:\w+|claimed:.+))$"
)
_QUOTA = re.compile(
    r"^(?P<record>ff:quota:\{q:\d+\}:[0-9a-f-]{36})"
    r"(:window:requests_per_window|:guards|:admitted_set|:blocked)?$"
)
_OTHER = re.compile(
    r"^(ff:config:partitions|ff:idx:(lanes|namespaces|partitions|drains|bells|listeners|\{ff:idx:lanes\}:(places|placements))|ff:lane:.+:config"
    r"|ff:http:.+"
    r"|ff:sec:\{fp:\d+\}:waitpoint_hmac|ff:sigdedup:.+"
    r"|ff:budget:\{b:\d+\}:[0-9a-f-]{36}(:(limits|usage|reserved|holds|holders|hold_expiry|blocked"
    r"|by_exec:.+))?|ff:idx:\{b:\d+\}:budget_(policies|resets)|ff:(usagededup|settled):\{b:\d+\}:.+"
    r"|ff:idx:\{q:\d+\}:quota_policies|ff:part:\{(fp|b|q):\d+\}:(events|(sub|members|start):.+)|ff:wake:.+|ff:idem:.+"
    r"|ff:worker:\{.+\}:(events|.+:(alive|caps))|ff:idx:\{.+\}:(workers|drains)|ff:leader:.+)$"
)
_MUST_EXPIRE = re.compile(
    r"(:claim_grant$|:claimed:|^ff:idem:|^ff:sigdedup:|^ff:dedup:|^ff:usagededup:|^ff:settled:|:alive$|:caps$|^ff:leader:|^ff:http:)"
)
_HOLDS_EXECUTIONS = re.compile(
    r"^ff:idx:(?P<tag>\{fp:\d+\}):(all_executions|lease_expiry|attempt_timeout|execution_deadline"
    r"|suspension_timeout|(?P<set>worker:\S+:leases)"
    r"|lane:[^:]+:(eligible(:.+)?|delayed|active|reclaimable(:.+)?|terminal|suspended|blocked:\w+))$"
)


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


async def find_leaks(backend: ValkeyBackend) -> list[str]:
    """What is wrong with the keyspace, as sentences; empty when all is well."""
    call = backend.transport.call
    names: Any = await call("KEYS", "*")
    known = {name.decode() for name in names}
    problems: list[str] = []
    for name in sorted(known):
        if owned := _EXECUTION.match(name):
            problems += _unowned_of_execution(known, name, owned["part"], owned["id"])
        elif owned := _WAITPOINT.match(name):
            problems += await _unowned_waitpoint(backend, known, name, owned["record"])
        elif owned := _SIGNAL.match(name):
            if owned["record"] not in known or not _has_record(known, owned["id"]):
                problems.append(f"signal key without an owner: {name}")
        elif owned := _QUOTA.match(name):
            if owned["record"] not in known:
                problems.append(f"key of a quota policy without a record: {name}")
        elif owned := _FLOW.match(name):
            problems += _unowned_of_flow(known, name, owned["flow"], owned["id"])
        elif not _INDEX.match(name) and not _OTHER.match(name):
            problems.append(f"unknown key: {name}")
        if _MUST_EXPIRE.search(name):
            ttl: Any = await call("PTTL", name)
            if ttl == -1:
                problems.append(f"temporary key without a time to live: {name}")
    empty: Any = await call("EVAL", _EMPTY_FIELDS, 0)
    problems += sorted(each.decode() for each in empty)
    return problems + await _drift(backend, known)


def _has_record(known: set[str], execution_id: str) -> bool:
    tag = execution_id.partition("}")[0] + "}"
    return f"ff:exec:{tag}:{execution_id}:core" in known


def _unowned_of_execution(
    known: set[str], name: str, part: str | None, execution_id: str
) -> list[str]:
    if part and not _EXECUTION_PARTS.match(part):
        return [f"unknown kind of execution key: {name}"]
    if not _has_record(known, execution_id):
        return [f"execution key without a record: {name}"]
    return []


def _unowned_of_flow(known: set[str], name: str, flow: str, member: str | None) -> list[str]:
    if f"{flow}:core" not in known:
        return [f"key of a flow without a record: {name}"]
    if member and not _has_record(known, member):
        return [f"edges of an execution without a record: {name}"]
    return []


async def _unowned_waitpoint(
    backend: ValkeyBackend, known: set[str], name: str, record: str
) -> list[str]:
    if record not in known:
        return [f"waitpoint key without its waitpoint: {name}"]
    owner: Any = await backend.transport.call("HGET", record, "execution_id")
    if owner is None or not _has_record(known, owner.decode()):
        return [f"waitpoint key without an owner: {name}"]
    return []


async def _drift(backend: ValkeyBackend, known: set[str]) -> list[str]:
    """Executions of every index that are not where their records say."""
    members: dict[str, set[bytes]] = {}
    for name in known:
        if match := _HOLDS_EXECUTIONS.match(name):
            whole = ("SMEMBERS", name) if match["set"] else ("ZRANGE", name, 0, -1)
            found: Any = await backend.transport.call(*whole)
            members.setdefault(match["tag"], set()).update(found)
    problems: list[str] = []
    for tag, found in sorted(members.items()):
        ids = sorted(member.decode() for member in found)
        verdicts = await backend.upkeep.reconcile_execution_index(tag, ids, "check")
        problems += [
            f"{execution_id}: {verdict}"
            for execution_id, verdict in zip(ids, verdicts, strict=True)
            if verdict != "consistent"
        ]
    return problems
