"""Full fine-tuning as an adapter: the trained vector is the parameters themselves (FedAvg, arXiv 1602.05629).

The state is absolute, in model order. The base is kept aside once, so that `detach()` can bring it back.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nestling.adapters.frozen import Frozen, refuse_second_adapter
from nestling.adapters.store import check_vector, save_adapter
from nestling.adapters.targets import select
from nestling.config.schema import FullConfig
from nestling.core.errors import ConfigError
from nestling.core.vectors import Layout, Vector
from nestling.models.backbones import base_hash as hash_of


class FullAdapter:
    """See the module's docstring; made by `nestling.attach(model, FullConfig())`."""

    averages_exactly = True

    def __init__(self, model: nn.Module, config: FullConfig, *, base_hash: str | None = None) -> None:
        self.config = config
        refuse_second_adapter(model)
        self._names = select(dict(model.named_parameters()), config.targets, config.exclude, what="parameter")
        for name in self._names:
            _refuse_unless_real(name, model.get_parameter(name))
        self.base_hash = base_hash or hash_of(model)
        self.layout = Layout.of([(name, model.get_parameter(name).shape) for name in self._names])
        self._base = {name: model.get_parameter(name).detach().clone() for name in self._names}
        self.frozen = Frozen(model, trained=self._base)
        self._attached = True

    @property
    def _parameters(self) -> dict[str, nn.Parameter]:
        # By name each time: loading with `assign=True` puts other objects into the model.
        return {name: self.frozen.model.get_parameter(name) for name in self._names}

    @property
    def spec(self) -> dict[str, Any]:
        """What both sides must agree on."""
        return {"kind": "full", "targets": list(self.config.targets), "exclude": list(self.config.exclude)}

    def vector(self) -> Vector:
        """All trained parameters in model order, a copy: float32[layout.size]."""
        return self.layout.pack({n: p.detach().float().cpu().numpy() for n, p in self._parameters.items()})

    def load_vector(self, vector: np.ndarray | Tensor) -> None:
        """Set the parameters. Raises `ContextError` if the length differs, `WireError` if a number is not finite,
        `ConfigError` after `detach()`."""
        if not self._attached:
            raise ConfigError("was taken off", where="adapter", remedy="Attach one again.")
        arrays = self.layout.unpack(check_vector(vector, self.layout))
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(torch.from_numpy(arrays[name]))

    def trainable(self) -> list[nn.Parameter]:
        """The parameters themselves, for an optimiser."""
        return list(self._parameters.values())

    def gates(self) -> list[nn.Parameter]:
        """None."""
        return []

    def weights(self) -> dict[str, Tensor]:
        """The trained parameters by name."""
        return dict(self._parameters)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the parameters, the settings, the base's hash and a model card into `folder`."""
        save_adapter(self, folder)

    def detach(self, *, merge: bool = False) -> None:
        """The model is the base again, bit for bit; with `merge` it keeps what was trained. Twice does nothing more."""
        if not self._attached:
            return
        self._attached = False
        if not merge:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(self._base[name])
        self.frozen.release()


def _refuse_unless_real(name: str, parameter: nn.Parameter) -> None:
    if not parameter.is_floating_point():
        raise ConfigError(
            f"is stored as {parameter.dtype}, which cannot be trained",
            where=name,
            remedy="Exclude it in adapter.exclude, or load floating-point weights.",
        )
