"""What every test shares: one thread per process, so that tests beside each other don't spin."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
