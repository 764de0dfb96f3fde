"""saq: many jobs at a time in one event loop."""

import asyncio

import harness
from redis import asyncio as aioredis
from saq import Worker
from saq.queue.redis import RedisQueue


async def noop(ctx):  # noqa: ARG001
    harness.tick()


class Saq(harness.Queue):
    package = "saq"
    note = "concurrency 100, jobs deleted when done"

    def __init__(self, url):
        # Every waiting process task holds a connection, and redis-py stops at 100; more
        # enqueues at once than the default of 20.
        client = aioredis.from_url(url, max_connections=256)
        self.queue = RedisQueue(client, max_concurrent_ops=64)

    async def submit(self, count):
        # No batch call that does not wait for results: many enqueues in flight.
        jobs = iter(range(count))

        async def enqueue():
            for _ in jobs:
                await self.queue.enqueue("noop", ttl=-1)

        await asyncio.gather(*(enqueue() for _ in range(32)))

    async def work(self):
        # Our choice: in trials 100 was a little faster than 20 or 50, the default is 10.
        await Worker(self.queue, functions=[noop], concurrency=100).start()

    def left(self, client):
        return client.zcard("saq:default:incomplete")


if __name__ == "__main__":
    harness.main(Saq)
