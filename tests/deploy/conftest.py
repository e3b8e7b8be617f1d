"""What takes minutes, root, or packages of the system: `make test-deploy`."""

from collections.abc import Iterator

import pytest

from tests.deploy.namespaces import Network, network
from tests.system.conftest import CONFIG, STREAMRL, launch, model

__all__ = ["launch", "model", "net"]


@pytest.fixture(scope="session")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Four machines; `desk` has the configuration and makes the model."""
    folder = tmp_path_factory.mktemp("machines")
    with network(folder, "desk", "a", "b", "c") as machines:
        desk = machines.hosts["desk"]
        (desk.home / "run.yaml").write_text(CONFIG.format(folder="runs", model="models/copy"))
        desk.run(STREAMRL, "get-model", "--config", "run.yaml")
        yield machines
