"""huey: the thread consumer on a blocking Redis list."""

import harness
from huey import RedisHuey


class Huey(harness.Queue):
    package = "huey"
    # Results off: nobody reads them. Blocking pop is huey's default. The number of threads is
    # our choice: 2 was never slower than 1, and 4 and 8 gave no more in trials.
    # huey pops a task before it runs it: a crashed worker loses it.
    note = "2 threads, no results; no acknowledgement"

    def __init__(self, url):
        self.huey = RedisHuey("peer", url=url, results=False)
        self.noop = self.huey.task(name="noop")(harness.tick)

    def submit(self, count):
        for _ in range(count):
            self.noop()

    def work(self):
        self.huey.create_consumer(workers=2, worker_type="thread", periodic=False).run()

    def left(self, client):  # noqa: ARG002
        return self.huey.pending_count()


if __name__ == "__main__":
    harness.main(Huey)
