"""Patterns over module names: what they choose, and what is said when they choose nothing."""

import fnmatch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

from nestling.adapters.targets import find_norms, find_weights, select
from nestling.core.errors import ConfigError
from nestling.models.resnet import make_resnet

NAMES = st.lists(st.text("abc.", min_size=1, max_size=4), unique=True, max_size=8)


def names(model: nn.Module, targets: tuple[str, ...] = ("*",), exclude: tuple[str, ...] = ()) -> list[str]:
    return [target.name for target in find_weights(model, targets, exclude)]


def resnet() -> nn.Module:
    return make_resnet("resnet8", width=8, channels=1, classes=10, seed=0)


@given(NAMES, st.sampled_from(["*", "a*", "*b", "?", "[ab]*"]), st.sampled_from(["*c*", "a", "*"]))
def test_select_keeps_order_and_obeys_both_patterns(known: list[str], target: str, exclude: str) -> None:
    wanted = [n for n in known if fnmatch.fnmatchcase(n, target) and not fnmatch.fnmatchcase(n, exclude)]
    both_match = all(any(fnmatch.fnmatchcase(n, p) for n in known) for p in (target, exclude))
    if wanted and both_match:
        assert select(known, (target,), (exclude,), what="module") == wanted
    else:
        with pytest.raises(ConfigError):
            select(known, (target,), (exclude,), what="module")


def test_a_pattern_that_matches_nothing_names_the_nearest() -> None:
    for pattern, near in (("stages.0.0.conv3", "stages.0.0.conv"), ("*heed*", "head"), ("stem.con", "stem.conv")):
        with pytest.raises(ConfigError, match=rf"adapter\.targets: pattern .* matches no .*Nearest: '{near}") as caught:
            names(resnet(), ("*conv*", pattern))
        assert repr(pattern) in str(caught.value)
        assert caught.value.exit_code == 2
    with pytest.raises(ConfigError, match=r"adapter\.exclude: pattern 'haed' .*Nearest: 'head'"):
        names(resnet(), ("*",), ("haed",))
    with pytest.raises(ConfigError, match="no such Conv, Linear or Embedding module at all"):
        names(nn.Sequential(nn.ReLU()))
    with pytest.raises(ConfigError, match="matches no"):
        names(resnet(), ("*CONV*",))  # case counts


def test_exclude_wins_and_must_leave_something() -> None:
    everything = names(resnet())
    assert "head.weight" in everything
    assert names(resnet(), ("*",), ("head",)) == [n for n in everything if n != "head.weight"]
    with pytest.raises(ConfigError, match="leaves no Conv"):
        names(resnet(), ("head", "stem.*"), ("*",))


def test_order_is_the_models_whatever_the_order_of_patterns() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(12)))
    assert names(model, ("11", "2", "*")) == [f"{i}.weight" for i in range(12)]
    assert names(model, ("11", "2")) == ["2.weight", "11.weight"]


def test_kinds_of_layers() -> None:
    model = nn.ModuleList(
        [
            nn.Conv1d(1, 1, 1), nn.Conv2d(1, 1, 1), nn.Conv3d(1, 1, 1), nn.ConvTranspose2d(1, 1, 1),
            nn.Linear(1, 1), nn.Embedding(1, 1), nn.LayerNorm(1), nn.Bilinear(1, 1, 1), nn.GRU(1, 1),
            nn.MultiheadAttention(2, 1),
        ]
    )  # fmt: skip
    assert names(model) == [*(f"{i}.weight" for i in range(6)), "9.in_proj_weight", "9.out_proj.weight"]
    assert names(nn.Linear(2, 2)) == ["weight"]


def test_every_place_of_a_tied_weight_is_found() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(3, 2), "b": nn.Linear(2, 3), "c": nn.Linear(2, 3)})
    model["b"].weight = model["a"].weight
    holder = nn.Module()
    holder.register_parameter("table", model["a"].weight)
    model["holder"] = holder
    first, second = find_weights(model, ("*",), ())
    assert (first.name, second.name) == ("a.weight", "c.weight")
    assert [(place.module, place.attribute) for place in first.places] == [
        (model["a"], "weight"),
        (model["b"], "weight"),
        (holder, "table"),
    ]
    # Chosen by the other name it is the same weight; the name is the first that was chosen.
    assert names(model, ("b",)) == ["b.weight"]
    assert len(find_weights(model, ("b",), ())[0].places) == 3


def test_a_module_under_two_names_is_found_by_either_and_once() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": shared})
    assert names(model) == ["a.weight"]
    assert names(model, ("b",)) == ["b.weight"]
    assert len(find_weights(model, ("*",), ())[0].places) == 1


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.spectral_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_parametrised_weight_is_refused_by_name(wrap) -> None:
    with pytest.raises(ConfigError, match=r"0: has no plain weight"):
        names(nn.Sequential(wrap(nn.Linear(3, 3))))


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64])
def test_a_weight_that_is_no_real_number_is_refused(dtype: torch.dtype) -> None:
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(torch.ones(2, 2, dtype=dtype), requires_grad=False)
    with pytest.raises(ConfigError, match=f"stored as {dtype}"):
        names(nn.Sequential(layer))


def test_norms_are_found_by_their_kind_and_tied_ones_once() -> None:
    model = nn.Sequential(
        nn.LayerNorm(2), nn.RMSNorm(2), nn.BatchNorm1d(2), nn.LayerNorm(2, elementwise_affine=False), nn.Linear(2, 2)
    )
    model[2].weight = model[0].weight
    found = find_norms(model, [])
    assert [t.name for t in found] == ["0.weight", "0.bias", "1.weight", "2.bias"]
    assert [place.module for place in found[0].places] == [model[0], model[2]]
    assert find_norms(nn.Linear(2, 2), []) == []
