"""A full disk for this process alone, without privileges: RLIMIT_FSIZE."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_no_larger_than(num_bytes: int) -> Iterator[None]:
    """Every write beyond this offset of a file fails, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
