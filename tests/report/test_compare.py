"""Runs side by side: what may differ silently, and what may not."""

import pytest

from nestling.core.errors import ConfigError, ContextError
from nestling.report.compare import compare
from nestling.runs.folder import create

CONFIG = 'name = "{name}"\nseed = {seed}\nrounds = 3\n[adapter]\nkind = "{kind}"\n[local]\nlr = {lr}\n'


def config(name="a", seed=0, kind="latent", lr=0.01):
    return CONFIG.format(name=name, seed=seed, kind=kind, lr=lr)


def test_seed_and_method_differ_without_a_word(result, run_of):
    paths = [
        run_of(result(), config=config()),
        run_of(result(seed=1), config=config(seed=1)),
        run_of(result("fedavg"), config=config(name="b", kind="full")),
    ]
    found = compare(paths)
    assert found.warnings == []
    assert [len(row.accuracies) for row in found.rows if not row.is_reference] == [2, 1]
    assert len(found.runs) == 3


def test_another_setting_is_named_with_its_values(result, run_of):
    paths = [run_of(result(), config=config()), run_of(result("fedavg", rounds=2), config=config(lr=0.5))]
    assert compare(paths).warnings == [
        "the runs also differ in local.lr: 0.01, 0.5",
        "the runs also differ in rounds: 2, 3",
    ]


def test_another_base_is_named_even_without_a_configuration(result, run_of):
    paths = [run_of(result()), run_of(result(seed=1, base_hash="ff" * 32))]
    assert compare(paths).warnings == ["the runs also differ in base_hash: abababababab…, ffffffffffff…"]


def test_a_setting_only_one_has_and_a_broken_configuration(result, run_of):
    paths = [run_of(result(), config="x = 1"), run_of(result(seed=1), config="")]
    assert compare(paths).warnings == ["the runs also differ in x: 1, unset"]
    for broken in ("x = ", f"x = {'9' * 5000}", f"x = 0x{'f' * 5000}", f"x = {'[' * 5000}"):
        paths = [run_of(result(), config=broken), run_of(result(seed=1), config="")]
        assert "cannot be read" in " ".join(compare(paths).warnings)


def test_a_seed_given_twice_is_said(result, run_of):
    paths = [run_of(result(accuracy=0.1)), run_of(result(accuracy=0.9))]
    found = compare(paths)
    assert len(found.warnings) == 1
    assert "seed 0" in found.warnings[0]
    assert next(row for row in found.rows if not row.is_reference).accuracies == (0.9,)


def test_one_seed_under_other_settings_is_no_repetition(result, run_of):
    far, near = result(accuracy=0.1, settings="ab12cd34"), result(accuracy=0.9, settings="ef567890")
    found = compare([run_of(far, config=config(lr=0.5)), run_of(near, config=config())])
    assert found.warnings == ["the runs also differ in local.lr: 0.01, 0.5"]
    assert [row.accuracies for row in found.rows if not row.is_reference] == [(0.1,), (0.9,)]
    again = compare([run_of(far), run_of(far)])
    assert [w for w in again.warnings if "more than once" in w] == [
        "flite, int4-message, latent, digits, 3 rounds, 2 clients, α = 0.1, seed 0 is given more than once; "
        "the last one counts"
    ]


def test_unfinished_runs_are_left_out(result, run_of, tmp_path):
    unfinished = create(tmp_path, "other", "c0ffee").path
    found = compare([unfinished, run_of(result())])
    assert len(found.runs) == 1
    assert "no result" in found.warnings[0]
    with pytest.raises(ContextError):
        compare([unfinished])
    with pytest.raises(ContextError):
        compare([])
    with pytest.raises(ConfigError):
        compare([tmp_path / "nowhere"])
