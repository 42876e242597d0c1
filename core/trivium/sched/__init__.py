"""Which request runs in the next step, with how many tokens, and the integer arrays of that step."""

from __future__ import annotations

from trivium.sched.batching import RowMap, make_batch, sampled_rows
from trivium.sched.scheduler import Entry, Scheduler, Sequence, StepPlan

__all__ = ["Entry", "RowMap", "Scheduler", "Sequence", "StepPlan", "make_batch", "sampled_rows"]
