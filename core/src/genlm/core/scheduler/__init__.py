"""The batching scheduler: many callers, one engine thread.

`scheduler` is the interface that callers use, `worker` the engine's thread. `request_table`
holds the unfinished requests, `batching` decides when a batch is dispatched, `results` checks
and stores results of the engine, `delivery` passes them to waiting event loops and threads, and
`observation` logs and traces the steps.
"""

from genlm.core.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
