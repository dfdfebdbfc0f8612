"""Who gets the next free blocks: the policy of a pool that is too small for what runs in it.

    grow:   a block for each sequence whose next token has no place, the oldest first; when there
            is none, the youngest of the lowest priority leaves, with its whole request

The oldest never has to leave. Pure decisions over the scheduler and the claims: the engine thread
runs it between two steps, and the planner in simulated time.
"""

from engine.claims import Claims
from engine.scheduler import Running, Scheduler
from kvtransfer.blocks import BlocksExhausted


def grow(scheduler: Scheduler, claims: Claims) -> list[Running]:
    """Gives blocks as far as there are any. Returns who left, one sequence of each request."""
    preempted: list[Running] = []
    for sequence in scheduler.in_need_of_blocks():
        # Unless it was preempted for one before it, or is itself the one to leave.
        while sequence.key in claims:
            try:
                claims.grow(sequence.key)
            except BlocksExhausted:
                victim = scheduler.victim()
                if victim is None:
                    break
                _evict(victim, scheduler, claims)
                preempted.append(victim)
            else:
                break
    return preempted


def _evict(victim: Running, scheduler: Scheduler, claims: Claims) -> None:
    """The request of victim leaves; its blocks are free at once."""
    for key in claims.of_same_lease(victim.key):
        scheduler.remove(key)
        claims.evict(key)
