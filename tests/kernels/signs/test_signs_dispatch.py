"""The differentiable map against a dense float64 U, on both back-ends; its digest and its refusals."""

import math
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nestling.core.errors import ConfigError, SeedError
from nestling.core.seeds import Stream
from nestling.kernels.signs import dispatch, reference
from nestling.kernels.signs.dispatch import SignMap, backend, digest, make_map, sign_map, sign_map_one

SHAPES = [(3, 5, 7), (4097,), (1,)]


@pytest.fixture(params=["numba", "portable"])
def each_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "portable":
        monkeypatch.setattr(dispatch, "_numba_kernels", lambda: None)
    return request.param


@pytest.fixture
def fresh_choice() -> Iterator[None]:
    dispatch._numba_kernels.cache_clear()
    yield
    dispatch._numba_kernels.cache_clear()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def maps_of(rank: int, dim: int) -> list[SignMap]:
    return [
        make_map(3, f"tensor-{i}", rows=math.prod(shape), dim=dim, rank=rank, scale=0.1 * (i + 1))
        for i, shape in enumerate(SHAPES)
    ]


def dense(map: SignMap) -> Tensor:
    """scale/√rank · U Vᵀ in float64."""
    U = reference.sign_matrix(map.key, map.rows, map.rank).astype(np.float64)
    V = np.eye(map.dim) if map.v is None else map.v.astype(np.float64)
    return torch.from_numpy(map.scale / math.sqrt(map.rank) * U @ V.T)


@pytest.mark.parametrize(("rank", "dim"), [(1, 1), (1, 6), (33, 33), (33, 40), (64, 100)])
def test_values_and_gradients_equal_a_dense_map(rank: int, dim: int, each_backend: str) -> None:
    maps, bases = maps_of(rank, dim), [normal(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    z = normal(3 * dim, seed=9).requires_grad_()
    tensors = sign_map(z, maps, bases)
    cotangents = [normal(*shape, seed=20 + i) for i, shape in enumerate(SHAPES)]
    (gradient,) = torch.autograd.grad(tensors, z, cotangents)
    for i, (map, base) in enumerate(zip(maps, bases, strict=True)):
        M, part = dense(map), slice(i * dim, (i + 1) * dim)
        expected = base.double() + (M @ z[part].detach().double()).reshape(base.shape)
        torch.testing.assert_close(tensors[i].double(), expected, rtol=0, atol=2e-6)
        expected = M.T @ cotangents[i].reshape(-1).double()
        torch.testing.assert_close(gradient[part].double(), expected, rtol=1e-5, atol=1e-5 * map.scale * dim)


def test_gradient_of_a_loss_matches_finite_differences(each_backend: str) -> None:
    """The map is affine, so a central difference of a quadratic loss has no truncation error."""
    map, base = make_map(0, "a", rows=40, dim=6, rank=4, scale=0.5), normal(8, 5)
    z = normal(6, seed=1).requires_grad_()

    def loss(latent: Tensor) -> Tensor:
        return sign_map_one(latent, map, base).double().square().sum()

    (gradient,) = torch.autograd.grad(loss(z), z)
    for i in range(6):
        step = torch.zeros(6)
        step[i] = 0.5
        with torch.no_grad():
            difference = loss(z + step) - loss(z - step)
        assert abs(difference - gradient[i].double()) < 1e-4 * (1 + abs(difference))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_zero_latent_is_the_base_exactly(dtype: torch.dtype, each_backend: str) -> None:
    maps, bases = maps_of(4, 6), [normal(*shape).to(dtype) for shape in SHAPES]
    for made, base in zip(sign_map(torch.zeros(18), maps, bases), bases, strict=True):
        assert torch.equal(made, base)
        assert (made.dtype, made.shape) == (base.dtype, base.shape)
        assert made.data_ptr() != base.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32_then_cast(dtype: torch.dtype, each_backend: str) -> None:
    map, base = make_map(0, "a", rows=500, dim=8, rank=8, scale=0.03), normal(500).to(dtype)
    z = normal(8, seed=2).requires_grad_()
    made = sign_map_one(z, map, base)
    assert torch.equal(made, sign_map_one(z, map, base.float()).to(dtype))
    made.float().sum().backward()
    torch.testing.assert_close(z.grad.double(), dense(map).sum(0), rtol=1e-5, atol=1e-6)


def test_float64_base_keeps_its_digits(each_backend: str) -> None:
    map, base = make_map(0, "a", rows=50, dim=2, rank=2, scale=0.5), normal(50).double() + 1e-12
    z = torch.tensor([0.5, 0.25])
    torch.testing.assert_close(sign_map_one(z, map, base), base + dense(map) @ z.double(), rtol=0, atol=1e-7)
    assert torch.equal(sign_map_one(torch.zeros(2), map, base), base)


def test_non_contiguous_base_and_gradient(each_backend: str) -> None:
    map, base = make_map(0, "a", rows=35, dim=3, rank=3, scale=1.0), normal(5, 7).T
    z = normal(3, seed=4).requires_grad_()
    made, g = sign_map_one(z, map, base), normal(5, 7, seed=5).T
    assert torch.equal(made, sign_map_one(z, map, base.contiguous()))
    (strided,) = torch.autograd.grad(made, z, g, retain_graph=True)
    (plain,) = torch.autograd.grad(made, z, g.contiguous(), retain_graph=True)
    (spread,) = torch.autograd.grad(made.sum(), z)  # an expanded gradient with stride 0
    assert torch.equal(strided, plain)
    torch.testing.assert_close(spread.double(), dense(map).sum(0), rtol=1e-5, atol=1e-5)


def test_gradient_goes_to_the_latent_alone_and_once() -> None:
    map, base = make_map(0, "a", rows=6, dim=2, rank=2, scale=1.0), normal(6).requires_grad_()
    z = normal(2).requires_grad_()
    (gradient,) = torch.autograd.grad(sign_map_one(z, map, base).square().sum(), z, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
    sign_map_one(z, map, base).sum().backward()
    assert base.grad is None


@given(st.lists(st.floats(0.05, 1.0), min_size=2, max_size=5), st.integers(0, 1000))
def test_mean_of_latents_is_mean_of_weights(weights: list[float], seed: int) -> None:
    map, base = make_map(seed, "a", rows=300, dim=10, rank=7, scale=0.05), normal(300, seed=seed)
    p = torch.tensor(weights) / sum(weights)
    latents = normal(len(weights), 10, seed=seed + 1)
    each = torch.stack([sign_map_one(z, map, base) for z in latents])
    torch.testing.assert_close((p[:, None] * each).sum(0), sign_map_one(p @ latents, map, base), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("rank", "dim"), [(16, 16), (7, 16)])
def test_cat_100_torch_thread_count_and_python_threads_do_not_change_a_bit(rank: int, dim: int) -> None:
    map, base = make_map(1, "large", rows=250_001, dim=dim, rank=rank, scale=0.02), normal(250_001)

    def step(_: int) -> tuple[bytes, bytes]:
        z = normal(dim, seed=3).requires_grad_()
        made = sign_map_one(z, map, base)
        made.backward(base)
        return made.detach().numpy().tobytes(), z.grad.numpy().tobytes()

    before, seen = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            seen.add(step(0))
    finally:
        torch.set_num_threads(before)
    with ThreadPoolExecutor(2) as pool:
        seen |= set(pool.map(step, range(4)))
    assert len(seen) == 1


def test_both_backends_agree() -> None:
    map, base, z = make_map(0, "a", rows=4097, dim=50, rank=33, scale=0.1), normal(4097), normal(50)
    fast = sign_map_one(z, map, base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_numba_kernels", lambda: None)
        torch.testing.assert_close(sign_map_one(z, map, base), fast, rtol=0, atol=1e-6)


def test_backend_says_what_runs() -> None:
    assert backend("cpu") == "numba"
    assert backend(torch.device("cuda", 0)) == "portable"


@pytest.mark.usefixtures("fresh_choice")
def test_without_numba_one_warning_and_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    map, base, z = make_map(0, "a", rows=50, dim=4, rank=4, scale=0.1), normal(50), normal(4)
    expected = sign_map_one(z, map, base)
    dispatch._numba_kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "nestling.kernels.signs.cpu", None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = sign_map_one(z, map, base)
        sign_map_one(z, map, base)
        assert backend("cpu") == "portable"
    assert [type(each.message) for each in caught] == [RuntimeWarning]
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-6)


def test_u_and_v_come_from_their_own_streams() -> None:
    map = make_map(5, "layer.weight", rows=8, dim=6, rank=4, scale=1.0)
    assert map.key == Stream(5, "signs-u", "layer.weight").key
    np.testing.assert_array_equal(np.sign(map.v).reshape(-1), Stream(5, "signs-v", "layer.weight").signs(24))
    np.testing.assert_allclose(abs(map.v), 1 / math.sqrt(6), rtol=1e-6)
    assert make_map(5, "layer.weight", rows=8, dim=6, rank=6, scale=1.0).v is None


def test_cat_022_digest_notices_every_field() -> None:
    arguments = {"seed": 1, "name": "a", "rows": 5000, "dim": 8, "rank": 4, "scale": 0.5}

    def of(**changes: object) -> bytes:
        settings = arguments | changes
        return digest([make_map(settings.pop("seed"), settings.pop("name"), **settings)])

    seen = [of(), of(seed=2), of(name="b"), of(rows=5001), of(dim=9), of(rank=5), of(rank=8), of(scale=0.25)]
    one = make_map(1, "a", rows=5000, dim=8, rank=4, scale=0.5)
    flipped = one.v.copy()
    flipped[0, 0] *= -1
    seen += [digest([replace(one, v=flipped)]), digest([one, one]), digest([])]
    assert len(set(seen)) == len(seen)
    assert of() == digest([one])
    assert of(scale=0.1) == of(scale=float(np.float32(0.1)))


def test_cat_098_golden_digest() -> None:
    maps = [
        make_map(0, "conv1.weight", rows=1728, dim=64, rank=64, scale=0.0625),
        make_map(0, "fc", rows=9, dim=5, rank=3, scale=1.0),
    ]
    assert digest(maps).hex() == "85e8bf5f5edbfa517f49c2790c341d3425895a7fac266117c727f787a40b7d53"


@pytest.mark.parametrize(
    "change",
    [{"rows": 0}, {"dim": 0}, {"rank": 0}, {"rank": 9}, {"scale": math.nan}, {"scale": math.inf}, {"scale": 1e39}],
)
def test_impossible_maps_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        make_map(0, "a", **({"rows": 10, "dim": 8, "rank": 4, "scale": 1.0} | change))


def test_rank_above_dim_is_called_redundancy_and_bad_seeds_are_seed_errors() -> None:
    with pytest.raises(ConfigError, match="redundancy"):
        make_map(0, "a", rows=10, dim=3, rank=4, scale=1.0)
    with pytest.raises(SeedError):
        make_map(-1, "a", rows=10, dim=3, rank=3, scale=1.0)


def test_tensors_that_do_not_fit_are_refused() -> None:
    one = make_map(0, "a", rows=10, dim=3, rank=3, scale=1.0)
    for z, maps, bases in (
        (torch.zeros(4), [one], [torch.zeros(10)]),
        (torch.zeros(3), [one], []),
        (torch.zeros(3), [one], [torch.zeros(11)]),
        (torch.zeros(3), [one], [torch.zeros(10, dtype=torch.int32)]),
        (torch.zeros(3, dtype=torch.float64), [one], [torch.zeros(10)]),
    ):
        with pytest.raises(ConfigError):
            sign_map(z, maps, bases)
    assert sign_map(torch.zeros(0), [], []) == ()
