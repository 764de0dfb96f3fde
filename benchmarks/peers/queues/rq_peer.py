"""rq: SimpleWorker, which its performance notes name for very short jobs."""

import harness
import redis
from rq import Queue, SimpleWorker


def noop():
    harness.tick()


class Rq(harness.Queue):
    package = "rq"
    note = "SimpleWorker, enqueue_many, result_ttl 0"

    def __init__(self, url):
        self.connection = redis.Redis.from_url(url)
        self.queue = Queue(connection=self.connection)

    def submit(self, count):
        # result_ttl=0: nobody reads the result, so the job is deleted when it is done.
        # By name: a job must import its function, and this file runs as __main__.
        self.queue.enqueue_many(
            [Queue.prepare_data("rq_peer.noop", result_ttl=0) for _ in range(count)]
        )

    def work(self):
        worker = SimpleWorker([self.queue], connection=self.connection, log_job_description=False)
        worker.work(logging_level="ERROR")

    def left(self, client):
        return client.llen("rq:queue:default") + client.zcard("rq:wip:default")


if __name__ == "__main__":
    harness.main(Rq)
