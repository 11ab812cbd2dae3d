"""Admission to the NVMe tier by the probability of return."""

from __future__ import annotations

from tieredkv.eviction.base import Access
from tieredkv.eviction.delay_model import DelayModel
from tieredkv.eviction.delay_table import bin_of

THRESHOLD = 0.2
"""Least probability that any session comes back to a run that is written."""
OLDEST = 4 * 3600.0
"""Seconds: a longer wait counts as one of this age. The table ends at 11 hours, and just before
its end it would say of anybody that he has no time left to come back."""


class DelayAdmission:
    """Writes what somebody will probably come back to.

    A run is used again if any session comes whose chain goes through it: with the probability
    P_s that session s comes back at all, 1 - prod (1 - P_s), which has to reach 0.2. Sessions
    in the queue are certain to come; of one that is being served counts what a wait that
    begins now would. Runs that no session has any more, because it is over or went on without
    them, are not written. With nothing observed everything else is.

    Cost: O(sessions of the run).
    """

    late = True

    def __init__(self, model: DelayModel | None = None) -> None:
        """`model`: whose statistics are asked; somebody else feeds it."""
        self.model = DelayModel() if model is None else model

    def admit(self, run: Access, now: float) -> bool:
        nobody = 1.0
        for session in run.sessions:
            busy = session.busy(now)
            if busy and not session.running:
                return True
            age = 0.0 if busy else min(now - session.since, OLDEST)
            nobody *= 1.0 - self.model.table(session).returns[bin_of(age)]
            if nobody <= 1.0 - THRESHOLD:
                return True
        return False
