"""How well states of a language federation recall facts or answer questions: the rows of a run, each client judged on
its own items.

    full attention   the frozen model, all tokens in sight: the ceiling, with a cache that grows with the text
    window           the frozen model, as far as the run's adapter lets it see
    local only       each client's own training, on its own items
    trained          the federation's last state; memory off: what stays without the memory; window off: memory alone
    centralised      one model trained on all clients' items

Every row is judged on the same items, so that two rows are compared item by item: what the memory adds, and what a
client loses by being averaged with others. Clients are judged side by side, and on an interrupt no further batch of
their items is begun.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite
from threading import Event
from typing import Any, Literal

from torch import nn

from nestling.config.schema import AdapterConfig, LoraConfig, MemoryConfig
from nestling.core.vectors import Vector
from nestling.federation.client import Worker
from nestling.federation.interrupt import go_on
from nestling.federation.pool import side_by_side
from nestling.federation.reference import References, train_apart
from nestling.models.copies import working_copy
from nestling.models.prefix import Prefix
from nestling.tasks.choices import ChoicesTask
from nestling.tasks.recall import NeedleTask, Recall, paired_difference

Rows = dict[str, list[Recall]]
Note = Callable[[str], object]


@dataclass(frozen=True)
class Recalls:
    """Judges states and the frozen base.

    Args:
        base: the frozen model, bare.
        workers: hold the adapted copies of it.
        task, round_task: with all held-out items, and with those of which a state is judged after each round.
        adapter: says whether there is a window and a memory.
        new_cache: makes the cache of one batch for a model.
        prefix: remembers what the layers below the adapter make of each item, the same for every state.
    """

    base: nn.Module
    workers: Sequence[Worker]
    task: NeedleTask | ChoicesTask
    round_task: NeedleTask | ChoicesTask
    adapter: AdapterConfig
    new_cache: Callable[[nn.Module], Any]
    prefix: Prefix | None = None

    def of_state(self, state: Vector, *, task: NeedleTask | ChoicesTask | None = None, **switch: bool) -> list[Recall]:
        """One `Recall` a client, of a state with what the client keeps for itself; `switch` turns parts of a memory
        off: `memory=False` or `window=False`."""
        stop = Event()

        def judge(worker: Worker, client: int) -> Recall:
            worker.load(state, client)
            adapter: Any = worker.adapter
            with adapter.switch(**switch) if switch else nullcontext():
                return self._judge(worker.model, client, task or self.task, self.prefix, stop)

        return side_by_side(self.workers, judge, self.task.clients(), interrupted=stop.set)

    def of_base(self, *, window: int = 0, sinks: int = 0) -> list[Recall]:
        """One `Recall` a client, of the frozen model that sees `window` tokens and `sinks` first ones; 0: all."""
        models = [working_copy(self.base, share=True) for _ in self.workers]
        if window:
            from nestling.models.window import use_window  # needs transformers

            for model in models:
                use_window(model, window=window, sinks=sinks)
        # Bare layers below LoRA are those of a state, to the bit; those of a model that carries a memory are others.
        alike = window or (isinstance(self.adapter, LoraConfig) and not self.adapter.window)
        prefix, stop = self.prefix if alike else None, Event()

        def judge(model: nn.Module, client: int) -> Recall:
            return self._judge(model, client, self.task, prefix, stop)

        return side_by_side(models, judge, self.task.clients(), interrupted=stop.set)

    def after_round(self, state: Vector) -> float:
        """The task's accuracy on the items that are judged after each round."""
        return self.task.accuracy(self.of_state(state, task=self.round_task))

    def frozen(self, *, note: Note = lambda text: None) -> Rows:
        """The rows of the frozen base: with all tokens in sight, and as far as the adapter lets it see. With a memory,
        the latter is the row of the trained state with its memory off."""
        note("reading the held-out items with the frozen base")
        rows = {"full attention": self.of_base()}
        if isinstance(self.adapter, LoraConfig) and self.adapter.window:
            rows["window"] = self.of_base(window=self.adapter.window, sinks=self.adapter.sinks)
        return rows

    def references(self, start: Vector, *, epochs: int, note: Note = lambda text: None) -> References:
        """The rows to compare with that are trained, with as many epochs as the federation."""
        note("training the rows to compare with")
        stop, everybody = Event(), self.task.clients()

        def judge(worker: Worker, client: int | None) -> list[Recall]:
            clients = everybody if client is None else [client]
            return [self._judge(worker.model, own, self.task, self.prefix, stop) for own in clients]

        apart = train_apart(self.workers, judge, clients=everybody, start=start, epochs=epochs, note=note, stop=stop)
        centralised = apart.pop(None, [])
        local = [recall for recalls in apart.values() for recall in recalls]
        rows = {name: row for name, row in (("local only", local), ("centralised", centralised)) if row}
        return References(self._share(local), self._share(centralised), rows)

    def trained(self, state: Vector, *, note: Note = lambda text: None) -> Rows:
        """The rows of the federation's state."""
        note("judging the last state on all held-out items")
        rows = {"trained": self.of_state(state)}
        if isinstance(self.adapter, MemoryConfig):
            rows["memory off"] = self.of_state(state, memory=False)
            rows["window off"] = self.of_state(state, window=False)
        return rows

    def _judge(
        self, model: nn.Module, client: int, task: NeedleTask | ChoicesTask, prefix: Prefix | None, stop: Event
    ) -> Recall:
        between = partial(go_on, stop)
        if isinstance(task, ChoicesTask):  # nothing is read on behind a question, so it needs no cache
            read = prefix.logits if prefix is not None else None
            [recall] = task.evaluate(model, clients=[client], read=read, before_batch=between)
        else:
            read_on = prefix.logits_after if prefix is not None else None
            [recall] = task.evaluate(
                model, new_cache=self.new_cache, clients=[client], read=read_on, before_batch=between
            )
        return recall

    def _share(self, recalls: list[Recall]) -> float:
        return self.task.accuracy(recalls) if recalls else float("nan")


def entries(rows: Mapping[str, list[Recall]]) -> dict[str, list[dict[str, Any]]]:
    """The rows as plain values for `result.json`: `hits` and `choices` as texts of a 0 or 1 for each item.

    >>> row = Recall(0, "mk", 3, 1, 2, 0.5, {0.1: (1, 3)}, [True, False, False], [True, True, False])
    >>> entries({"trained": [row]})["trained"][0]["hits"]
    '100'
    """
    return {
        name: [
            asdict(recall)
            | {"loss": recall.loss if isfinite(recall.loss) else None}
            | {key: "".join("01"[hit] for hit in getattr(recall, key)) for key in ("hits", "choices")}
            | {"by_depth": {str(depth): list(counts) for depth, counts in recall.by_depth.items()}}
            for recall in row
        ]
        for name, row in rows.items()
    }


def from_entries(rows: Mapping[str, list[dict[str, Any]]]) -> Rows:
    """What `entries` was made from.

    >>> row = Recall(0, "mk", 3, 1, 2, 0.5, {0.1: (1, 3)}, [True, False, False], [True, True, False])
    >>> from_entries(entries({"trained": [row]})) == {"trained": [row]}
    True
    """

    def recall(entry: dict[str, Any]) -> Recall:
        texts = {key: [sign == "1" for sign in entry[key]] for key in ("hits", "choices")}
        loss = float("nan") if entry["loss"] is None else float(entry["loss"])
        depths = {float(depth): (right, count) for depth, (right, count) in entry["by_depth"].items()}
        return Recall(**(entry | texts | {"by_depth": depths, "loss": loss}))

    return {name: [recall(entry) for entry in row] for name, row in rows.items()}


def gains(rows: Mapping[str, list[Recall]]) -> dict[str, list[float]]:
    """What the memory adds, memory on − memory off over the same items: mean and ends of the 95 % interval of exact
    answers (`exact`) and of right choices among four (`choice`). Empty where there is no memory to turn off."""
    if "memory off" not in rows:
        return {}

    def all_of(name: str, key: str) -> list[bool]:
        return [hit for recall in rows[name] for hit in getattr(recall, key)]

    return {
        label: list(paired_difference(all_of("trained", key), all_of("memory off", key)))
        for label, key in (("exact", "hits"), ("choice", "choices"))
    }


def drops(rows: Mapping[str, list[Recall]], key: Literal["hits", "choices"]) -> dict[str, list[float]]:
    """What a client loses by being averaged with others, its own training − the federation's state over its own items:
    mean and ends of the 95 % interval, by client and under "all". Empty where no client was trained alone."""
    federated = {recall.client: recall for recall in rows.get("trained", [])}
    pairs = [(own, federated[own.client]) for own in rows.get("local only", []) if own.client in federated]
    if not pairs:
        return {}
    alone, together = ([hit for pair in pairs for hit in getattr(pair[side], key)] for side in (0, 1))
    by_client = {
        f"{own.client} {own.template}": list(paired_difference(getattr(own, key), getattr(other, key)))
        for own, other in pairs
    }
    return by_client | {"all": list(paired_difference(alone, together))}
