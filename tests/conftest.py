"""For all tests: one thread, an own cache, hypothesis without deadlines (the machine is shared), and no network."""

import checked  # first: it says how the package is instrumented  # isort: skip
import nestling  # second: it sets how OpenMP threads wait before torch starts them  # isort: skip

import os
from collections.abc import Iterator

import offline
import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("nestling", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("nestling")
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
offline.install()

assert checked.jaxtyped
assert nestling.__version__


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Bases that tests train are kept for the session, never in the user's cache."""
    patch = pytest.MonkeyPatch()
    patch.setenv("NESTLING_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def _stays_on_this_machine() -> Iterator[None]:
    """Also what a fixture of a wider scope tried before this one began."""
    yield
    tried = list(offline.ATTEMPTS)
    offline.ATTEMPTS.clear()
    assert tried == []
