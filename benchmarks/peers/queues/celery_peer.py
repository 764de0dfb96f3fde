"""celery: one process, early acknowledgement (the default), large prefetch."""

import harness
from celery import Celery


def noop():
    harness.tick()


class CeleryQueue(harness.Queue):
    package = "celery"
    note = "solo pool, prefetch 128, results ignored"

    def __init__(self, url):
        self.app = Celery("peer", broker=url)
        # The "Optimizing" guide: many short tasks want a prefetch of 64 or 128. Ours:
        # results, events and rate limits are off, since nobody uses them here.
        self.app.conf.update(
            task_ignore_result=True,
            task_store_errors_even_if_ignored=False,
            worker_prefetch_multiplier=128,
            worker_disable_rate_limits=True,
            worker_send_task_events=False,
            worker_hijack_root_logger=False,
            broker_connection_retry_on_startup=True,
        )
        self.noop = self.app.task(name="noop")(noop)

    def submit(self, count):
        # One producer for the batch, so no pool round for each message.
        with self.app.producer_pool.acquire(block=True) as producer:
            for _ in range(count):
                self.noop.apply_async(producer=producer)

    def work(self):
        # Solo runs a task in the consumer's own thread: no hand-over between threads. In
        # trials it was faster than the thread pool with 1 or 8 threads.
        self.app.worker_main(
            [
                *("worker", "--pool=solo", "--concurrency=1", "--loglevel=ERROR"),
                *("--without-gossip", "--without-mingle", "--without-heartbeat"),
            ]
        )

    def left(self, client):
        return client.llen("celery") + client.hlen("unacked")


if __name__ == "__main__":
    harness.main(CeleryQueue)
