"""BullMQ for Python: addBulk, and concurrency in one event loop."""

import asyncio

import harness
from bullmq import Queue, Worker


async def noop(job, token):  # noqa: ARG001
    harness.tick()


class BullMQ(harness.Queue):
    package = "bullmq"
    note = "concurrency 10, addBulk, removeOnComplete"

    def __init__(self, url):
        self.url = url
        self.queue = Queue("peer", {"connection": url})

    async def submit(self, count):
        # addBulk is the documented way to add many; finished jobs are removed, not kept.
        await self.queue.addBulk(
            [{"name": "noop", "data": {}, "opts": {"removeOnComplete": True}}] * count
        )

    async def work(self):
        # The concurrency guide's example has 50 and says it helps only jobs that wait. A no-op
        # does not: in trials 5 to 20 was fastest, so 10.
        worker = Worker("peer", noop, {"connection": self.url, "concurrency": 10})
        await asyncio.Event().wait()
        await worker.close()

    def left(self, client):
        return client.llen("bull:peer:wait") + client.llen("bull:peer:active")


if __name__ == "__main__":
    harness.main(BullMQ)
