"""`nestling doctor` says what is there, and warns before a machine that would give other numbers is used."""

import pytest

import nestling.core.seeds
from nestling import __version__
from nestling.cli.main import main
from nestling.core.errors import SeedError
from nestling.core.seeds import SCHEME


def test_doctor_names_versions_device_kernel_extras_and_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    text = " ".join(out.replace("│", " ").split())
    for word in (
        f"nestling {__version__}",
        "torch 2.",
        "device",
        "sign map",
        "extra [digits]",
        "extra [hub]",
        "idle threads",
    ):
        assert word in text, word
    assert f"{SCHEME}: as published" in text


def test_doctor_says_how_to_get_an_extra_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import nestling.cli.doctor

    monkeypatch.setattr(nestling.cli.doctor, "find_spec", lambda name: None)
    assert main(["doctor"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "missing mlxtend, sklearn: pip install 'nestling[digits]'" in text
    assert "missing datasets: pip install 'nestling[hub]'" in text


@pytest.mark.parametrize(("variable", "value"), [("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "infinity")])
def test_doctor_warns_of_threads_that_spin(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")
    assert main(["doctor"]) == 0
    assert "spin: training slows down" not in capsys.readouterr().out
    monkeypatch.setenv(variable, value)
    assert main(["doctor"]) == 0
    assert "spin: training slows down" in " ".join(capsys.readouterr().out.split())


def test_cat_097_a_machine_whose_stream_is_wrong_is_exit_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong() -> None:
        raise SeedError("differs from its published known answers", where=SCHEME, remedy="Do not use this machine.")

    monkeypatch.setattr(nestling.core.seeds, "self_test", wrong)
    assert main(["doctor"]) == 4
    assert "Do not use this machine." in capsys.readouterr().err
