"""The README does what it says."""

import re
from pathlib import Path

import pytest

from nestling.models import assets

README = Path(__file__).parents[1] / "README.md"
REAL = assets.find("smollm2-135m")  # before the tests' own cache is set


def examples() -> list[str]:
    found = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), flags=re.DOTALL)
    assert len(found) == 2
    return found


def test_library_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    code = examples()[0]
    assert len(code.strip().splitlines()) <= 12
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.split() == ["5120"]
    assert (tmp_path / "my-adapter" / "adapter.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.skipif(REAL is None, reason="needs 'nestling fetch smollm2-135m'")
def test_memory_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("NESTLING_CACHE", str(tmp_path))
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / REAL.name).symlink_to(REAL)
    exec(compile(examples()[1], "README.md", "exec"), {})
    tokens, held = map(int, capsys.readouterr().out.split())
    assert tokens > 400
    assert held < 4e6


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README.read_text("utf-8")):
        assert (README.parent / target).exists(), target
