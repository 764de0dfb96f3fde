"""The engine as its callers see it: one attribute per concern."""

from typing import Any, Protocol

from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.api.admission import AdmissionControl
from flowfabric.engine.api.budgets import Budgets
from flowfabric.engine.api.claims import Claims
from flowfabric.engine.api.concern import Absent, Refusal
from flowfabric.engine.api.events import Events
from flowfabric.engine.api.executions import Executions
from flowfabric.engine.api.flows import Flows
from flowfabric.engine.api.leases import Leases
from flowfabric.engine.api.meta import Meta
from flowfabric.engine.api.notes import Notes
from flowfabric.engine.api.places import Lanes, Places, Wakeups
from flowfabric.engine.api.quotas import Quotas
from flowfabric.engine.api.reads import Listings, Reads
from flowfabric.engine.api.secrets import Secrets
from flowfabric.engine.api.steps import Steps
from flowfabric.engine.api.streams import Streams
from flowfabric.engine.api.suspensions import Suspensions
from flowfabric.engine.api.upkeep import Leadership, Upkeep
from flowfabric.engine.api.waitpoints import Signals, Waitpoints
from flowfabric.engine.api.workers import Workers

_MAY_LACK = {
    "claims": "claim claim_for_worker complete_and_claim_next",
    "events": "subscribe subscribe_completion subscribe_signal_delivery subscribe_operator_events "
    "subscribe_worker_events subscribe_flow_events subscribe_instance_tags",
    "steps": "record_step read_steps watch_completion deliver_child_completions",
    "flows": "create_flow set_flow_tag set_flow_tags get_flow_tag add_execution_to_flow "
    "stage_dependency_edge apply_dependency_to_child add_dependency set_edge_group_policy "
    "submit_flow extend_flow release_flow spawn_children cancel_flow replay_flow delete_flow "
    "wait_flow get_inputs describe_flow describe_edge list_flows list_edges list_outgoing_edges "
    "list_incoming_edges resolve_execution_flow_id evaluate_flow_eligibility "
    "promote_blocked_to_eligible resolve_dependency cascade_completion drain_cascade "
    "cancel_flow_header ack_cancel_member drain_flow_cancel drain_sibling_cancel_group "
    "reconcile_sibling_cancel_group project_flow_summary",
}
"""The operations of spec 12 §2 that a backend may lack, by noun."""
# Spec 12 §3 fixes the order. `flag=operation` where the two have different names.
_FLAGS = """
executions cancel_execution change_priority replay_execution
leases revoke_lease
reads read_execution_state read_execution_info get_execution_result
budgets budget_admin=create_budget
quotas quota_admin=create_quota_policy
secrets rotate_waitpoint_hmac_secret_all seed_waitpoint_hmac_secret
waitpoints list_pending_waitpoints
flows cancel_flow_header cancel_flow_wait_timeout=cancel_flow
flows cancel_flow_wait_indefinite=cancel_flow ack_cancel_member
claims claim_for_worker issue_reclaim_grant
meta prepare
events subscribe_lease_history subscribe_completion subscribe_signal_delivery
events subscribe_instance_tags
streams stream_durable_summary=read_summary stream_best_effort_live=append_frame
workers register_worker heartbeat_worker mark_worker_dead
leases list_expired_leases
workers list_workers
quotas release_admission read_quota_policy_limits
claims block_execution_for_admission
budgets read_budget_usage_and_limits
events subscribe_operator_events subscribe_worker_events
"""


class Backend(Protocol):
    """Every engine operation, by noun: `backend.leases.renew(handle)`.

    One object per event loop. A second store implements the same concerns and passes
    `tests/conformance`.
    """

    remote: bool = False
    """Whether a server is between this process and the store."""
    counts: PartitionCounts
    max_payload_bytes: int
    executions: Executions
    reads: Reads
    listings: Listings
    claims: Claims
    admission: AdmissionControl
    leases: Leases
    lanes: Lanes
    wakeups: Wakeups
    places: Places
    workers: Workers
    suspensions: Suspensions
    waitpoints: Waitpoints
    signals: Signals
    secrets: Secrets
    streams: Streams
    events: Events
    upkeep: Upkeep
    leadership: Leadership
    meta: Meta
    notes: Notes
    flows: Flows
    steps: Steps
    budgets: Budgets
    quotas: Quotas

    @property
    def closed(self) -> bool:
        """Whether the backend was closed."""
        ...

    async def aclose(self) -> None:
        """Close every connection; pending calls fail."""
        ...


def refuse_missing(backend: Backend) -> None:
    """Fill in the operations that a backend lacks with refusals."""
    for noun, names in _MAY_LACK.items():
        concern: Any = getattr(backend, noun, None) or Absent()
        for name in names.split():
            if not hasattr(concern, name):
                setattr(concern, name, Refusal(name))
        setattr(backend, noun, concern)


def supported(backend: Backend) -> dict[str, bool]:
    """Every capability flag, derived from the backend's operations."""
    flags: dict[str, bool] = {}
    for line in _FLAGS.split("\n"):
        noun, *entries = line.split() or [""]
        for entry in entries:
            flag, _, operation = entry.partition("=")
            found = getattr(getattr(backend, noun), operation or flag, None)
            flags[flag] = found is not None and not isinstance(found, Refusal)
    return flags
