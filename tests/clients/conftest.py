"""One server for all clients."""

from tests.e2e.conftest import demo

__all__ = ["demo"]
