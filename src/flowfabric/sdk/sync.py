"""The client for code without an event loop."""

from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

from flowfabric.core.closing import Closing
from flowfabric.engine.connect import Place
from flowfabric.sdk.blocking import SyncTwin, blocking
from flowfabric.sdk.client import Client
from flowfabric.sdk.following import SyncEventFeed
from flowfabric.sdk.loop_thread import Portal

T = TypeVar("T")


class SyncClient(SyncTwin[Client], Closing):
    """`Client` without `await`: the same methods, usable from several threads and after a fork.

    >>> with SyncClient.connect("valkey://127.0.0.1:6379") as client:
    ...     created = client.submit("resize", b'{"width": 80}')
    ...     print(client.result(created.execution_id, timeout=10))
    """

    _target: Client

    def __init__(
        self, open_client: Callable[[], Coroutine[Any, Any, Client]], portal: Portal | None = None
    ) -> None:
        self._open = open_client
        self._portal = portal or Portal("ff-sync-client")
        self._shares_portal = portal is not None
        self._generation = self._portal.generation
        try:
            super().__init__(self._portal.call(open_client), self._portal)
        except BaseException:
            self._portal.close()
            raise

    @classmethod
    def connect(cls, place: Place, namespace: str = "default") -> Self:
        """A client of the deployment at an address or url."""
        return cls(lambda: Client.connect(place, namespace))

    async def _current(self) -> Client:
        """The client for the portal's loop. A forked process has a new loop, so it reconnects."""
        generation = self._portal.generation
        if self._generation != generation:
            client = await self._open()
            if self._generation == generation and client is not self._target:
                # Another thread of the forked process connected first.
                await client.aclose()
            else:
                self._target, self._generation = client, generation
        return self._target

    def _call(self, use: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        async def run() -> T:
            return await use(await self._current())

        return self._portal.call(run)

    @property
    def namespace(self) -> str:
        """The namespace that this client submits to."""
        return self._target.namespace

    new_execution = blocking(Client.new_execution)
    mint = blocking(Client.mint)
    place = blocking(Client.place)
    submit = blocking(Client.submit)
    submit_many = blocking(Client.submit_many)
    inspect = blocking(Client.inspect)
    explain = blocking(Client.explain)
    wait = blocking(Client.wait)
    wait_until_suspended = blocking(Client.wait_until_suspended)
    result = blocking(Client.result)
    success = blocking(Client.success)
    result_now = blocking(Client.result_now)
    cancel = blocking(Client.cancel)
    replay = blocking(Client.replay)
    purge = blocking(Client.purge)
    revoke_lease = blocking(Client.revoke_lease)
    change_priority = blocking(Client.change_priority)
    read_context = blocking(Client.read_context)
    list = blocking(Client.list)
    subscribe = blocking(Client.subscribe, SyncEventFeed)
    subscribe_completion = blocking(Client.subscribe_completion, SyncEventFeed)
    subscribe_lease_history = blocking(Client.subscribe_lease_history, SyncEventFeed)
    subscribe_signal_delivery = blocking(Client.subscribe_signal_delivery, SyncEventFeed)
    subscribe_operator_events = blocking(Client.subscribe_operator_events, SyncEventFeed)
    subscribe_worker_events = blocking(Client.subscribe_worker_events, SyncEventFeed)

    submit_flow = blocking(Client.submit_flow)
    extend_flow = blocking(Client.extend_flow)
    release_flow = blocking(Client.release_flow)
    describe_flow = blocking(Client.describe_flow)
    cancel_flow = blocking(Client.cancel_flow)
    replay_flow = blocking(Client.replay_flow)
    delete_flow = blocking(Client.delete_flow)
    list_flows = blocking(Client.list_flows)
    list_members = blocking(Client.list_members)
    list_edges = blocking(Client.list_edges)
    set_flow_tags = blocking(Client.set_flow_tags)
    get_inputs = blocking(Client.get_inputs)
    wait_flow = blocking(Client.wait_flow)
    subscribe_flow_events = blocking(Client.subscribe_flow_events, SyncEventFeed)

    create_quota = blocking(Client.create_quota)
    quota = blocking(Client.quota)
    quotas = blocking(Client.quotas)
    update_quota = blocking(Client.update_quota)
    lanes = blocking(Client.lanes)
    lane = blocking(Client.lane)
    busiest_partitions = blocking(Client.busiest_partitions)
    set_lane_state = blocking(Client.set_lane_state)
    set_lane_config = blocking(Client.set_lane_config)
    workers = blocking(Client.workers)
    drain_worker = blocking(Client.drain_worker)
    mark_worker_dead = blocking(Client.mark_worker_dead)
    list_worker_leases = blocking(Client.list_worker_leases)
    list_expired_leases = blocking(Client.list_expired_leases)
    create_budget = blocking(Client.create_budget)
    budget = blocking(Client.budget)
    list_budgets = blocking(Client.list_budgets)
    update_budget = blocking(Client.update_budget)
    reset_budget = blocking(Client.reset_budget)
    delete_budget = blocking(Client.delete_budget)
    report_usage = blocking(Client.report_usage)

    deliver_signal = blocking(Client.deliver_signal)
    signal = blocking(Client.signal)
    approve = blocking(Client.approve)
    resume = blocking(Client.resume)
    list_suspended = blocking(Client.list_suspended)
    list_pending_waitpoints = blocking(Client.list_pending_waitpoints)
    read_waitpoint_token = blocking(Client.read_waitpoint_token)
    close_waitpoint = blocking(Client.close_waitpoint)
    rotate_waitpoint_hmac_secret_all = blocking(Client.rotate_waitpoint_hmac_secret_all)
    list_waitpoint_hmac_kids = blocking(Client.list_waitpoint_hmac_kids)
    verify_and_deliver = blocking(Client.verify_and_deliver)
    steps = blocking(Client.steps)
    read_stream = blocking(Client.read_stream)
    read_summary = blocking(Client.read_summary)
    tail = blocking(Client.tail)

    def close(self) -> None:
        """Close every connection and end the thread; pending calls fail."""
        if self._shares_portal:
            return
        opened = self._generation == self._portal.generation
        self._portal.close(self._target.aclose if opened else None)
