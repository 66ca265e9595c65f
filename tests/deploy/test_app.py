"""The server's app over a grid in this process, whose nodes are sites: settings in, result out, to the bit."""

import dataclasses
import fcntl
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small import config, images

pytest.importorskip("flwr", reason="needs the extra nestling[flower]")

from flwr.app import Context, Message, MessageType, RecordDict

from nestling.api import run
from nestling.config.load import dump_config, load_config
from nestling.config.schema import LanguageConfig, MemoryConfig, NeedleConfig, PrivacyConfig, RunConfig
from nestling.core.errors import ConfigError, ContextError, RunError
from nestling.core.types import Failure
from nestling.deploy import app
from nestling.deploy.app import fed_folder, own_settings, run_over, site_folder
from nestling.deploy.folder import FedSettings, SiteSettings, make_private, read_settings, write_settings
from nestling.deploy.proxy import GRACE, START
from nestling.deploy.warm import Site, outcome
from nestling.engines import flower_compat as compat
from nestling.engines.flower import from_record, kind_of, to_record, to_refusal

compat.pretend_task()


class Nodes:
    """A grid whose node 100 + n is the site of client n."""

    def __init__(self, folder: Path, clients: int) -> None:
        self.waiting: list[Any] = []
        self.count = 0
        for number in range(clients):
            settings = SiteSettings(number, data=str(images()))
            write_settings(make_private(folder / f"s{number}"), settings)
        self.sites = {100 + number: Site(folder / f"s{number}") for number in range(clients)}

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=node) for node in self.sites]

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        ids = []
        for message in messages:
            node, body = message.metadata.dst_node_id, from_record(message.content)
            assert isinstance(body, bytes)
            answer = outcome(self.sites[node].answer, kind_of(message.content), body)
            self.count += 1
            ids.append(f"m{self.count}")
            facts = SimpleNamespace(reply_to_message_id=ids[-1], src_node_id=node)
            record = to_refusal(answer) if isinstance(answer, Failure) else to_record(answer)
            self.waiting.append(SimpleNamespace(metadata=facts, content=record, has_error=lambda: False))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Any]:
        ids = set(message_ids)
        come = [reply for reply in self.waiting if reply.metadata.reply_to_message_id in ids]
        self.waiting = [reply for reply in self.waiting if reply not in come]
        return come


def server(folder: Path) -> Path:
    fed = make_private(folder / "fed")
    write_settings(fed, FedSettings(data=str(images()), wait=60.0, authenticated=False))
    return fed


def test_a_submitted_config_ends_in_the_state_of_a_run_in_process_to_the_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    settings = config(tmp_path / "here")
    submitted = dataclasses.replace(settings, task=dataclasses.replace(settings.task, path=""))
    fed = server(tmp_path)
    there = json.loads(run_over(Nodes(tmp_path, 3), fed, {"config": dump_config(submitted)}))
    here = run(settings)
    assert there["state_digest"] == here.state_digest
    assert there["base_hash"] == here.base_hash
    assert there["bytes_up"] == here.bytes_up
    assert there["rejected"] == {}
    said = capsys.readouterr().out
    assert "nestling: round=2/2 clients=3/3" in said
    assert "waiting for the sites" in said
    # and a run that is done is left alone when it is asked to go on, whatever sites there are
    name = Path(there["run_dir"]).name
    assert json.loads(run_over(Nodes(tmp_path, 0), fed, {"resume": name}))["state_digest"] == here.state_digest
    assert Path(there["run_dir"]).parent == fed / "runs"
    assert load_config(fed / "runs" / name / "config.toml").base.weights.startswith(str(fed / "bases"))


@pytest.mark.parametrize(
    ("server", "needed"), [({"min_replies": 2}, 2), ({"aggregate": "median", "hostile_share": 0.34}, 3), ({}, 1)]
)
def test_so_many_sites_are_waited_for_as_a_round_needs_replies(
    server: dict[str, Any], needed: int, tmp_path: Path
) -> None:  # fmt: skip
    settings = config(tmp_path)
    changed = dataclasses.replace(settings.server, weighting="uniform", **server)
    assert app.prepare(dataclasses.replace(settings, server=changed), make_private(tmp_path / "fed"), "x")[3] == needed


def test_a_secret_draw_is_waited_for_by_nobody(tmp_path: Path) -> None:
    """A wait would tell who was drawn."""
    pytest.importorskip("dp_accounting", reason="needs the extra nestling[dp]")
    settings = config(tmp_path)
    settings = dataclasses.replace(
        settings,
        server=dataclasses.replace(settings.server, weighting="uniform", clients_per_round=1),
        privacy=PrivacyConfig(noise=1.0, sampling="poisson"),
    )
    assert app.prepare(settings, make_private(tmp_path / "fed"), "x")[3] == 0


def test_a_run_goes_on_to_the_bit_after_another_one_with_its_data_and_its_folder_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the sites keep of it is still there, and what lies elsewhere now is found."""
    patience, engine = list[float](), app.FlowerEngine

    def noted(*args: Any, ttl: float, **more: Any) -> Any:
        patience.append(ttl)
        return engine(*args, ttl=ttl, **more)

    monkeypatch.setattr(app, "FlowerEngine", noted)
    settings = config(tmp_path / "here")
    settings = dataclasses.replace(settings, local=dataclasses.replace(settings.local, rule="ssi"))
    fed, nodes = server(tmp_path), Nodes(tmp_path, 3)
    there = json.loads(run_over(nodes, fed, {"config": dump_config(settings)}))
    run_over(nodes, fed, {"config": dump_config(dataclasses.replace(settings, seed=1))})
    fed = fed.rename(tmp_path / "moved")
    write_settings(fed, FedSettings(str(shutil.copytree(images(), tmp_path / "data")), authenticated=False, device="x"))
    folder = fed / "runs" / Path(there["run_dir"]).name
    (folder / "status").write_text("running\n")
    max((folder / "checkpoints").iterdir()).unlink()  # as if it had been killed in its last round
    again = json.loads(run_over(nodes, fed, {"resume": folder.name}))
    assert again["state_digest"] == there["state_digest"] == run(settings).state_digest
    assert load_config(folder / "config.toml").task.path == str(tmp_path / "data")
    assert patience == [START + GRACE + 3600] * 3
    (folder / "status").write_text("running\n")
    (folder / "command.txt").write_text("nestling run\n")
    with pytest.raises(ConfigError, match="was not begun over these sites"):
        run_over(nodes, fed, {"resume": folder.name})


def test_the_last_runs_are_named_where_one_is_gone_on_with_that_is_none(tmp_path: Path) -> None:
    fed = server(tmp_path)
    with pytest.raises(ConfigError, match=r"nope: is no run of this server\. The last that it has: none\.$"):
        run_over(Nodes(tmp_path, 0), fed, {"resume": "../nope"})
    for name in ("a", "b"):
        (fed / "runs" / name).mkdir(parents=True)
        (fed / "runs" / name / "config.toml").touch()
    with pytest.raises(ConfigError, match=r"has: a, b\."):
        run_over(Nodes(tmp_path, 0), fed, {"resume": "nope"})


def test_a_run_without_settings_is_no_run_by_the_defaults(tmp_path: Path) -> None:
    for given in ({}, {"config": " \n"}):
        with pytest.raises(ConfigError, match="is empty"):
            run_over(Nodes(tmp_path, 0), server(tmp_path), given)


def test_one_run_at_a_time(tmp_path: Path) -> None:
    fed = server(tmp_path)
    with (fed / "run.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="another run is at work") as caught:
            run_over(Nodes(tmp_path, 0), fed, {"config": ""})
    assert caught.value.exit_code == 6


def test_a_config_chooses_no_path_of_the_servers(tmp_path: Path) -> None:
    fed = server(tmp_path)
    given = config("/etc")
    task, base = dataclasses.replace(given.task, path="/etc"), dataclasses.replace(given.base, weights="/etc/passwd")
    settings = FedSettings(data="/srv/own")
    own = own_settings(dataclasses.replace(given, task=task), fed, settings)
    assert (own.task.path, own.machine.out, own.machine.workers) == ("/srv/own", str(fed / "runs"), 1)
    with pytest.raises(ConfigError, match="not among the server's bases"):
        own_settings(dataclasses.replace(given, base=base), fed, settings)
    make_private(fed / "bases")
    (fed / "bases" / "passwd").touch()
    named: RunConfig = own_settings(dataclasses.replace(given, base=base), fed, settings)
    assert named.base.weights == str(fed / "bases" / "passwd")
    for name in ("../..", "/etc", "none"):
        with pytest.raises(ConfigError, match="no run of this server"):
            run_over(Nodes(tmp_path, 0), fed, {"resume": name})


def test_a_language_model_is_a_packaged_one_or_the_servers_own(tmp_path: Path) -> None:
    def own(model: str, settings: FedSettings) -> str:
        asked = RunConfig(task=NeedleConfig(), base=LanguageConfig(model=model), adapter=MemoryConfig())
        return own_settings(asked, tmp_path, settings).base.model

    for model in ("/etc", "meta/llama", "../x"):
        with pytest.raises(ConfigError, match=r"not a packaged model. nestling serve … --model"):
            own(model, FedSettings())
    assert own("smollm2-135m", FedSettings()) == "smollm2-135m"
    assert own("/etc", FedSettings(model="/models/mine")) == "/models/mine"


def test_a_site_that_refuses_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 3)
    (tmp_path / "s1" / "pinned").write_text("f" * 64)
    with pytest.raises(ContextError, match="this site has agreed to ffffffffffff"):
        run_over(nodes, server(tmp_path), {"config": dump_config(config(tmp_path))})


def context(node: dict[str, Any], settings: dict[str, Any]) -> Context:
    return Context(run_id=1, node_id=7, node_config=node, state=RecordDict(), run_config=settings)


def test_under_plain_flower_each_side_has_a_folder_in_flowers_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.delenv(app.FED, raising=False)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setenv(app.DATA, "/srv/held-out")
    with pytest.raises(ConfigError, match="is empty"):
        app.main(Nodes(tmp_path, 0), context({}, {"config": ""}))
    assert "nestling-error: " in capsys.readouterr().out
    assert read_settings(FedSettings, tmp_path / "nestling" / "fed").data == "/srv/held-out"
    monkeypatch.setenv(app.FED, str(tmp_path / "own"))
    assert fed_folder() == tmp_path / "own"

    killed = list[Path]()
    monkeypatch.setattr(app, "kill", killed.append)
    folders = [site_folder({"partition-id": n, "num-partitions": 3, "data-path": "/a"}) for n in (0, 1)]
    assert folders == [tmp_path / "nestling" / "site-0", tmp_path / "nestling" / "site-1"]
    assert [read_settings(SiteSettings, f) for f in folders] == [SiteSettings(0, "/a"), SiteSettings(1, "/a")]
    assert site_folder({"partition-id": 1}) == folders[1]
    assert killed == [folders[1]]  # whose worker has the data of before
    assert site_folder({"partition-id": 1, "site": "/own"}) == Path("/own")
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / ("long" * 25)))
    with pytest.raises(ConfigError, match="too long a path"):
        site_folder({"partition-id": 0})


@pytest.mark.parametrize(
    "node", [{}, {"partition-id": -1}, {"partition-id": "0"}, {"partition-id": True}, {"partition-id": 0.0},
             {"partition-id": 0, "data-path": 7}],
)  # fmt: skip
def test_a_node_that_says_not_who_it_is_answers_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: dict[str, Any]
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    message = Message(to_record(b"{}", "hello"), 7, MessageType.TRAIN)
    message.metadata.__dict__["_message_id"] = "m"
    told = from_record(app.train(message, context(node, {})).content)
    assert isinstance(told, Failure)
    assert told.code == "config"
    assert "partition-id=0" in told.detail
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("node", [{"site": "/srv/ward-7"}, {"partition-id": 0}])
def test_what_is_wrong_with_a_sites_folder_is_told_without_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: dict[str, Any]
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "ward-7"))
    (tmp_path / "ward-7").touch()  # no folder
    message = Message(to_record(b"{}", "hello"), 7, MessageType.TRAIN)
    message.metadata.__dict__["_message_id"] = "m"
    told = from_record(app.train(message, context(node, {})).content)
    assert told == Failure("config", "raised ConfigError; see the log at the site")
