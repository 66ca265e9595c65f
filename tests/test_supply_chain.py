"""What others bring into a process, code and connections, and what this package lets them do there: nothing unasked."""

import ast
import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import offline
import pytest
from small import language, toml

from nestling.cli.main import main

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
SECRETS = {
    "HF_TOKEN": "hf_cafebabecafebabecafebabe",
    "AWS_SECRET_ACCESS_KEY": "awssecretcafebabe",
    "PGPASSWORD": "pgcafebabe",
    "HTTPS_PROXY": "http://ann:proxycafebabe@127.0.0.1:9",
}
SILENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def test_the_guard_of_all_tests_notices_what_tries_to_connect() -> None:
    tries = [
        lambda: socket.create_connection(("192.0.2.1", 80), timeout=1),
        lambda: socket.getaddrinfo("telemetry.example", 443),
        lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 53)),
        lambda: socket.socket(socket.AF_INET6).connect_ex(("2001:db8::1", 80)),
    ]
    for attempt in tries:
        with pytest.raises(OSError, match="no test connects"):
            attempt()
    assert len(offline.ATTEMPTS) == len(tries)
    offline.ATTEMPTS.clear()
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()
    assert offline.ATTEMPTS == []


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The commands one after the other, in an environment with secrets in it: the folder of what they wrote, and what
    they printed."""
    pytest.importorskip("transformers")
    import contextlib
    import io

    from huggingface_hub import constants

    folder = tmp_path_factory.mktemp("commands")
    inputs = tmp_path_factory.mktemp("inputs")
    (inputs / "images.toml").write_text(toml(folder / "runs", name="images"))
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)  # so that it would try, were it asked to
        quick = ["--rounds", "1", "--machine.no-references"]
        assert main(["plan", str(inputs / "images.toml")]) == 0
        assert main(["run", str(inputs / "images.toml"), *quick, "--quiet"]) == 0
        (run,) = (folder / "runs").iterdir()
        assert main(["report", str(run)]) == 0
        assert main(["ls", str(folder / "runs")]) == 0
        assert main(["generate", "--model", str(language()), "--prompt", "Once", "--max-new-tokens", "4"]) == 0
        assert main(["doctor"]) == 0
    return folder, said.getvalue()


def test_cat_089_no_command_tries_to_connect(everything: tuple[Path, str]) -> None:
    """The guard of all tests would have refused an attempt, and this test then fails as it ends."""
    assert len(list(everything[0].glob("runs/*/report.html"))) == 1
    assert offline.ATTEMPTS == []


def test_cat_089_libraries_are_told_to_be_silent_before_they_are_imported() -> None:
    program = (
        "import os, sys, nestling\n"
        "assert not {'torch', 'transformers', 'huggingface_hub', 'datasets', 'flwr', 'ray'} & set(sys.modules)\n"
        f"print(all(os.environ[k] == v for k, v in {SILENT}.items()))\n"
        "try:\n"
        "    from huggingface_hub import constants\n"
        "    print(constants.HF_HUB_DISABLE_TELEMETRY)\n"
        "except ImportError:\n"
        "    print(True)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in SILENT}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True"], done.stderr
    asked = subprocess.run(
        [sys.executable, "-c", "import os, nestling; print(os.environ['FLWR_TELEMETRY_ENABLED'])"],
        env=environment | {"FLWR_TELEMETRY_ENABLED": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert asked.stdout.strip() == "1"  # whoever wants it has said so


def test_cat_090_secrets_of_the_environment_are_in_nothing_written_or_printed(everything: tuple[Path, str]) -> None:
    folder, said = everything
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 12
    for text in (said.encode(), *(path.read_bytes() for path in files)):
        assert b"cafebabe" not in text


def test_cat_090_an_address_which_may_hold_a_password_is_refused_and_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.toml").write_text(toml(tmp_path / "runs"))
    address = "https://ann:cafebabe@host/base.safetensors?token=cafebabe"
    assert main(["run", str(tmp_path / "small.toml"), "--base.weights", address]) == 2
    said = capsys.readouterr()
    assert "base.weights" in said.err
    assert "cafebabe" not in said.out + said.err
    assert not (tmp_path / "runs").exists()


def test_cat_090_a_secret_in_an_error_is_not_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: object, client: int, message: bytes) -> bytes:
        raise OSError("GET https://ann:cafebabe@host/x?token=cafebabe failed")

    (tmp_path / "small.toml").write_text(toml(tmp_path / "runs"))
    monkeypatch.setattr("nestling.federation.client.Worker.handle", failing)
    assert main(["run", str(tmp_path / "small.toml"), "--quiet", "--machine.no-references"]) == 7
    (folder,) = (tmp_path / "runs").iterdir()
    log = (folder / "log.txt").read_text()
    assert "client_error" in log
    assert "cafebabe" not in log


# The source itself.

CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load", "torch.save", "torch.hub.load",
    "yaml.load", "tempfile.mktemp", "mktemp", "np.load", "numpy.load", "np.fromfile",
}  # fmt: skip
MODULES = {
    "pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml", "xmlrpc", "telnetlib",
    "requests", "urllib.request", "http.client", "ctypes",
}  # fmt: skip
METHODS = {"extractall", "extract", "unpack_archive"}


def banned(source: str) -> list[str]:
    """What in a module runs, or brings in, what others wrote."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [name for name in names if name in MODULES or name.split(".")[0] in MODULES]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS or name.rpartition(".")[2] in METHODS:
                found.append(name)
            for keyword in node.keywords:
                value = ast.unparse(keyword.value)
                if (keyword.arg in ("shell", "allow_pickle", "trust_remote_code") and value != "False") or (
                    keyword.arg == "weights_only"
                ):
                    found.append(f"{keyword.arg}={value}")
    return found


def test_cat_096_the_source_reads_no_pickle_and_runs_no_text() -> None:
    assert len(SOURCES) > 60
    found = {path.name: names for path in SOURCES if (names := banned(path.read_text("utf-8")))}
    assert found == {"process.py": ["ctypes"]}  # one call of the C library, so that a child ends with its parent


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from pickle import loads", "import torch; torch.load(x)", "np.load(x, allow_pickle=True)",
        "yaml.load(x)", "eval(x)", "exec(x)", "subprocess.run(x, shell=True)", "tempfile.mktemp()", "a.extractall(x)",
        "import yaml", "import urllib.request", "f(trust_remote_code=True)", "os.system(x)", "f(weights_only=False)",
    ],
)  # fmt: skip
def test_cat_096_what_is_banned_would_be_found(line: str) -> None:
    assert banned(f"def f():\n    {line}\n")
    assert not banned("import json\njson.loads(x)\nmodel.eval()\nre.compile(x)\nf(trust_remote_code=False)")


def test_cat_096_the_linter_checks_the_source_for_the_same_and_exceptions_say_why() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["ruff"]["lint"]
    assert "S" in settings["select"]
    assert [rule for rule in settings["ignore"] if rule.startswith("S")] == ["S101"]  # assert
    assert not [
        pattern for pattern, rules in settings["per-file-ignores"].items()
        if pattern.startswith("src") and any(rule.startswith("S") and not rule.startswith("SIM") for rule in rules)
    ]  # fmt: skip
    exceptions = [
        (path.name, lines[max(0, number - 1) : number + 1])
        for path in SOURCES
        for lines in [path.read_text("utf-8").splitlines()]
        for number, line in enumerate(lines)
        if re.search(r"noqa:.*\bS\d{3}", line)
    ]
    assert len(exceptions) <= 4
    for name, (before, line) in exceptions:
        reason = line.partition("noqa: ")[2][4:].strip()
        assert len(reason) > 10 or before.strip().startswith("#"), (name, line)


def test_cat_096_the_floors_lie_above_the_known_holes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = [each for extra in project["optional-dependencies"].values() for each in extra]
    wanted = {*project["dependencies"], *extras}  # what two extras need they name alike
    floors = dict(re.match(r"([\w.-]+)>=([\d.]+)", each).groups() for each in wanted)
    assert len(floors) == len(wanted)  # every one has a floor
    for package, least in (("torch", "2.10"), ("transformers", "5.5"), ("jinja2", "3.1.6")):
        assert _version(floors[package]) >= _version(least), package
    assert not {"kernels", "ray", "pyyaml"} & {name.lower() for name in floors}


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


# Names and shapes; text quoted for TOML; counts and sizes, which no NaN gets into.
KNOWN = ("models/backbones.py", "config/load.py")


def test_cat_077_json_is_written_without_nan_wherever_it_is_written() -> None:
    """But for what is hashed or holds text alone."""
    loose = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.dumps", "json.dump"):
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                if given.get("allow_nan") != "False" and given.get("sort_keys") != "True":
                    loose.append(f"{path.relative_to(ROOT / 'src' / 'nestling')}: {ast.unparse(node)}")
    assert len(loose) <= len(KNOWN)
    assert all(any(line.startswith(known) for known in KNOWN) for line in loose), loose
