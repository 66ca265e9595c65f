"""`nestling.run` and `nestling.resume`: a whole federated run from its settings, recorded in a folder as it goes.

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

from nestling import private
from nestling.adapters.base import averaging_error
from nestling.build import Parts, build, resolve, run_id
from nestling.codec.codecs import body_size
from nestling.codec.message import state_digest
from nestling.config.load import dump_config, load_config
from nestling.config.schema import OwnBase, RunConfig, TaskConfig, TextConfig, deciding
from nestling.core.errors import ConfigError, NestlingError, RunError
from nestling.core.types import Engine, Failure, Progress
from nestling.core.vectors import Vector
from nestling.federation.client import Worker
from nestling.federation.loop import Round, run_rounds
from nestling.federation.personal import personal_accuracies
from nestling.federation.reference import References, train_references
from nestling.federation.riders import riders
from nestling.models.backbones import base_bytes
from nestling.report.html import write_report
from nestling.report.plots import accuracy_against_bytes
from nestling.resume import Tally, read_references, restore, snapshot, with_own_base, write_references
from nestling.runs.checkpoint import Checkpoint, newest_checkpoint, write_checkpoint
from nestling.runs.folder import RunFolder, create, read_status, reopen
from nestling.runs.recorder import Recorder, read_messages, read_result
from nestling.runs.result import Result
from nestling.tasks.data import TITLES
from nestling.tasks.items import ItemsTask
from nestling.tasks.recall import Recall
from nestling.tasks.wikitext import title_of

LOGGED = 10
"""Refused replies of a round that are told in full."""


def run(
    config: RunConfig,
    *,
    progress: Callable[[Progress], None] | None = None,
    references: References | None = None,
    command: list[str] | None = None,
    engine: Engine | None = None,
    examples: int | None = None,
) -> Result:
    """Run a federation and write its folder under `config.machine.out`.

    Args:
        config: from `load_config`, or built in Python.
        progress: called at each step; what it draws is its own business.
        references: of an earlier run with the same task, base, adapter and local rule, instead of training them again.
        command: recorded as the command that was typed.
        engine: carries the messages to clients elsewhere (`nestling.engines.flower`); None: they are on this machine.
        examples: how many training items those clients hold in all, where that is not what the data here says.

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
        return _recorded(config, folder, recorder, progress, None, references, engine, examples)


def resume(
    path: Path | str,
    *,
    progress: Callable[[Progress], None] | None = None,
    command: list[str] | None = None,
    engine: Engine | None = None,
    examples: int | None = None,
) -> Result:
    """Go on with a run that was interrupted, killed or failed, after its last finished round.

    It ends in the same state, to the bit, as one never interrupted; a private one has other noise. A run that is done
    is left alone, and its result given; one that was ended before its first round was over begins with that round.

    Args:
        path: the run's folder.
        progress: as in `run`.
        command: noted in the run's log as the command that was typed.
        engine, examples: as in `run`; clients elsewhere keep what they keep themselves.

    Raises:
        ConfigError: no run folder, or settings in its config.toml that are not those it was begun with.
        ContextError: data, weights or base that are missing or others.
        WireError: no checkpoint is whole.
        RunError: a process is at work in the folder (exit code 6); too many rounds without enough usable replies (7).

    >>> import nestling
    >>> result = nestling.resume("runs/flite-digits--20261130-120000--5fac")             # doctest: +SKIP
    """
    path = Path(path)
    if read_status(path) == "done":
        return read_result(path)
    with reopen(path) as folder:
        if read_status(path) == "done":  # by a process that has ended just now
            return read_result(path)
        if not (path / "config.toml").is_file():
            raise ConfigError(
                "was ended before its settings were written", where=str(path), remedy="Begin a new run: 'nestling run'."
            )
        config = resolve(load_config(path / "config.toml"))
        found = newest_checkpoint(path)
        rounds = found.round if found else 0
        recorder = Recorder.resume(folder, rounds=rounds)
        recorder.log(f"resumed after round {rounds}: {' '.join(command or ['nestling.resume'])}")
        folder.set_status("running")
        return _recorded(config, folder, recorder, progress, found, None, engine, examples)


def _recorded(
    config: RunConfig,
    folder: RunFolder,
    recorder: Recorder,
    progress: Callable[[Progress], None] | None,
    found: Checkpoint | None,
    given: References | None = None,
    engine: Engine | None = None,
    examples: int | None = None,
) -> Result:
    """The run, and how it ended in its folder's status and log."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # clients side by side, one thread each: faster, and the same bits on any machine load
    try:
        if given is not None:
            write_references(folder, given, None)
        return _run(config, folder, recorder, progress or (lambda _: None), found, engine, examples)
    except KeyboardInterrupt:
        kept = (folder.path / "checkpoints").is_dir()
        how = "'nestling resume'" if engine is None else "'nestling submit --resume' (in Python nestling.resume)"
        where = f"; {how} goes on after the last finished round" if kept else " before a round was finished"
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
    found: Checkpoint | None,
    engine: Engine | None,
    examples: int | None,
) -> Result:
    began = time.perf_counter()
    tally = Tally()

    def tell(step: str = "", done: Round | None = None, within: str = "") -> None:
        progress(
            Progress(
                step=step,
                round=tally.round,
                rounds=config.rounds,
                accuracy=done.accuracy if done else float("nan"),
                accepted=len(done.accepted) if done else 0,
                asked=len(done.replies) if done else 0,
                bytes_so_far=tally.bytes_up + tally.bytes_down,
                seconds=time.perf_counter() - began,
                within=within,
                run_dir=str(folder.path),
            )
        )

    def heard(answered: int, asked: int) -> None:
        tell(within=f"round {tally.round + 1}: {answered} of {asked} clients have answered")

    tell("loading data and base")
    own = with_own_base(config, folder.path)
    parts = build(own, note=tell, heard=heard, engine=engine, examples=examples)
    own_base = folder.path / "base.safetensors"
    if isinstance(config.base, OwnBase) and not config.base.weights and not own_base.is_file():
        folder.write(own_base.name, base_bytes(parts.base))
    worker, start = parts.workers[0], parts.server.state
    if found is not None:
        tally = restore(config, parts, found)
    if config.privacy.noise:
        parts.server.ledger = private.open_ledger(config, folder, recorder, charged=tally.charges)
    references, reference_seconds = _references(config, parts, folder, start, tell)

    if tally.round == config.rounds and tally.abandoned >= config.server.patience:
        raise RunError(
            f"its last {tally.abandoned} rounds had too few usable replies, and no round is left",
            where=str(folder.path),
            remedy="See log.txt; begin a new run with 'nestling run'.",
        )
    tell("federating")
    started = time.perf_counter() - tally.seconds
    for done in run_rounds(
        parts.server,
        parts.engine,
        parts.task.clients(),
        lambda state: parts.evaluate(worker, state),
        rounds=config.rounds,
        per_round=config.server.clients_per_round,
        patience=config.server.patience,
        seed=config.seed,
        secret=config.privacy.sampling == "poisson",
        first=tally.round + 1,
        abandoned=tally.abandoned % config.server.patience,  # one that ran out of patience is given it anew
    ):
        seconds = time.perf_counter() - started
        _record(done, parts, config, recorder, seconds=seconds)
        tally.add(done, seconds=seconds)
        tally.charges = len(parts.server.ledger.charges) if parts.server.ledger else 0
        if done.number == config.rounds and not config.privacy.noise:  # it is made of the bare replies
            tally.averaging_error = _averaging_error(done, worker)
        if worker.fresh is None:  # a part that stays with each client is in no file
            worker.adapter.load_vector(done.state)
            worker.adapter.save_pretrained(folder.path / "adapter")
        write_checkpoint(folder, snapshot(config, parts, tally))
        tell(done=done)
    if not tally.used:
        refusals = Counter(tally.refusals).most_common(3)
        reasons = ", ".join(f"{code} ×{count}" for code, count in refusals) or "the mean was out of bounds"
        raise RunError(
            f"no round had enough usable replies ({reasons})", where="run", remedy="See log.txt in the run's folder."
        )
    last = parts.server.received
    rows = dict(references.recalls) if references else {}
    if parts.recalls is not None:
        rows |= parts.recalls.trained(last, note=tell)
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
        bytes_up=tally.bytes_up,
        bytes_down=tally.bytes_down,
        seconds=tally.seconds,
        seconds_references=reference_seconds,
        run_dir=str(folder.path),
        averaging_error=tally.averaging_error,
        base_hash=parts.base_hash,
        state_digest=state_digest(last),
        model_parameters=sum(p.numel() for p in parts.base.parameters()),
        rejected=tally.refusals,
        settings=settings_digest(config),
        riders=riders(read_messages(folder.path)),
        **private.spent_so_far(config, parts.server.ledger),
        **_of_task(config, parts, start=start, last=last, accuracy=tally.accuracy, rows=rows),
    )
    recorder.result(result)
    record = write_report([folder.path], folder.path / "report.html").runs[0]
    accuracy_against_bytes([record.result], [record.metrics], folder.path / "accuracy_against_bytes")
    recorder.finish()
    return result


def settings_digest(config: RunConfig) -> str:
    """Eight hex signs for the settings that runs over seeds share: all but seed, name, machine and where things lie.

    The adapter's own seed counts where it does not follow the run's.

    >>> settings_digest(RunConfig(seed=1, name="a")) == settings_digest(RunConfig(seed=2, name="b"))
    True
    """
    shared = {k: v for k, v in deciding(config).items() if k not in ("seed", "name", "machine")}
    shared["task"].pop("path")
    for name in ("path", "weights"):
        shared["base"].pop(name, None)
    if shared["adapter"].get("seed") == config.seed:
        shared["adapter"]["seed"] = None
    return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:8]


def _references(
    config: RunConfig, parts: Parts, folder: RunFolder, start: Vector, note: Callable[[str], object]
) -> tuple[References | None, float | None]:
    """The rows to compare with and the seconds they took: those in the folder, or trained now and put there."""
    if (known := read_references(folder.path)) is not None:
        return known
    if not config.machine.references:
        return None, None
    epochs, began = config.rounds * config.local.epochs, time.perf_counter()
    if parts.recalls is not None:
        found = parts.recalls.references(start, epochs=epochs, note=note)
    else:
        note("training the rows to compare with")
        found = train_references(
            parts.workers, parts.evaluate, clients=parts.task.clients(), start=start, epochs=epochs, note=note
        )
    seconds = time.perf_counter() - began
    write_references(folder, found, seconds)
    return found, seconds


def _of_task(
    config: RunConfig, parts: Parts, *, start: Vector, last: Vector, accuracy: float, rows: dict[str, list[Recall]]
) -> dict[str, Any]:
    """What a result says of its task: what it is, the accuracies on all held-out items, and a language run's rows."""
    task = parts.task
    if not isinstance(task, ItemsTask):
        from nestling.federation.recalls import drops, entries, gains  # needs transformers

        base = rows.get("memory off", rows.get("window", rows.get("full attention")))
        return {
            "task": task.title,
            "alpha": None,
            "accuracy": task.accuracy(rows["trained"]),
            "accuracy_base": task.accuracy(base) if base else None,
            "test_items": task.held_out_items,
            "classes": task.classes,
            "recalls": entries(rows),
            "gains": gains(rows),
            "drops": drops(rows, "choices" if task.classes else "hits"),
        }
    personal: tuple[float | None, float | None] = (None, None)
    if config.local.rule == "ala" and not parts.elsewhere:  # what clients keep is not here
        personal = personal_accuracies(parts.workers, task, last)
    base = parts.score(parts.workers[0], start)
    found: dict[str, Any] = {
        "accuracy_personal": personal[0],
        "accuracy_personal_global": personal[1],
        "accuracy": accuracy,
        "accuracy_base": base.accuracy,
        "test_items": task.held_out_items,
        "classes": task.classes,
        "chance": task.chance,
    }
    of_task = config.task
    if isinstance(of_task, TextConfig):
        reached = parts.score(parts.workers[0], last)
        found |= {"task": title_of(of_task), "alpha": None}
        found |= {"perplexity": reached.perplexity, "perplexity_base": base.perplexity}
    else:
        assert isinstance(of_task, TaskConfig)
        found |= {"task": TITLES[of_task.data], "alpha": of_task.alpha if of_task.partition == "dirichlet" else None}
    return found | {"evaluated_on": of_task.evaluate_on}


def _record(done: Round, parts: Parts, config: RunConfig, recorder: Recorder, *, seconds: float) -> None:
    """A row per message that was sent, a row for the round, and the reasons of the replies that were dropped."""
    layout = parts.agreement.layout
    down, up = body_size(config.codec.down, layout), body_size(config.codec.up, layout)
    secret = config.privacy.sampling == "poisson"
    for number, reply in done.replies.items():
        client = None if secret else number
        if not isinstance(reply, Failure) or reply.sent:
            recorder.message(
                done.broadcast, round=done.number, direction="down", client=client,
                codec=config.codec.down, payload_bytes=down,
            )  # fmt: skip
        refusal = done.refused.get(number)
        if not isinstance(reply, Failure):
            recorder.message(
                reply, round=done.number, direction="up", client=client, codec=config.codec.up, payload_bytes=up,
                accepted=refusal is None, reason=refusal.code if refusal else "", keep=not config.privacy.noise,
                measured=dataclasses.asdict(done.measured[number]) if number in done.measured else None,
            )  # fmt: skip
    for refusal in list(done.refused.values())[:LOGGED]:
        recorder.log(f"round {done.number}: dropped [{refusal.code}] {refusal.detail}\n{refusal.trace}".rstrip())
    if len(done.refused) > LOGGED:
        counts = Counter(refusal.code for refusal in done.refused.values()).most_common()
        recorder.log(f"round {done.number}: {len(done.refused)} dropped in all, {counts}")
    if done.bounded:
        recorder.log(f"round {done.number}: cut down to server.outlier times the median: clients {done.bounded}")
    recorder.round(
        done.number,
        {"accuracy": done.accuracy, "accepted": len(done.accepted), "asked": len(done.replies), "used": done.used,
         "bounded": len(done.bounded),
         "seconds": seconds},
    )  # fmt: skip


def _averaging_error(last: Round, worker: Worker) -> float | None:
    """How far averaging the last round's replies is from averaging the models they stand for."""
    adapter = worker.adapter
    if not last.accepted or not adapter.averages_exactly:
        return None
    return averaging_error(adapter, [r.state for r in last.accepted], [r.weight for r in last.accepted])
