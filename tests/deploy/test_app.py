"""The server's app over a grid in this process, whose nodes are sites: settings in, result out, to the bit."""

import dataclasses
import fcntl
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small import config, images

pytest.importorskip("flwr", reason="needs the extra nestling[flower]")

from nestling.api import run
from nestling.config.load import dump_config, load_config
from nestling.config.schema import RunConfig
from nestling.core.errors import ConfigError, ContextError, RunError
from nestling.core.types import Failure
from nestling.deploy.app import own_settings, run_over
from nestling.deploy.folder import FedSettings, SiteSettings, make_private, write_settings
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
        for message in messages:
            node, body = message.metadata.dst_node_id, from_record(message.content)
            assert isinstance(body, bytes)
            answer = outcome(self.sites[node].answer, kind_of(message.content), body)
            self.count += 1
            facts = SimpleNamespace(reply_to_message_id=f"m{self.count}", src_node_id=node)
            record = to_refusal(answer) if isinstance(answer, Failure) else to_record(answer)
            self.waiting.append(SimpleNamespace(metadata=facts, content=record, has_error=lambda: False))
        return [reply.metadata.reply_to_message_id for reply in self.waiting]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Any]:
        come, self.waiting = self.waiting, []
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
    # and a run that is done is left alone when it is asked to go on
    name = Path(there["run_dir"]).name
    assert json.loads(run_over(Nodes(tmp_path, 3), fed, {"resume": name}))["state_digest"] == here.state_digest
    assert Path(there["run_dir"]).parent == fed / "runs"
    assert load_config(fed / "runs" / name / "config.toml").base.weights.startswith(str(fed / "bases"))


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


def test_a_site_that_refuses_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 3)
    (tmp_path / "s1" / "pinned").write_text("f" * 64)
    with pytest.raises(ContextError, match="this site has agreed to ffffffffffff"):
        run_over(nodes, server(tmp_path), {"config": dump_config(config(tmp_path))})
