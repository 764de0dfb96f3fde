"""The same no-op workload on other Python queues and on ours: `python -m benchmarks.peers`."""
