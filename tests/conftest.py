"""For all tests: one thread, an own cache, hypothesis without deadlines (the machine is shared), no network needed."""

import nestling  # first: it sets how OpenMP threads wait before torch starts them  # isort: skip

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("nestling", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("nestling")
torch.set_num_threads(1)

assert nestling.__version__


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Bases that tests train are kept for the session, never in the user's cache."""
    patch = pytest.MonkeyPatch()
    patch.setenv("NESTLING_CACHE", str(tmp_path_factory.mktemp("cache")))
