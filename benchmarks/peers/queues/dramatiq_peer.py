"""dramatiq: threads in one process, default middleware."""

import os
import threading

# 8 threads is dramatiq's default. The prefetch is its documented variable; the value is our
# choice: of 16 (the default here), 128, 512 and 2000, 512 and 2000 were fastest in trials.
os.environ.setdefault("dramatiq_queue_prefetch", "512")

import dramatiq
import harness
from dramatiq.brokers.redis import RedisBroker


class Dramatiq(harness.Queue):
    package = "dramatiq"
    note = "8 threads, prefetch 512"

    def __init__(self, url):
        self.broker = RedisBroker(url=url)
        dramatiq.set_broker(self.broker)
        self.noop = dramatiq.actor(harness.tick, actor_name="noop")

    def submit(self, count):
        # A group is dramatiq's batch; it enqueues message by message.
        dramatiq.group(self.noop.message() for _ in range(count)).run()

    def work(self):
        dramatiq.Worker(self.broker, worker_threads=8).start()
        threading.Event().wait()

    def left(self, client):
        return client.hlen("dramatiq:default.msgs")


if __name__ == "__main__":
    harness.main(Dramatiq)
