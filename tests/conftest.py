"""What every test shares: one thread per process, so that tests beside each other don't spin."""

import os

from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long a machine takes to draw inputs says nothing about the code under test.
settings.register_profile("streamrl", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("streamrl")
