"""Room in a full pool: some sequences give their blocks back, and are run again when their turn comes.

What is lost can be made again from the tokens, so this costs time and nothing else. It knows pools; who is to give way
is for the caller to say.
"""

from collections import Counter
from collections.abc import Iterable

from outrider.lm.kv_pool import KVPool


def make_room(pool: KVPool, slot: int, length: int, victims: Iterable[int] = (), *, spare: int = 0) -> list[int] | None:
    """Grows a slot to `length` positions; where the pool is full, `victims` lose theirs, in order, as far as need be.

    `spare` blocks are to be left over.

    Returns:
        The slots that lost all they held; None where all of them would not have sufficed, and nothing was changed.
    """
    lacking = pool.lacking(slot, length) + spare - pool.blocks.unheld
    chosen: list[int] = []
    if lacking > 0:
        given: Counter[int] = Counter()
        for victim in victims:
            chosen.append(victim)
            for block in pool.table(victim):
                given[block] += 1
                lacking -= given[block] == pool.blocks.holders(block)  # the last holder's leave frees it
            if lacking <= 0:
                break
        else:
            return None
        for victim in chosen:
            pool.rollback(victim, 0)
    pool.grow(slot, length)
    return chosen
