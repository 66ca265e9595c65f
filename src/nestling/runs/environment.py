"""What a result depends on besides its configuration: versions, platform, threads; never who ran it or on which host.

Versions come from the packages' metadata, so that nothing heavy is imported to write them down.
"""

import os
import platform
import re
from importlib import metadata
from pathlib import Path

_PACKAGES = (
    "nestling", "torch", "numpy", "numba", "safetensors", "jaxtyping", "matplotlib", "rich", "tyro",
    "datasets", "flwr", "mlxtend", "peft", "scikit-learn", "transformers",
)  # fmt: skip
# Settings that change speed or the order of a sum; no other variable is read, for they hold secrets and names.
_SETTINGS = (
    "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "GOMP_SPINCOUNT", "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "ATEN_CPU_CAPABILITY",
)  # fmt: skip

_HOME = re.compile(r"(?:/home|/Users)/[^/\s'\":,]+|[A-Za-z]:\\Users\\[^\\\s'\":,]+|(?<![\w.-])/root(?![\w.-])")
_URL_PASSWORD = re.compile(r"(?<=:)(//?)[^/\s@'\"]+@")  # one slash: an address that went through a `Path`
# Bounded and possessive: the text may be somebody else's, made to take long. In prose a token is a part of a text, so
# its value has to follow a sign or a flag's name.
_NAME = (
    r"(?:api[_-]?key|access[_-]?key|private[_-]?key|authorization|[\w-]{0,99}token|[\w-]{0,99}secret|password|passwd)"
)
_VALUE = r"((?:bearer |basic )?(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s,}\"'&]+))"
_SECRET = re.compile(rf"(?im)((?:^|[\s.\-_\"'{{,?&;]){_NAME}[\"']?\s*+[=:]\s*+){_VALUE}")
_FLAG = re.compile(rf"(?im)((?:^|\s)--[\w.-]{{0,99}}?{_NAME}\s++){_VALUE}")
_KNOWN = re.compile(r"\b(?:hf_|gh[pousr]_|sk-|xox[abp]-)[A-Za-z0-9_-]{16,}")  # tokens of well-known services


def describe() -> dict[str, object]:
    """Python, platform, processor count, package versions, commit and thread settings. Never fails.

    >>> sorted(describe())
    ['commit', 'cpus', 'packages', 'platform', 'python', 'settings']
    """
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": f"{platform.system()} {platform.machine()} {' '.join(platform.libc_ver())}".strip(),
        "cpus": os.cpu_count(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "commit": _commit(Path(__file__).resolve().parents[3]),
        "settings": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit(root: Path) -> str | None:
    """The checked-out commit if `root` is a source checkout of this package; read from files, no program is run."""
    try:
        # An environment may lie inside somebody else's checkout, whose commit says nothing about us.
        if not (root / "src" / "nestling").is_dir() or not (root / ".git").exists():
            return None
        git = root / ".git"
        if git.is_file():  # a worktree: "gitdir: <folder>"
            git = root / git.read_text().removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return _hexadecimal(head)
        reference = head.removeprefix("ref: ")
        common = git / (git / "commondir").read_text().strip() if (git / "commondir").exists() else git
        for folder in (git, common):
            if (folder / reference).is_file():
                return _hexadecimal((folder / reference).read_text().strip())
        lines = (common / "packed-refs").read_text().splitlines()
        return next((_hexadecimal(line.split()[0]) for line in lines if line.endswith(f" {reference}")), None)
    except (OSError, ValueError, IndexError):
        return None


def _hexadecimal(text: str) -> str | None:
    return text if re.fullmatch(r"[0-9a-f]{40,64}", text) else None


def without_private(text: str) -> str:
    """`text` with home folders as `~` and passwords, tokens and keys as `***`, fit for a report that is passed on.

    >>> without_private("data = '/home/ann/x'")
    "data = '~/x'"
    >>> without_private('hub_token = "abc"')
    'hub_token = ***'
    """
    home = str(Path.home())
    if len(home) > 1:
        text = re.sub(rf"(?<![\w.-]){re.escape(home)}(?![\w.-])", "~", text)
    return without_secrets(_HOME.sub("~", text))


def without_secrets(text: str) -> str:
    """`text` with passwords, tokens and keys as `***`; paths stay, for whoever reads it has to find them.

    >>> without_secrets("https://ann:pw@host/x: there is no such file")
    'https://***@host/x: there is no such file'
    """
    text = _KNOWN.sub("***", _URL_PASSWORD.sub(r"\1***@", text))
    return _FLAG.sub(r"\1***", _SECRET.sub(r"\1***", text))
