"""The README does what it says."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_library_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), flags=re.DOTALL)
    assert len(code.strip().splitlines()) <= 12
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.split() == ["5120"]
    assert (tmp_path / "my-adapter" / "adapter.safetensors").is_file()


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README.read_text("utf-8")):
        assert (README.parent / target).exists(), target
