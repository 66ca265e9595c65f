"""From settings to objects: the only file that knows every class."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import Any

import torch
from torch import nn

from nestling.adapters.base import attach, warn_if_inexact
from nestling.adapters.lora import lora_layout
from nestling.codec.codecs import Limits, body_size
from nestling.codec.message import HEADER_SIZE, LARGEST
from nestling.config.schema import (
    FullConfig,
    GptConfig,
    LanguageConfig,
    LoraConfig,
    MemoryConfig,
    OwnBase,
    RunConfig,
    TaskConfig,
    TextConfig,
    deciding,
)
from nestling.core.errors import ConfigError
from nestling.core.types import Engine
from nestling.core.vectors import Layout, Vector
from nestling.engines.inprocess import InProcessEngine
from nestling.federation.agreement import Agreement
from nestling.federation.client import Worker
from nestling.federation.local import ClientState
from nestling.federation.server import Server
from nestling.models.assets import locate
from nestling.models.backbones import base_hash
from nestling.models.copies import working_copy
from nestling.models.pretrain import make_base, trained_base, trains
from nestling.tasks.choices import ChoicesTask
from nestling.tasks.data import SHAPES, load_images
from nestling.tasks.images import make_task
from nestling.tasks.items import ItemsTask, Score
from nestling.tasks.recall import NeedleTask
from nestling.tasks.wikitext import VOCABULARY, cut_blocks, load_articles, make_blocks_task


@dataclass(frozen=True)
class Parts:
    """The objects of one run. Every worker shares the frozen tensors of `base`.

    `recalls` is the `Recalls` that judges a language run; its module needs transformers, which no other run does.
    `elsewhere`: clients work on other machines, and what they hold and keep is not here.
    """

    base: nn.Module
    base_hash: str
    task: ItemsTask | NeedleTask | ChoicesTask
    workers: list[Worker]
    engine: Engine
    server: Server
    agreement: Agreement
    recalls: Any = None
    elsewhere: bool = False

    def evaluate(self, worker: Worker, state: Vector) -> float:
        """Accuracy of a state on the held-out items; of a language run, on those of each round."""
        if self.recalls is not None:
            return self.recalls.after_round(state)
        return self.score(worker, state).accuracy

    def score(self, worker: Worker, state: Vector) -> Score:
        """The same, in full; of images and text."""
        assert isinstance(self.task, ItemsTask)
        worker.load(state, None)
        return self.task.evaluate(worker.model)


def resolve(config: RunConfig) -> RunConfig:
    """The settings with what was left open filled in: the adapter's seed, the number of workers."""
    adapter = config.adapter
    if not isinstance(adapter, FullConfig) and adapter.seed is None:
        adapter = dataclasses.replace(adapter, seed=config.seed)
    workers = config.machine.workers or (1 if config.machine.device != "cpu" else usable_cores())
    workers = min(workers, config.server.clients_per_round or config.task.clients)
    machine = dataclasses.replace(config.machine, workers=workers)
    return dataclasses.replace(config, adapter=adapter, machine=machine)


def build(
    config: RunConfig,
    *,
    note: Callable[[str], object] = lambda text: None,
    heard: Callable[[int, int], object] = lambda answered, asked: None,
    engine: Engine | None = None,
    examples: int | None = None,
) -> Parts:
    """Load the data, make the base, put an adapter onto one copy of the model per worker.

    Args:
        note: told what is being loaded.
        heard: told how many of a round's clients have answered, of how many; not of clients elsewhere.
        engine: carries the messages to clients elsewhere, so that one worker is enough here, to judge states; None:
            clients are workers of this process.
        examples: how many training items all clients together hold, where they are not those found here.

    Raises `ContextError` if data or weights are missing, `ConfigError` if the settings do not fit each other, or need
    what clients elsewhere keep.
    """
    config = resolve(config)
    if engine is not None:
        if isinstance(config.adapter, MemoryConfig) and config.adapter.share == "gates":
            raise ConfigError(
                "leaves a trained part with each client, and the server has none to judge a state with",
                where="adapter.share = gates",
                remedy="Over many machines give rules.",
            )
        config = dataclasses.replace(config, machine=dataclasses.replace(config.machine, workers=1))
    check_device(config.machine.device)
    task: ItemsTask | NeedleTask | ChoicesTask
    reads: dict[str, str] = {}
    if isinstance(config.base, LanguageConfig):
        from nestling.build_language import load_language  # needs transformers

        base, task, round_task, prefix, reads["tokenizer"] = load_language(config, note=note)
    else:
        base, task = _load_items(config, note=note)
    if isinstance(config.adapter, LoraConfig):  # before factors of any rank are drawn
        payloads(config, lora_layout(config.adapter, base))
    hashed = base_hash(base)
    share = not isinstance(config.adapter, FullConfig)
    models = [working_copy(base, share=share) for _ in range(config.machine.workers)]
    adapters = [attach(model, config.adapter, base_hash=hashed) for model in models]
    payloads(config, adapters[0].layout)
    warn_if_inexact(adapters[0])
    examples = task.examples(None) if examples is None else examples
    agreement = Agreement(
        layout=adapters[0].layout,
        codec=config.codec,
        limits=Limits(max_examples=max(1, examples), max_abs=config.server.max_abs),
        spec={"base": hashed, "adapter": adapters[0].spec, "run": run_id(config)} | reads,
    )
    fresh, kept, stop = _fresh_local(config, adapters[0]), dict[int, ClientState](), Event()
    workers = [
        Worker(model, adapter, task, config.local, agreement, config.seed, config.rounds, fresh, kept, stop)
        for model, adapter in zip(models, adapters, strict=True)
    ]
    total = examples if config.server.weighting == "examples" else config.task.clients
    asked = config.server.clients_per_round or config.task.clients
    server = Server(
        adapters[0].vector(), agreement, config.server, total_weight=total, asked=asked, privacy=config.privacy,
        sampling_rate=config.sampling_rate,
    )  # fmt: skip
    recalls = None
    if not isinstance(task, ItemsTask):
        from nestling.federation.recalls import Recalls
        from nestling.inference.cache import new_cache

        recalls = Recalls(base, workers, task, round_task, config.adapter, new_cache, prefix)
    elsewhere = engine is not None
    if engine is None:
        engine = InProcessEngine(
            [w.handle for w in workers],
            deadline=config.server.deadline,
            stragglers=config.server.stragglers,
            stop=stop,
            heard=heard,
        )
    return Parts(base, hashed, task, workers, engine, server, agreement, recalls, elsewhere)


def _load_items(config: RunConfig, *, note: Callable[[str], object]) -> tuple[nn.Module, ItemsTask]:
    of_task, settings = own_settings(config)
    channels, classes = shape_of(of_task)
    _check_base_data(of_task, settings)
    data, path = _pretraining_data(of_task, settings)
    task: ItemsTask
    if isinstance(of_task, TextConfig):
        where = _text_path(of_task.data, of_task.path)
        task = make_blocks_task(of_task, path=where, seed=config.seed, device=config.machine.device)
    else:
        task = make_task(of_task, seed=config.seed, device=config.machine.device)
    base = make_base(settings, channels=channels, classes=classes, data=data, source=path, note=note)
    return base.to(config.machine.device), task


def pretrain_base(config: RunConfig, *, note: Callable[[str], object] = lambda text: None) -> tuple[nn.Module, str]:
    """The base that a run of images or text would begin with, trained on `machine.device` or taken from the cache, and
    as JSON where it comes from. What `nestling pretrain` writes; the task's own data is not read.

    Raises `ConfigError` if the settings have no base to train, `ContextError` if data is missing or training did not
    take.
    """
    if not isinstance(config.base, OwnBase):
        raise ConfigError(
            "a language model is not trained here", where="base.kind", remedy="Name one under base.model."
        )
    of_task, settings = own_settings(config)
    if settings.weights or not trains(settings):
        raise ConfigError(
            "leaves nothing to train",
            where="base.weights" if settings.weights else "base.epochs" if settings.epochs == 0 else "base.pretrain_on",
            remedy="Give a set under base.pretrain_on, base.epochs of at least 1, and no base.weights.",
        )
    check_device(config.machine.device)
    _check_base_data(of_task, settings)
    channels, classes = shape_of(of_task)
    data, path = _pretraining_data(of_task, settings)
    return trained_base(
        settings, channels=channels, classes=classes, data=data, source=path, device=config.machine.device, note=note
    )


def _pretraining_data(of_task: TaskConfig | TextConfig, base: OwnBase) -> tuple[Callable[[], tuple], str]:
    """What loads the data that the base is trained on, and the folder it lies in; empty: the usual places. Of a text it
    is the training part, in blocks as long as the model can read."""
    path = base.path or (of_task.path if base.pretrain_on == of_task.data else "")

    def load() -> tuple:
        if isinstance(base, GptConfig):
            articles = load_articles(base.pretrain_on, _text_path(base.pretrain_on, path))
            blocks = cut_blocks(articles.train, base.context)
            return blocks.x, blocks.y
        train, _ = load_images(base.pretrain_on, path)
        return train.x, train.y

    return load, path


def own_settings(config: RunConfig) -> tuple[TaskConfig | TextConfig, OwnBase]:
    assert isinstance(config.task, TaskConfig | TextConfig)
    assert isinstance(config.base, OwnBase)
    return config.task, config.base


def shape_of(of_task: TaskConfig | TextConfig) -> tuple[int, int]:
    """Colour channels of what the network is given, 1 of a text, and in how many classes it answers."""
    return (1, VOCABULARY) if isinstance(of_task, TextConfig) else SHAPES[of_task.data][::2]


def _text_path(name: str, path: str) -> str:
    """Where a text lies: where the settings say, or in the cache; empty: on the hub, or inside Python."""
    return str(locate(name)) if name == "shakespeare" and not path else path


def _fresh_local(config: RunConfig, adapter: Any) -> Vector | None:
    """What of the adapter never travels, as it is before training; None if there is nothing of the kind."""
    if isinstance(config.adapter, MemoryConfig) and config.adapter.share == "gates":
        return adapter.local_vector()
    return None


def run_id(config: RunConfig) -> str:
    """Names the run in every message: a digest of all that decides its result, so one seed gives one set of bytes.

    Not of where things lie: the base counts by its hash, which is in every message besides.
    """
    decides = {k: v for k, v in deciding(config).items() if k not in ("machine", "name", "base")}
    decides["task"].pop("path")
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:32]


def usable_cores() -> int:
    """How many cores this process may use: those it was given by a scheduler or `taskset`, not all of the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_device(device: str) -> None:
    """Raise `ConfigError` unless torch can use the device here."""
    try:
        if torch.zeros(1, device=device).device.type not in ("cpu", "cuda"):
            raise RuntimeError("neither a CPU nor a CUDA device")
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"{device!r} cannot be used ({reason})", where="machine.device", remedy="Give cpu."
        ) from error


def payloads(config: RunConfig, layout: Layout) -> tuple[int, int]:
    """Bytes of a message's body up and down; `ConfigError` if one would not fit a message."""
    up, down = body_size(config.codec.up, layout), body_size(config.codec.down, layout)
    if config.codec.kind == "powersgd" and up == 4 * layout.size:
        raise ConfigError(
            f"of rank {config.codec.rank} finds no matrix with fewer numbers in its factors: all would go as float32",
            where="codec.kind",
            remedy="Latents are rows of numbers: give plain or rotated. For weights, lower codec.rank.",
        )
    if max(up, down) + HEADER_SIZE > LARGEST:
        raise ConfigError(
            f"{layout.size:,} numbers do not fit a message of at most {LARGEST:,} bytes",
            where="adapter",
            remedy="Train fewer numbers, or send fewer bits.",
        )
    return up, down


def _check_base_data(of_task: TaskConfig | TextConfig, base: OwnBase) -> None:
    source = base.pretrain_on
    if base.weights or source == "none" or isinstance(of_task, TextConfig):
        return
    if SHAPES[source][0] != SHAPES[of_task.data][0]:
        raise ConfigError(
            f"{source} has {SHAPES[source][0]} colour channels, {of_task.data} has {SHAPES[of_task.data][0]}",
            where="base.pretrain_on",
            remedy="Choose a set with the same, or give base.weights.",
        )
