"""A site's and a server's folder: nobody else can read it, and what is kept there is what is read."""

import stat
import threading
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from small import config

from nestling.config.schema import LanguageConfig, MemoryConfig, NeedleConfig, RunConfig
from nestling.core.errors import ConfigError, RunError
from nestling.deploy.folder import (
    FedSettings,
    SiteSettings,
    home_folder,
    make_private,
    only_one,
    read_settings,
    with_data,
    write_private,
    write_settings,
)  # fmt: skip


def test_settings_come_back_and_only_their_owner_can_read_them(tmp_path: Path) -> None:
    folder = make_private(tmp_path / "a" / "site")
    for settings in (SiteSettings(3, data="/data", whole=True, limit=5.0), FedSettings(wait=1.5, authenticated=False)):
        write_settings(folder, settings)
        assert read_settings(type(settings), folder) == settings
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_secret_is_private_whatever_the_mask_and_the_mask_is_left_as_it_was(tmp_path: Path) -> None:
    write_private(tmp_path / "key", b"secret")
    (tmp_path / "other").write_bytes(b"")
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "other").stat().st_mode) != 0o600


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="link"):
        make_private(tmp_path / "link")


def test_another_folder_is_no_site(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nestling join"):
        read_settings(SiteSettings, tmp_path)
    (tmp_path / "fed.json").write_text('{"more": 1}')
    with pytest.raises(ConfigError, match="other entries"):
        read_settings(FedSettings, tmp_path)


def test_a_machines_own_data_stands_in_the_place_of_the_path(tmp_path: Path) -> None:
    assert with_data(config(tmp_path), "/mine").task.path == "/mine"
    packaged = RunConfig(task=NeedleConfig(), base=LanguageConfig(), adapter=MemoryConfig())
    assert with_data(packaged, "/mine") == packaged


def test_under_plain_flower_a_folder_is_made_once_and_follows_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    folder, moved = home_folder("site-2", SiteSettings(2, data="/a"))
    assert (folder, moved) == (tmp_path / "flower" / "nestling" / "site-2", False)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    write_settings(folder, SiteSettings(2, data="/a", limit=5.0))  # its owner's
    assert home_folder("site-2", SiteSettings(2, data="/a")) == (folder, False)
    assert home_folder("site-2", SiteSettings(2, data="/b")) == (folder, True)
    assert read_settings(SiteSettings, folder) == SiteSettings(2, data="/b", limit=5.0)
    monkeypatch.delenv("FLWR_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "ann"))
    fed, _ = home_folder("fed", FedSettings(authenticated=False))
    assert fed == tmp_path / "ann" / ".flwr" / "nestling" / "fed"
    assert not read_settings(FedSettings, fed).authenticated


@pytest.mark.parametrize(
    "wrong", [{"client": -1}, {"limit": 0.0}, {"limit": 1e12}, {"limit": float("inf")}, {"idle": float("nan")},
              {"idle": 1e12}, {"threads": 0}],
)  # fmt: skip
def test_numbers_that_no_worker_can_use_are_refused(wrong: dict[str, float], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--{next(iter(wrong))}: is "):
        SiteSettings(**({"client": 0} | wrong))
    write_settings(tmp_path, SiteSettings(0))
    edited = (tmp_path / "site.json").read_text()
    (tmp_path / "site.json").write_text(edited.replace("1800.0", '"long"'))
    with pytest.raises(ConfigError, match="of another type"):
        read_settings(SiteSettings, tmp_path)


def test_only_one_process_is_in_a_block_with_a_lock(tmp_path: Path) -> None:
    def taken() -> AbstractContextManager[int]:
        return only_one(tmp_path / "lock", "is taken", where="here")

    with taken():
        with pytest.raises(RunError, match="here: is taken") as caught, taken():
            raise AssertionError
        assert caught.value.exit_code == 6
    with taken():
        pass


def test_who_holds_a_lock_is_named_and_may_be_waited_for(tmp_path: Path) -> None:
    def taken(name: str, wait: float = 0.0) -> AbstractContextManager[int]:
        return only_one(tmp_path / "lock", "is taken", where="here", name=name, wait=wait)

    with taken("run 18446744073709551615"), pytest.raises(RunError, match=r"\(run 18446744073709551615\)"), taken("x"):
        raise AssertionError
    with taken("x\x1b"), pytest.raises(RunError, match=r"is taken \(x\\x1b\)"), taken("y", 0.3):
        raise AssertionError
    first = taken("first")
    first.__enter__()
    freeing = threading.Timer(0.3, lambda: first.__exit__(None, None, None))
    freeing.start()
    noted: list[int] = []
    again = only_one(tmp_path / "lock", "", where="", name="second", wait=30.0, note=lambda: noted.append(1))
    with again:
        assert noted == [1]
        assert (tmp_path / "lock").read_text() == "second"
    freeing.join()
