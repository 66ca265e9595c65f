"""What a run says of itself on the server is shown here, and how it ended there is how the command ends."""

import pytest
from small import finished

from nestling.cli.main import main
from nestling.cli.submit import followed
from nestling.core.errors import RemoteError, RunError, WireError
from nestling.deploy.said import ERROR, FOLDER, LINE, RESULT
from nestling.runs.files import to_json


def test_lines_of_ours_are_shown_and_the_result_is_read(capsys: pytest.CaptureFixture) -> None:
    result = finished()[1]
    log = ["INFO : Starting", f"\x1b[92m{LINE}round=1/2 \x1b[0mx\u202e", "", RESULT + to_json(result.to_dict()), "more"]
    assert followed((f"{line}\n".encode() for line in log), to_stderr=False) == result
    assert capsys.readouterr().out == "round=1/2 x\\u202e\n"
    followed((f"{line}\n".encode() for line in log), to_stderr=True)
    assert capsys.readouterr().out == ""


def test_the_runs_number_is_shown_and_with_it_the_run_is_stopped(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = ["\x1b[32m🎊 Successfully started run 18446744073709551615\x1b[0m", RESULT + to_json(finished()[1].to_dict())]
    followed((f"{line}\n".encode() for line in log), to_stderr=False)
    assert "submit --stop 18446744073709551615" in capsys.readouterr().out

    pytest.importorskip("cryptography")
    programs = pytest.importorskip("nestling.deploy.programs")
    monkeypatch.setattr("nestling.deploy.reach.check_reached", lambda address, ca: None)
    said, asked = {"success": True, "run-id": "5"}, list[list[str]]()
    monkeypatch.setattr(programs, "flwr", lambda folder, args: asked.append(args) or f"✋ Stopping\n{to_json(said)}")
    stop = ["submit", "--stop", "5", "--server", "127.0.0.1:1", "--insecure"]
    assert main(stop) == 0
    assert asked == [["stop", "5", "nestling", "--format", "json"]]
    said = {"success": False, "error-message": "no such run"}
    assert main(stop) == 9
    assert "no such run). Give the number of a run" in capsys.readouterr().err
    said = {
        "success": False,
        "error-message": "Using SuperLink: nestling (x:1)\n\u270b Stopping run ID 5...\nStopping run 5\n\nno run",
    }
    assert main(stop) == 9
    assert "the server: refuses (no run). Give" in capsys.readouterr().err
    said = {"success": False, "error-message": REFUSED.format(what="stop-run")}
    assert main(stop) == 9
    assert "takes no orders from this machine's address. Give them on the server's" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        ["--follow", "5"],
        ["--stop=5"],
        ["--server", "127.0.0.1:1", "--stop", "5"],
        ["--resume=x"],
        ["--server=127.0.0.1:1", "--resume", "x"],
    ],
)
def test_what_is_stopped_or_gone_on_with_may_stand_anywhere(line: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr", reason="needs the extra nestling[flower]")
    reached: list[str] = []

    def check(address: str, ca: object) -> None:
        reached.append(address)
        raise RemoteError("is not reached")

    monkeypatch.setattr("nestling.deploy.reach.check_reached", check)
    server = [] if any("--server" in word for word in line) else ["--server", "127.0.0.1:1"]
    assert main(["submit", *line, *server, "--insecure"]) == 9
    assert reached == ["127.0.0.1:1"]


def test_an_error_there_is_the_error_here() -> None:
    told = [f'{ERROR}{{"error": "sites of clients 1: are not there.", "exit_code": 7}}'.encode()]
    with pytest.raises(RunError, match="sites of clients 1: are not there") as caught:
        followed(told, to_stderr=False)
    assert caught.value.exit_code == 7
    with pytest.raises(RunError) as caught:
        followed([f'{ERROR}{{"exit_code": 0}}'.encode()], to_stderr=False)
    assert caught.value.exit_code == 1


def test_what_went_wrong_at_the_server_is_said_once() -> None:
    told = [f'{ERROR}{{"error": "server: another run is at work. Wait for it to end.", "exit_code": 6}}'.encode()]
    with pytest.raises(RunError) as caught:
        followed(told, to_stderr=False)
    assert str(caught.value).startswith("server: another run is at work.")


BEGUN = b"Successfully started run 7"


NAMED, WAITS = f"{FOLDER}flite--7".encode(), f"{LINE}waiting for the sites".encode()
RESUME = "'nestling submit --resume flite--7 …' goes on with it"


@pytest.mark.parametrize("name", ["--stop", "--follow"])
def test_what_is_no_number_is_told(name: str, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("flwr", reason="needs the extra nestling[flower]")
    assert main(["submit", name, "flite--7", "--server", "127.0.0.1:1", "--insecure"]) == 2
    assert f"{name}: 'flite--7' is no number of a run" in capsys.readouterr().err


def test_a_run_is_followed_from_its_beginning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:  # fmt: skip
    pytest.importorskip("flwr", reason="needs the extra nestling[flower]")
    from nestling.deploy import programs

    monkeypatch.setattr("nestling.deploy.reach.check_reached", lambda address, ca: None)
    result = to_json(finished()[1].to_dict())
    asked: list[list[str]] = []

    class Log:
        def __init__(self, *lines: str) -> None:
            self.stdout = iter(f"{line}\n".encode() for line in lines)

        def terminate(self) -> None: ...
        def wait(self) -> None: ...

    logs = [Log("INFO : Starting logstream", NAMED.decode(), f"{LINE}round=1/2", RESULT + result), Log(NAMED.decode())]
    monkeypatch.setattr(programs, "follow", lambda folder, args: asked.append(args) or logs.pop(0))
    monkeypatch.setattr(
        programs, "flwr", lambda *_: to_json({"success": True, "runs": [{"status": "finished:stopped"}]})
    )
    follow = ["submit", "--follow", "7", "--server", "127.0.0.1:1", "--insecure"]
    assert main(follow) == 0
    assert asked == [["log", "7", "nestling", "--stream"]]
    assert "round=1/2" in capsys.readouterr().out
    assert main(follow) == 7
    assert f"run 7: was stopped. {RESUME}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("log", "status", "code", "said"),
    [
        ([BEGUN, NAMED], "finished:stopped", 7, f"run 7: was stopped. {RESUME}"),
        ([BEGUN, WAITS], "finished:stopped", 7, "run 7: was stopped. It had no round yet: submit it anew"),
        ([BEGUN, NAMED, b"killed"], "finished:failed", 7, rf"run 7: ended without a result \(killed\). {RESUME}"),
        ([BEGUN, WAITS], "finished:failed", 7, "run 7: ended without a result. See the server's output"),
        ([BEGUN, NAMED], "running", 9, f"run 7: goes on at the server.*'nestling submit --stop 7 …' ends it. {RESUME}"),
        ([BEGUN, NAMED, b"down"], "", 9, rf"run 7: is not heard of any more.*\(down\). {RESUME}"),
        ([BEGUN, WAITS], "", 9, "is not heard of any more.*If it had not begun it will.*'submit --stop 7'"),
        ([b"down"], "", 9, r"the server: has not taken the run \(down\)"),
    ],
)
def test_a_log_that_is_cut_short_says_why_and_how_to_go_on(
    log: list[bytes], status: str, code: int, said: str, capsys: pytest.CaptureFixture
) -> None:
    asked: list[str] = []
    with pytest.raises((RunError, RemoteError), match=said) as caught:
        followed(log, to_stderr=False, ended=lambda number: asked.append(number) or status)
    assert caught.value.exit_code == code
    assert asked == (["7"] if BEGUN in log else [])
    assert ("in flite--7; " in capsys.readouterr().out) == (NAMED in log)


def test_the_folders_name_is_shown_once(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(RemoteError, match="--resume flite--7 "):
        followed([BEGUN, NAMED, NAMED, f"{FOLDER}other".encode()], to_stderr=False)
    assert capsys.readouterr().out.count("in flite--7; ") == 1


def test_the_three_forms_are_told_without_a_config(capsys: pytest.CaptureFixture) -> None:
    assert (main(["submit", "--help"]), main(["submit"])) == (0, 2)
    out = capsys.readouterr().out
    assert all(flag in out for flag in ("--server", "--ca", "--insecure", "--stop", "--resume", "--json"))


def test_a_name_from_the_server_is_one_word_of_the_command_that_is_advised(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(RemoteError, match=r"--resume 'x; rm -rf ~' …"):
        followed([BEGUN, f"{FOLDER}x; rm -rf ~".encode()], to_stderr=False)
    assert "--resume 'x; rm -rf ~' …" in capsys.readouterr().out


def test_a_log_that_ends_without_a_result_says_what_it_ended_with() -> None:
    with pytest.raises(RemoteError, match="no such host"):
        followed(["╭─ Error ─╮".encode(), "│ no such host │".encode(), "╰──╯".encode()], to_stderr=False)


REFUSED = "│ Error Client error '403 Forbidden' for url 'https://fed:8443/v1/control/{what}' For more │"


def test_a_machine_that_may_not_submit_is_told_so() -> None:
    with pytest.raises(RemoteError, match=r"the server: takes no orders from this machine's address.*--control"):
        followed([b"Using SuperLink: nestling", REFUSED.format(what="start-run").encode()], to_stderr=False)


def test_whatever_else_is_forbidden_is_not_called_so() -> None:
    """A run that has begun was taken; and other servers, too, say 403."""
    begun = [b"Successfully started run 77", REFUSED.format(what="stream-logs").encode()]
    elsewhere = [b"'403 Forbidden' for url 'https://example.org/model'", b"fatal: disk full"]
    for said, what in ((begun, "is not heard of any more"), (elsewhere, "has not taken the run")):
        with pytest.raises(RemoteError, match=what):
            followed(said, to_stderr=False)


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 1}', "NaN"])
def test_a_result_is_read_as_strictly_as_a_file(text: str) -> None:
    with pytest.raises(WireError):
        followed([f"{RESULT}{text}".encode()], to_stderr=False)


@pytest.mark.parametrize("line", [["keys", "list"], ["keys", "new", "k"], ["submit", "--stop", "5"]])
def test_without_flower_each_command_names_the_extra(
    line: list[str], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nestling.engines import flower_compat

    def version(name: str) -> str:
        raise flower_compat.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(flower_compat.metadata, "version", version)
    where = ["--server", "127.0.0.1:1", "--insecure"] if line[0] == "submit" else []
    assert main([*line, *where]) == 3
    assert "pip install 'nestling[flower]'" in capsys.readouterr().err
