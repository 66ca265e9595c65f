"""Ctrl-C while a language model is judged ends at the next batch of items, and the run goes on to the same bits."""

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from small import choices_toml, needle_toml

import nestling.federation.recalls
import nestling.tasks.choices
import nestling.tasks.recall
from nestling.api import resume, run
from nestling.cli.main import main
from nestling.config.load import parse_config
from nestling.federation.interrupt import Until, go_on
from nestling.federation.local import Declined
from nestling.runs.checkpoint import newest_checkpoint
from nestling.runs.folder import read_status
from nestling.runs.result import Result
from nestling.tasks.recall import NeedleTask

LORA = 'kind = "lora"\nlayers = "1"\nrank = 2\nwindow = 32'


def text(task: str, out: Path, *, references: bool) -> str:
    made = needle_toml(out, adapter=LORA) if task == "needle" else choices_toml(out)
    made = made.replace("test_items = 5", "test_items = 4").replace("round_items = 2", "round_items = 4")
    return made.replace("workers = 1", f"workers = 1\nreferences = {str(references).lower()}")


@cache
def whole(task: str, *, references: bool) -> Result:
    return run(parse_config(text(task, Path(mkdtemp(prefix="nestling-tests-")), references=references)))


@dataclass
class Interrupt:
    """Sends SIGINT within batch number `at`, which ends only once it has been heard."""

    at: int
    batches: int = 0
    heard: threading.Event = field(default_factory=threading.Event)

    def around(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def reading(*args: Any, **named: Any) -> Any:
            if torch.is_grad_enabled():  # in training
                return read(*args, **named)
            self.batches += 1
            if self.batches == self.at:
                os.kill(os.getpid(), signal.SIGINT)
                assert self.heard.wait(120)
            return read(*args, **named)

        return reading

    def event(self) -> threading.Event:
        made = threading.Event()
        set_it = made.set

        def told() -> None:
            set_it()
            self.heard.set()

        made.set = told  # type: ignore[method-assign]
        return made


@pytest.mark.parametrize(
    ("task", "references", "at", "rounds"),
    [
        ("needle", False, 13, 1),  # the first of four batches of the first of three clients, in the second round
        ("needle", False, 25, 2),  # so in the last row of the trained state
        ("needle", False, 37, 2),  # and of the frozen model
        ("choices", False, 21, 1),  # of five clients
        ("choices", True, 1, 0),  # of the rows to compare with
    ],
)
def test_cat_056_control_c_while_a_language_model_is_judged_waits_for_one_batch(
    task: str, references: bool, at: int, rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.toml").write_text(text(task, tmp_path / "runs", references=references))
    with monkeypatch.context() as patched:
        interrupt = Interrupt(at)
        for module in (nestling.tasks.recall, nestling.tasks.choices):
            patched.setattr(module, "ITEMS_AT_ONCE", 1)
        patched.setattr(NeedleTask, "_read", interrupt.around(NeedleTask._read))
        patched.setattr(nestling.tasks.choices, "answers", interrupt.around(nestling.tasks.choices.answers))
        patched.setattr(nestling.federation.recalls, "Event", interrupt.event)
        usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where tests run
        try:
            assert main(["run", str(tmp_path / "run.toml"), "--quiet"]) == 130
        finally:
            signal.signal(signal.SIGINT, usual)
    assert interrupt.heard.is_set()
    assert interrupt.batches == at  # none was begun after it
    (folder,) = (tmp_path / "runs").iterdir()
    assert read_status(folder) == "stopped"
    found = newest_checkpoint(folder)
    assert (found.round if found else 0) == rounds
    result, expected = resume(folder), whole(task, references=references)
    assert result.state_digest == expected.state_digest
    assert (result.accuracy, result.bytes_up, result.recalls) == (
        expected.accuracy, expected.bytes_up, expected.recalls,
    )  # fmt: skip


def test_after_an_interrupt_there_is_no_further_batch() -> None:
    class Numbers:
        def examples(self, client: int | None) -> int:
            return 9

        def loss(self, model: Any, batch: Any) -> Any:
            raise AssertionError

        def batches(self, client: int | None, *, size: int, seed: int, epoch: int) -> Any:
            return iter(range(9))

    stop = threading.Event()
    go_on(stop)
    batches = Until(Numbers(), stop).batches(0, size=1, seed=0, epoch=0)
    assert [next(batches), next(batches)] == [0, 1]
    stop.set()
    with pytest.raises(Declined) as raised:
        next(batches)
    assert raised.value.code == "stopped"
