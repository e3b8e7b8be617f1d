"""Every isolation that this machine has."""

import pytest

from actors.sandbox.isolation import Isolation, find_isolation


@pytest.fixture(params=["namespaces", "seccomp"])
def isolation(request: pytest.FixtureRequest) -> Isolation:
    if request.param == "namespaces" and find_isolation() != "namespaces":
        pytest.skip("this machine has no namespaces")
    chosen: Isolation = request.param
    return chosen
