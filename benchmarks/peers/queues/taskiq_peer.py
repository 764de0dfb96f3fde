"""taskiq: the stream broker its README starts with, tasks as coroutines."""

import asyncio

import harness
from taskiq.api import run_receiver_task
from taskiq_redis import RedisStreamBroker


async def noop():
    harness.tick()


class Taskiq(harness.Queue):
    package = "taskiq"
    note = "RedisStreamBroker, 100 async tasks, prefetch 100"

    def __init__(self, url):
        # "0": the tasks are there before the worker; "$" would skip them.
        self.broker = RedisStreamBroker(url, consumer_id="0", max_connection_pool_size=64)
        self.noop = self.broker.register_task(noop, task_name="noop")

    async def submit(self, count):
        # No batch call: as many `kiq` in flight as the connections carry.
        jobs = iter(range(count))

        async def enqueue():
            for _ in jobs:
                await self.noop.kiq()

        await asyncio.gather(*(enqueue() for _ in range(32)))

    async def work(self):
        # 100 tasks at a time is the CLI's default; the prefetch (default 0) is our choice.
        # A no-op has no parameter to validate.
        await run_receiver_task(
            self.broker,
            run_startup=True,
            validate_params=False,
            max_async_tasks=100,
            max_prefetch=100,
        )

    def left(self, client):
        (group,) = client.xinfo_groups("taskiq")
        return group["pending"] + (group["lag"] or 0)


if __name__ == "__main__":
    harness.main(Taskiq)
