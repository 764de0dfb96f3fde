"""arq: many jobs at a time in one event loop."""

import asyncio

import harness
from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker, func


async def noop(ctx):  # noqa: ARG001
    harness.tick()


class Arq(harness.Queue):
    package = "arq"
    note = "max_jobs 100, results not kept"

    def __init__(self, url):
        self.settings = RedisSettings.from_dsn(url)
        self.settings.max_connections = 64
        self.pool = None

    async def submit(self, count):
        # No batch call: as many enqueues in flight as the connections carry.
        self.pool = self.pool or await create_pool(self.settings)
        jobs = iter(range(count))

        async def enqueue():
            for _ in jobs:
                await self.pool.enqueue_job("noop")

        await asyncio.gather(*(enqueue() for _ in range(32)))

    async def work(self):
        # The numbers are our choice; between 10 and 300 jobs trials showed no clear difference.
        # A short poll_delay: the default sleeps half a second between two reads of the queue.
        worker = Worker(
            functions=[func(noop, name="noop", keep_result=0)],
            redis_settings=self.settings,
            max_jobs=100,
            queue_read_limit=500,
            poll_delay=0.001,
            log_results=False,
            handle_signals=False,
        )
        await worker.async_run()

    def left(self, client):
        return client.zcard("arq:queue")


if __name__ == "__main__":
    harness.main(Arq)
