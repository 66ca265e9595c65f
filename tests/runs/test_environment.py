"""What is written down about a machine, and what is not."""

import getpass
import json
import platform
from pathlib import Path

import pytest

from nestling.runs import environment
from nestling.runs.environment import describe, without_private, without_secrets

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_cat_090_092_versions_are_there_and_names_are_not(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = describe()
    assert {"nestling", "torch", "numpy", "numba", "safetensors"} <= found["packages"].keys()
    assert found["settings"]["OMP_NUM_THREADS"] == "3"
    text = json.dumps(found)
    assert "hf_secretsecret" not in text
    assert platform.node() not in text or len(platform.node()) < 3
    assert str(Path.home()) not in text
    assert getpass.getuser() not in text or len(getpass.getuser()) < 3


def checkout(root: Path) -> Path:
    (root / "src" / "nestling").mkdir(parents=True)
    (root / ".git" / "refs" / "heads").mkdir(parents=True)
    (root / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    return root


def test_the_commit_is_found_loose_packed_detached_and_in_a_worktree(tmp_path):
    root = checkout(tmp_path / "a")
    assert environment._commit(root) is None
    (root / ".git" / "packed-refs").write_text(f"# pack-refs\n{COMMIT} refs/heads/main\n")
    assert environment._commit(root) == COMMIT
    (root / ".git" / "refs" / "heads" / "main").write_text(COMMIT[::-1] + "\n")
    assert environment._commit(root) == COMMIT[::-1]

    git = root / ".git" / "worktrees" / "b"
    git.mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "commondir").write_text("../..\n")
    tree = tmp_path / "b"
    (tree / "src" / "nestling").mkdir(parents=True)
    (tree / ".git").write_text(f"gitdir: {git}\n")
    assert environment._commit(tree) == COMMIT[::-1]

    (root / ".git" / "HEAD").write_text(COMMIT)
    assert environment._commit(root) == COMMIT


def test_somebody_elses_checkout_and_a_broken_one_say_nothing(tmp_path):
    (tmp_path / ".git").mkdir()
    assert environment._commit(tmp_path) is None
    root = checkout(tmp_path / "c")
    (root / ".git" / "HEAD").write_bytes(b"\xff\xfe")
    assert environment._commit(root) is None
    (root / ".git" / "HEAD").write_text("ref: refs/heads/<script>")
    assert environment._commit(root) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("path = '/home/ann/data/x'", "path = '~/data/x'"),
        ("path = '/Users/ann'", "path = '~'"),
        (r"C:\Users\ann\x", r"~\x"),
        ("a /root/x", "a ~/x"),
        ("/data/root/x and /rootless", "/data/root/x and /rootless"),
        ("https://ann:pw@host/x", "https://***@host/x"),
        ("nestling run x.toml --hub-token abc", "nestling run x.toml --hub-token ***"),
        ('password = "a b"\nlr = 1', "password = ***\nlr = 1"),
        ('{"api_key": "abc", "b": 1}', '{"api_key": ***, "b": 1}'),
        ("max_tokens = 5", "max_tokens = 5"),
        ("https:/ann:pw@host/x", "https:/***@host/x"),
        ("https://host/x?token=abc&b=1", "https://host/x?token=***&b=1"),
        ("AWS_SECRET_ACCESS_KEY=abc x", "AWS_SECRET_ACCESS_KEY=*** x"),
        ("Authorization: Bearer abc.def x", "Authorization: *** x"),
        ("private_key: abc", "private_key: ***"),
        ("refused hf_abcdefghijklmnopqrst (401)", "refused *** (401)"),
        ("half a token of the text, its secret word", "half a token of the text, its secret word"),
        (f"my_token{' ' * 40}={' ' * 40}abc", f"my_token{' ' * 40}={' ' * 40}***"),
        ("_" * 200_000, "_" * 200_000),  # minutes, if each start of a name is read to its end
        ("--" + "a" * 200_000, "--" + "a" * 200_000),
    ],
)
def test_cat_090_092_homes_and_secrets_are_taken_out(text, expected):
    assert without_private(text) == expected


def test_cat_090_what_is_printed_keeps_its_paths() -> None:
    text = f"{Path.home()}/x, https://ann:pw@host/y?token=abc"
    assert without_secrets(text) == f"{Path.home()}/x, https://***@host/y?token=***"
