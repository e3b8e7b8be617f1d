"""What takes minutes, root, or packages of the system: `make test-deploy`."""

from tests.system.conftest import launch, model

__all__ = ["launch", "model"]
