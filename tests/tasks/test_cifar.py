"""CIFAR's binary version: records as published, and every way in which a download goes wrong."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestling.core.errors import ContextError, WireError
from nestling.tasks import cifar
from nestling.tasks.data import load_images

ITEMS = 4
NAMES = ["cifar10", "cifar100"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few items; the published ones are 30 and 150 MB."""
    for name, known in cifar.PUBLISHED.items():
        monkeypatch.setitem(cifar.PUBLISHED, name, replace(known, train_items=ITEMS, test_items=ITEMS))


def label(name: str, file: int, item: int) -> int:
    return (17 * file + 5 * item) % (10 if name == "cifar10" else 100)


def record(name: str, file: int, item: int) -> bytes:
    """As published: red, green and blue planes, each by rows."""
    fine = label(name, file, item)
    labels = bytes([fine]) if name == "cifar10" else bytes([fine // 5, fine])
    planes = [bytes((file * 40 + item * 9 + colour * 3 + place) % 256 for place in range(1024)) for colour in range(3)]
    return labels + b"".join(planes)


def write(name: str, folder: Path) -> list[Path]:
    known, made = cifar.PUBLISHED[name], []
    folder.mkdir(exist_ok=True)
    for number, file in enumerate(known.train + known.test):
        made.append(folder / file)
        made[-1].write_bytes(b"".join(record(name, number, item) for item in range(ITEMS)))
    return made


def test_the_published_sizes() -> None:
    """Of the files that everybody has: 30,730,000 bytes each, 153,700,000 and 30,740,000."""
    from importlib import reload

    fresh = reload(cifar).PUBLISHED
    assert fresh["cifar10"].train_items * (1 + 3072) == fresh["cifar10"].test_items * (1 + 3072) == 30_730_000
    assert fresh["cifar100"].train_items * (2 + 3072) == 153_700_000
    assert fresh["cifar100"].test_items * (2 + 3072) == 30_740_000
    assert len(fresh["cifar10"].train) == 5


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_records_become_images(name, inside, tmp_path) -> None:
    files = write(name, tmp_path / cifar.PUBLISHED[name].folder if inside else tmp_path)
    train, test = load_images(name, str(tmp_path))
    assert test is not None
    for part, numbers in ((train, range(len(files) - 1)), (test, range(len(files) - 1, len(files)))):
        assert part.y.tolist() == [label(name, number, item) for number in numbers for item in range(ITEMS)]
        assert part.y.dtype == np.int64
        assert part.x.shape == (ITEMS * len(numbers), 3, 32, 32)
        for place, number in enumerate(numbers):
            # Pixel (row 2, column 3) of item 1, in green.
            assert part.x[place * ITEMS + 1, 1, 2, 3] == (number * 40 + 9 + 3 + 2 * 32 + 3) % 256


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_named(name, tmp_path) -> None:
    for file in write(name, tmp_path):
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(ContextError, match=rf"{file.name}: there is no such file.*{name[:5]}.*tar\.gz") as caught:
            load_images(name, str(tmp_path))
        assert caught.value.exit_code == 3
        file.write_bytes(content)


@pytest.mark.parametrize("name", NAMES)
def test_another_length_is_refused(name, tmp_path) -> None:
    file = write(name, tmp_path)[-1]
    content, size = file.read_bytes(), len(record(name, 0, 0))
    for length in (0, 1, size, len(content) - size, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(WireError, match=rf"{length:,} bytes, not 4 records of {size:,}") as caught:
            load_images(name, str(tmp_path))
        assert caught.value.exit_code == 5
    file.write_bytes(content + b"\0")
    with pytest.raises(WireError):
        load_images(name, str(tmp_path))


@pytest.mark.parametrize(("name", "byte", "least"), [("cifar10", 0, 10), ("cifar100", 0, 20), ("cifar100", 1, 100)])
def test_a_label_out_of_range_is_refused(name, byte, least, tmp_path) -> None:
    file = write(name, tmp_path)[0]
    content = bytearray(file.read_bytes())
    place = 2 * len(record(name, 0, 0)) + byte
    content[place] = least
    file.write_bytes(bytes(content))
    with pytest.raises(WireError, match=rf"has a label {least}, of {least} classes"):
        load_images(name, str(tmp_path))
    content[place] = least - 1
    file.write_bytes(bytes(content))
    load_images(name, str(tmp_path))


@settings(max_examples=40)
@given(st.binary(max_size=40), st.integers(0, 3 * 3073))
def test_whatever_is_written_into_a_file_meets_only_wire_errors(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, start: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "mutants"
    file = folder / "data_batch_3.bin"
    if not file.exists():
        write("cifar10", folder)
    content = b"".join(record("cifar10", 2, item) for item in range(ITEMS))
    file.write_bytes(content[:start] + junk + content[start + len(junk) :])
    try:
        train, _ = load_images("cifar10", str(folder))
    except WireError:
        return
    assert train.y.max() < 10


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_pickled_version_is_refused_unread(name, inside, tmp_path) -> None:
    known = cifar.PUBLISHED[name]
    folder = tmp_path / known.pickled_folder if inside else tmp_path
    folder.mkdir(exist_ok=True)
    ran = tmp_path / "ran"
    (folder / known.pickled).write_bytes(f"cos\nsystem\n(S'touch {ran}'\ntR.".encode())
    with pytest.raises(ContextError, match=rf"a pickle, and .*run code.*binary version, {known.archive}") as caught:
        load_images(name, str(tmp_path))
    assert caught.value.exit_code == 3
    assert not ran.exists()
    write(name, tmp_path / known.folder)  # beside the binary version it is nobody's business
    load_images(name, str(tmp_path))
