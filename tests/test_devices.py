"""What works on a CPU works on a GPU: maps and gradients against their definition, and a short run of each family.

Each test is of a device; where there is no CUDA, the CPU alone is tried, so that the tests themselves stay alive.
`make test-gpu` runs them with the kernels' own tests, which hold every form to the float64 definition on each device.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from small import config, needle_config
from tolerance import assert_close

import nestling
from nestling.kernels.signs import reference
from nestling.models.resnet import make_resnet

GPU = pytest.param(
    "cuda:0", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
)
on_each_device = pytest.mark.parametrize("device", ["cpu", GPU])


@on_each_device
def test_latents_change_the_weights_and_get_their_gradient_as_defined(device: str) -> None:
    model = make_resnet("resnet8", width=8, channels=1, classes=10, seed=0).to(device)
    adapter = nestling.attach(model, nestling.LatentConfig(seed=7, dim=8, targets=("*conv*",)))
    adapter.load_vector(np.random.default_rng(0).normal(size=adapter.layout.size).astype(np.float32))
    item = 3
    mapped, name = adapter._maps[item], adapter.layout.names[item]
    base = dict(model.named_parameters())[name].detach()
    z = adapter.vector()[adapter.layout.slice(name)].astype(np.float64)
    wanted = base.cpu().double().flatten().numpy() + mapped.factor * reference.expand(mapped.key, z, base.numel())
    assert_close(adapter.weights()[name].detach().cpu().flatten(), torch.from_numpy(wanted), torch.float32)
    weights = {key: weight.detach().clone().requires_grad_() for key, weight in adapter.weights().items()}
    x = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(0)).to(device)
    torch.func.functional_call(model, weights, (x,)).square().sum().backward()
    g = weights[name].grad.cpu().double().flatten().numpy()
    model(x).square().sum().backward()
    got = adapter.z.grad[adapter.layout.slice(name)]
    wanted = torch.from_numpy(mapped.factor * reference.reduce(mapped.key, g, mapped.rank))
    assert_close(got.cpu(), wanted, torch.float32)


FAMILIES = {
    "flite": lambda out: config(out),
    "fedavg": lambda out: config(out, adapter=nestling.FullConfig()),
    "fednl": lambda out: needle_config(out),
    "lora": lambda out: needle_config(out, adapter=nestling.LoraConfig(rank=2, layers="1", window=32)),
}


@pytest.mark.parametrize("family", FAMILIES)
@on_each_device
def test_a_short_run_ends_where_it_ends_on_a_cpu(device: str, family: str, tmp_path: Path) -> None:
    if family in ("fednl", "lora"):
        pytest.importorskip("transformers")
    if family == "lora":
        pytest.importorskip("peft")
    states = []
    for where in ("cpu", device):
        settings = FAMILIES[family](tmp_path / where.replace(":", ""))
        settings = replace(settings, rounds=1, machine=replace(settings.machine, device=where))
        result = nestling.run(settings)
        folder = tmp_path / where.replace(":", "") / result.run_dir
        tensors = load_file(folder / "adapter" / "adapter.safetensors")
        states.append(torch.cat([torch.from_numpy(tensors[name]).flatten().double() for name in sorted(tensors)]))
    moved = float(states[0].abs().max())
    assert moved > 0
    # Sums in another order move a few steps of training by far more than one rounding; another algorithm would by all.
    assert float((states[1] - states[0]).abs().max()) <= (0 if device == "cpu" else 0.02 * moved)
