"""The batching scheduler: many callers, one engine thread.

`scheduler` is the front that callers use, `worker` the engine's thread, `gate`
decides when a batch leaves, `flight` is a request with its waiting callers.
"""

from genlm.core.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
