"""`nestling.run`: a whole federated run from its settings, recorded in a folder as it goes.

The command line does nothing else; a notebook can call it as well.
"""

import dataclasses
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nestling.adapters.base import averaging_error
from nestling.build import Parts, build, resolve, run_id
from nestling.codec.codecs import body_size
from nestling.codec.message import state_digest
from nestling.config.load import dump_config
from nestling.config.schema import BaseConfig, NeedleConfig, RunConfig
from nestling.core.errors import NestlingError, RunError
from nestling.core.types import Failure, Progress
from nestling.core.vectors import Vector
from nestling.federation.client import Worker
from nestling.federation.loop import Round, run_rounds
from nestling.federation.personal import personal_accuracies
from nestling.federation.reference import References, train_references
from nestling.models.backbones import base_bytes
from nestling.report.html import write_report
from nestling.report.plots import accuracy_against_bytes
from nestling.runs.folder import RunFolder, create
from nestling.runs.recorder import Recorder, Result
from nestling.tasks.data import TITLES
from nestling.tasks.images import ImageTask
from nestling.tasks.recall import NeedleTask, Recall


def run(
    config: RunConfig,
    *,
    progress: Callable[[Progress], None] | None = None,
    references: References | None = None,
    command: list[str] | None = None,
) -> Result:
    """Run a federation on this machine and write its folder under `config.machine.out`.

    Args:
        config: from `load_config`, or built in Python.
        progress: called at each step; what it draws is its own business.
        references: of an earlier run with the same task, base, adapter and local rule, instead of training them again.
        command: recorded as the command that was typed.

    Raises:
        ConfigError: settings that contradict each other, or a folder that cannot be written.
        ContextError: data or weights that are missing.
        RunError: too many rounds in a row without enough usable replies.
        KeyboardInterrupt: passed on after the last finished round is saved.

    >>> import nestling
    >>> config = nestling.load_config("flite-digits")
    >>> result = nestling.run(config)                      # doctest: +SKIP
    """
    config = resolve(config)
    with create(Path(config.machine.out), config.name, run_id(config)) as folder:
        recorder = Recorder.start(folder, config=dump_config(config), command=command or ["nestling.run"])
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # clients side by side, one thread each: faster, and the same bits on any machine load
        try:
            return _run(config, folder, recorder, progress or (lambda _: None), references)
        except KeyboardInterrupt:
            kept = (folder.path / "adapter").is_dir()
            where = "; the state of the last finished round is in adapter/" if kept else " before a round was finished"
            recorder.stop("stopped", f"interrupted{where}")
            raise
        except NestlingError as error:
            recorder.stop("failed", str(error))
            raise
        except BaseException as error:
            recorder.stop("failed", f"{type(error).__name__}: {error}")
            raise
        finally:
            torch.set_num_threads(threads)


def _run(
    config: RunConfig,
    folder: RunFolder,
    recorder: Recorder,
    progress: Callable[[Progress], None],
    references: References | None,
) -> Result:
    began = time.perf_counter()
    sent = 0

    def tell(step: str, done: Round | None = None) -> None:
        progress(
            Progress(
                step=step,
                round=done.number if done else 0,
                rounds=config.rounds,
                accuracy=done.accuracy if done else float("nan"),
                accepted=len(done.accepted) if done else 0,
                asked=len(done.replies) if done else 0,
                bytes_so_far=sent,
                seconds=time.perf_counter() - began,
            )
        )

    tell("loading data and base")
    parts = build(config, note=tell)
    if isinstance(config.base, BaseConfig) and not config.base.weights:
        folder.write("base.safetensors", base_bytes(parts.base))
    worker, start = parts.workers[0], parts.server.state

    reference_seconds = None
    if references is None and config.machine.references:
        started = time.perf_counter()
        references = _references(config, parts, tell)
        reference_seconds = time.perf_counter() - started

    tell("federating")
    started = time.perf_counter()
    last: Round | None = None
    ever_used = False
    totals, refusals = Counter[str](), Counter[str]()
    for done in run_rounds(
        parts.server,
        parts.engine,
        parts.task.clients(),
        lambda state: parts.evaluate(worker, state),
        rounds=config.rounds,
        per_round=config.server.clients_per_round,
        patience=config.server.patience,
        seed=config.seed,
    ):
        _record(done, parts, config, recorder, seconds=time.perf_counter() - started)
        totals.update(up=done.bytes_up, down=done.bytes_down)
        refusals.update(failure.code for failure in done.refused.values())
        sent, last = totals.total(), done
        if worker.fresh is None:  # a part that stays with each client is in no file
            worker.adapter.load_vector(done.state)
            worker.adapter.save_pretrained(folder.path / "adapter")
        tell("federating", done)
        ever_used = ever_used or done.used
    if last is None or not ever_used:
        reasons = (
            ", ".join(f"{code} ×{count}" for code, count in refusals.most_common(3)) or "the mean was out of bounds"
        )
        raise RunError(
            f"no round had enough usable replies ({reasons})", where="run", remedy="See log.txt in the run's folder."
        )
    seconds = time.perf_counter() - started

    rows = dict(references.recalls) if references else {}
    if parts.recalls is not None:
        rows |= parts.recalls.trained(last.state, note=tell)
        rows = parts.recalls.frozen(note=tell) | rows
    result = Result(
        name=config.name,
        method=config.method,
        adapter=config.adapter.kind,
        codec=config.codec.up,
        seed=config.seed,
        rounds=config.rounds,
        clients=config.task.clients,
        accuracy_local_only=references.local_only if references else None,
        accuracy_centralised=references.centralised if references else None,
        trainable_parameters=parts.agreement.layout.size,
        payload_bytes_up=body_size(config.codec.up, parts.agreement.layout),
        payload_bytes_down=body_size(config.codec.down, parts.agreement.layout),
        bytes_up=totals["up"],
        bytes_down=totals["down"],
        seconds=seconds,
        seconds_references=reference_seconds,
        run_dir=str(folder.path),
        averaging_error=_averaging_error(last, worker),
        base_hash=parts.base_hash,
        state_digest=state_digest(last.state),
        model_parameters=sum(p.numel() for p in parts.base.parameters()),
        rejected=dict(refusals),
        settings=settings_digest(config),
        **_of_task(config, parts, start=start, last=last, rows=rows),
    )
    recorder.finish(result)
    record = write_report([folder.path], folder.path / "report.html").runs[0]
    accuracy_against_bytes([record.result], [record.metrics], folder.path / "accuracy_against_bytes")
    return result


def settings_digest(config: RunConfig) -> str:
    """Eight hex signs for the settings that runs over seeds share: all but seed, name, machine and where things lie.

    The adapter's own seed counts where it does not follow the run's.

    >>> settings_digest(RunConfig(seed=1, name="a")) == settings_digest(RunConfig(seed=2, name="b"))
    True
    """
    shared = {k: v for k, v in dataclasses.asdict(config).items() if k not in ("seed", "name", "machine")}
    shared["task"].pop("path")
    shared["base"].pop("weights", None)
    if shared["adapter"].get("seed") == config.seed:
        shared["adapter"]["seed"] = None
    return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:8]


def _references(config: RunConfig, parts: Parts, note: Callable[[str], object]) -> References:
    start, epochs = parts.server.state, config.rounds * config.local.epochs
    if parts.recalls is not None:
        return parts.recalls.references(start, epochs=epochs, note=note)
    note("training the rows to compare with")
    return train_references(
        parts.workers, parts.evaluate, clients=parts.task.clients(), start=start, epochs=epochs, note=note
    )


def _of_task(
    config: RunConfig, parts: Parts, *, start: Vector, last: Round, rows: dict[str, list[Recall]]
) -> dict[str, Any]:
    """What a result says of its task: what it is, the accuracies on all held-out items, and a needle run's rows."""
    if isinstance(config.task, NeedleConfig):
        from nestling.federation.recalls import entries, gains  # needs transformers

        base = rows.get("memory off", rows.get("window", rows.get("full attention")))
        return {
            "task": f"facts in {config.task.length:,} tokens",
            "alpha": None,
            "accuracy": NeedleTask.accuracy(rows["trained"]),
            "accuracy_base": NeedleTask.accuracy(base) if base else None,
            "test_items": config.task.clients * config.task.test_items,
            "classes": 0,
            "recalls": entries(rows),
            "gains": gains(rows),
        }
    assert isinstance(parts.task, ImageTask)
    personal: tuple[float | None, float | None] = (None, None)
    if config.local.rule == "ala":
        personal = personal_accuracies(parts.workers, parts.task, last.state)
    return {
        "accuracy_personal": personal[0],
        "accuracy_personal_global": personal[1],
        "task": TITLES[config.task.data],
        "alpha": config.task.alpha if config.task.partition == "dirichlet" else None,
        "accuracy": last.accuracy,
        "accuracy_base": parts.evaluate(parts.workers[0], start),
        "test_items": parts.task.held_out_items,
        "classes": parts.task.classes,
        "evaluated_on": config.task.evaluate_on,
    }


def _record(done: Round, parts: Parts, config: RunConfig, recorder: Recorder, *, seconds: float) -> None:
    """A row per message, a row for the round, and the reasons of the replies that were dropped."""
    layout = parts.agreement.layout
    down, up = body_size(config.codec.down, layout), body_size(config.codec.up, layout)
    for client, reply in done.replies.items():
        recorder.message(
            done.broadcast, round=done.number, direction="down", client=client,
            codec=config.codec.down, payload_bytes=down,
        )  # fmt: skip
        refusal = done.refused.get(client)
        if not isinstance(reply, Failure):
            recorder.message(
                reply, round=done.number, direction="up", client=client, codec=config.codec.up, payload_bytes=up,
                accepted=refusal is None, reason=refusal.code if refusal else "",
            )  # fmt: skip
        if refusal:
            recorder.log(f"round {done.number}: dropped [{refusal.code}] {refusal.detail}\n{refusal.trace}".rstrip())
    recorder.round(
        done.number,
        {"accuracy": done.accuracy, "accepted": len(done.accepted), "asked": len(done.replies), "used": done.used,
         "seconds": seconds},
    )  # fmt: skip


def _averaging_error(last: Round, worker: Worker) -> float | None:
    """How far averaging the last round's replies is from averaging the models they stand for."""
    adapter = worker.adapter
    if not last.accepted or not adapter.averages_exactly:
        return None
    return averaging_error(adapter, [r.state for r in last.accepted], [r.weight for r in last.accepted])
