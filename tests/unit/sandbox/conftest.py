"""Every isolation that this machine has."""

import pytest

from actors.sandbox.isolation import KINDS, Isolation
from actors.sandbox.sandbox import why_not


@pytest.fixture(params=KINDS)
def isolation(request: pytest.FixtureRequest) -> Isolation:
    chosen: Isolation = request.param
    if lacks := why_not(chosen):
        pytest.skip(lacks)
    return chosen
