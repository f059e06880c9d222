"""The batching scheduler: many callers, one engine thread.

`scheduler` is the interface that callers use, `worker` the engine's thread. `request_table`
holds the unfinished requests, `batching` decides when a batch is dispatched, `delivery`
passes answers to the event loops and threads that wait.
"""

from genlm.core.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
