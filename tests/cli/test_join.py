"""`nestling join`: what it is told stands in the site's folder, which it has for itself as long as it lives."""

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra nestling[flower]")

from nestling.cli.main import main
from nestling.deploy import programs, proxy
from nestling.deploy.folder import SiteSettings, read_settings

LINE = ["join", "--server", "127.0.0.1:1", "--insecure", "--dir", "s", "--client"]


def test_a_second_join_in_a_folder_changes_nothing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    killed, second = list[Path](), list[int]()

    def runs(line: object, environment: object, **more: object) -> int:
        if not second:
            second.append(main([*LINE, "2", "--new-base"]))
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(programs, "run_until_ended", runs)
    monkeypatch.setattr(proxy, "kill", killed.append)
    (tmp_path / "s").mkdir(mode=0o700)
    (tmp_path / "s" / "pinned").touch()
    assert main([*LINE, "1", "--threads", "2"]) == 0
    assert second == [6]
    assert "another 'nestling join' is at work in it" in capsys.readouterr().err
    assert read_settings(SiteSettings, tmp_path / "s") == SiteSettings(1, threads=2)
    assert (tmp_path / "s" / "pinned").exists()
    assert killed == [tmp_path / "s"]  # as the first one ended
    assert main([*LINE, "2"]) == 0


@pytest.mark.parametrize("more", [["-1"], ["0", "--limit", "inf"], ["0", "--idle", "1e12"], ["0", "--threads", "0"]])
def test_numbers_that_cannot_be_are_refused_before_anything_is_made(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*LINE, *more]) == 2
    assert list(tmp_path.iterdir()) == []
