"""Seeds of what is made up: levels, groups, blocks of a generated data set.

Invariant: a seed of training is below `FIRST_HELD_OUT` and one that is held out is not, whatever
`run.seed` is. Both fit into 32 bits, which every package takes.
"""

import numpy as np

FIRST_HELD_OUT = 2**31
HELD_OUT_RUN_SEED = 2**31 - 1
"""What a user's own source is given as its seed where it is held out."""


def seed_of(run_seed: int | None, number: int) -> int:
    """Of the prompt of this number; `run_seed` None: of the held-out one."""
    if run_seed is None:
        return FIRST_HELD_OUT + number
    entropy = np.random.SeedSequence([run_seed, number])
    return int(entropy.generate_state(1)[0]) % FIRST_HELD_OUT


def block_seed(run_seed: int | None, number: int, size: int) -> int:
    """The first of `size` seeds in a row, which no other block of the run has.

    Training walks over all blocks below `FIRST_HELD_OUT` in steps of an odd number, from a place
    and by a step that `run_seed` draws; an odd step comes to each of 2**k blocks once.

    Args:
        run_seed: None: of the held-out blocks.
        size: a power of two.
    """
    if run_seed is None:
        return FIRST_HELD_OUT + number * size
    place, half_step = map(int, np.random.SeedSequence(run_seed).generate_state(2))
    return (place + number * (2 * half_step + 1)) % (FIRST_HELD_OUT // size) * size
