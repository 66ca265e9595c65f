"""Checkpoints are whole or passed over: what is written comes back to the bit, and no damage is read as a state."""

import json
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from nestling.core.errors import StorageError, WireError
from nestling.runs import checkpoint as module
from nestling.runs.checkpoint import Checkpoint, CheckpointWarning, newest_checkpoint, write_checkpoint
from nestling.runs.folder import RunFolder, create

STATE = np.float32([1.5, -0.0, 1e-45, 3e38])


@pytest.fixture
def folder(tmp_path: Path):
    with create(tmp_path, "run", "c0ffee00") as made:
        yield made


def example(number: int = 3) -> Checkpoint:
    server = {"momentum": np.float64([0.1, 0.2]), "step": np.array(7)}
    clients = {
        0: {"rule.local": STATE + 1, "optimizer.0.step": np.array(3.0, np.float32)},
        12: {"codec.error": np.zeros(4, np.float32), "codec.q": np.asfortranarray(np.arange(6.0).reshape(2, 3))},
    }
    return Checkpoint(number, STATE, server, clients, {"seconds": 1.5, "refusals": {"short": 2}, "none": None})


def files(folder: RunFolder) -> list[Path]:
    return sorted((folder.path / "checkpoints").iterdir())


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(
        (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
        for x, y in ((np.ascontiguousarray(a[k]).reshape(a[k].shape), b[k]) for k in a)
    )


def test_what_is_written_comes_back_to_the_bit(folder: RunFolder) -> None:
    written = example()
    write_checkpoint(folder, written)
    found = newest_checkpoint(folder.path)
    assert found is not None
    assert (found.round, found.facts) == (3, written.facts)
    assert found.state.tobytes() == STATE.tobytes()
    assert same(dict(written.server), dict(found.server))
    assert sorted(found.clients) == [0, 12]
    for client, kept in written.clients.items():
        assert same(dict(kept), dict(found.clients[client]))


def test_an_empty_folder_has_none_and_other_files_are_passed_over(folder: RunFolder) -> None:
    assert newest_checkpoint(folder.path) is None
    folder.write("checkpoints/.round-000001.tmp.12", b"half")
    folder.write("checkpoints/notes.txt", b"mine")
    assert newest_checkpoint(folder.path) is None
    write_checkpoint(folder, example(1))
    assert (folder.path / "checkpoints" / "notes.txt").read_bytes() == b"mine"


def test_the_last_two_are_kept(folder: RunFolder) -> None:
    for number in range(1, 6):
        write_checkpoint(folder, example(number))
    assert [path.name[:12] for path in files(folder)] == ["round-000004", "round-000005"]


def test_cat_069_a_damaged_newest_one_is_passed_over_aloud(folder: RunFolder) -> None:
    write_checkpoint(folder, example(1))
    write_checkpoint(folder, example(2))
    newest = files(folder)[1]
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.warns(CheckpointWarning, match=r"round-000002.*another content.*The one of round 1 is used"):
        found = newest_checkpoint(folder.path)
    assert found is not None
    assert found.round == 1


def test_cat_069_if_all_are_damaged_nothing_is_begun_again_in_silence(folder: RunFolder) -> None:
    write_checkpoint(folder, example(1))
    write_checkpoint(folder, example(2))
    for path in files(folder):
        path.write_bytes(b"")
    with pytest.raises(WireError, match="no checkpoint that is whole") as error:
        newest_checkpoint(folder.path)
    assert error.value.exit_code == 5
    assert "nestling run" in str(error.value)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_cat_069_no_damage_is_read_as_a_state(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    with create(tmp_path_factory.mktemp("runs"), "run", "c0ffee00") as folder:
        write_checkpoint(folder, example())
        (path,) = files(folder)
        content = bytearray(path.read_bytes())
        how = data.draw(st.sampled_from(["cut", "flip", "zero", "append"]))
        place = data.draw(st.integers(0, len(content) - 1))
        if how == "cut":
            del content[place:]
        elif how == "flip":
            content[place] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "zero":
            content[place : place + 16] = bytes(len(content[place : place + 16]))
        else:
            content += data.draw(st.binary(min_size=1, max_size=64))
        changed = bytes(content) != path.read_bytes()
        path.write_bytes(content)
        if changed:
            with pytest.raises(WireError):
                newest_checkpoint(folder.path)


def renamed(folder: RunFolder, data: bytes, number: int = 3) -> None:
    """A file whose name fits its content, whatever that is."""
    digest = module.hashlib.sha256(data).hexdigest()[:16]
    folder.write(f"checkpoints/round-{number:06d}--{digest}.safetensors", data)


def document(**changes: object) -> dict[str, str]:
    return {"nestling": json.dumps({"schema": 1, "round": 3, "facts": {}} | changes)}


@pytest.mark.parametrize(
    ("arrays", "metadata"),
    [
        ({"state": STATE}, None),
        ({"state": STATE}, {"other": "x"}),
        ({"state": STATE}, {"nestling": "{"}),
        ({"state": STATE}, {"nestling": "[" * 2000}),
        ({"state": STATE}, document(schema=2)),
        ({"state": STATE}, document(round=4)),
        ({"state": STATE}, document(facts=[])),
        ({"server.m": STATE}, document()),
        ({"state": STATE.astype(np.float64)}, document()),
        ({"state": STATE.reshape(2, 2)}, document()),
        ({"state": np.float32([np.nan])}, document()),
        ({"state": STATE, "memory.S": STATE}, document()),
        ({"state": STATE, "client.-1.x": STATE}, document()),
    ],
)
def test_a_file_that_is_no_checkpoint_is_refused(folder: RunFolder, arrays: dict, metadata: dict | None) -> None:
    renamed(folder, save(arrays, metadata))
    with pytest.raises(WireError):
        newest_checkpoint(folder.path)


def test_text_bytes_and_links_are_refused(folder: RunFolder, tmp_path: Path) -> None:
    renamed(folder, b"")
    renamed(folder, (2**63).to_bytes(8, "little") + b"{}", number=4)
    write_checkpoint(folder, example(5))
    real = next(path for path in files(folder) if path.name.startswith("round-000005"))
    real.rename(tmp_path / "elsewhere")
    real.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WireError):
        newest_checkpoint(folder.path)


def test_cat_065_a_disk_that_fails_leaves_the_older_ones(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(folder, example(1))
    write_checkpoint(folder, example(2))

    def broken(handle: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", broken)
        with pytest.raises(StorageError) as error:
            write_checkpoint(folder, example(3))
    assert error.value.exit_code == 8
    assert [path.name[:12] for path in files(folder)] == ["round-000001", "round-000002"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = newest_checkpoint(folder.path)
    assert found is not None
    assert found.round == 2


def test_cat_083_a_hundred_checkpoints_leave_two_files_and_none_open(folder: RunFolder) -> None:
    opened = len(os.listdir("/proc/self/fd"))
    for number in range(1, 101):
        write_checkpoint(folder, example(number))
    assert [path.name[:12] for path in files(folder)] == ["round-000099", "round-000100"]
    assert len(os.listdir("/proc/self/fd")) == opened
