"""`attach` chooses the class, and `averaging_error` measures what it says."""

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nestling
from nestling.adapters.base import Adapter, InexactAverages, averaging_error, warn_if_inexact
from nestling.adapters.frozen import Frozen
from nestling.adapters.full import FullAdapter
from nestling.adapters.latent import LatentAdapter
from nestling.config.schema import FullConfig, LatentConfig, MappingConfig
from nestling.core.vectors import Layout
from nestling.models.backbones import base_hash


class Power:
    """θ(z) = z^power: averages exactly for power 1 only."""

    averages_exactly = True
    base_hash = ""
    config = LatentConfig()
    frozen = Frozen(nn.Linear(1, 1))
    spec: dict[str, Any] = {}  # noqa: RUF012
    layout = Layout.of([("w", (2,))])

    def __init__(self, power: int) -> None:
        self.power, self.z = power, np.ones(2, np.float32)

    def vector(self) -> np.ndarray:
        return self.z.copy()

    def load_vector(self, vector: np.ndarray | Tensor) -> None:
        self.z = np.asarray(vector)

    def weights(self) -> dict[str, Tensor]:
        return {"w": torch.from_numpy(self.z**self.power)}

    def trainable(self) -> list[nn.Parameter]:
        return []

    def gates(self) -> list[nn.Parameter]:
        return []

    def save_pretrained(self, folder: object) -> None: ...

    def detach(self, *, merge: bool = False) -> None: ...


def test_attach_gives_the_class_of_the_settings_and_the_hash() -> None:
    for config, kind in ((LatentConfig(dim=2), LatentAdapter), (FullConfig(), FullAdapter)):
        model = nn.Sequential(nn.Linear(2, 2))
        expected = base_hash(model)
        adapter = nestling.attach(model, config)
        assert type(adapter) is kind
        assert isinstance(adapter, Adapter)
        assert adapter.base_hash == expected
        adapter.detach()
        assert nestling.attach(model, config, base_hash="given").base_hash == "given"
    assert not isinstance(SimpleNamespace(), Adapter)


def test_the_averaging_error_by_hand() -> None:
    """Squares of 0 and 4 with weights 3 and 1: the mean of squares is 4, the square of the mean is 1."""
    states = [np.float32([0, 0]), np.float32([4, 4])]
    adapter = Power(2)
    assert averaging_error(adapter, states, [3, 1]) == pytest.approx((4 - 1) / 1)
    assert averaging_error(Power(1), states, [3, 1]) == 0
    assert np.array_equal(adapter.vector(), [1, 1])  # its own state is put back


def test_the_averaging_error_leaves_an_adapter_as_it_was() -> None:
    adapter = nestling.attach(nn.Sequential(nn.Linear(4, 4)), LatentConfig(dim=3))
    adapter.load_vector(np.float32([1, 2, 3]))
    averaging_error(adapter, [np.float32([3, 2, 1]), np.float32([0, 1, 0])], [1, 2])
    assert adapter.vector().tolist() == [1, 2, 3]


def test_it_is_said_once_where_averages_are_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestling.adapters.base._WARNED", set())
    exact = nestling.attach(nn.Sequential(nn.Linear(4, 4)), MappingConfig(dim=3))
    inexact = nestling.attach(nn.Sequential(nn.Linear(4, 4)), MappingConfig(dim=3, squash=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_inexact(exact)
        with pytest.raises(InexactAverages, match="clients' mapping vectors is not the mean of their models"):
            warn_if_inexact(inexact)
        warn_if_inexact(inexact)
