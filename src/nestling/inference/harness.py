"""lm-evaluation-harness over a model in memory: its tasks as they are, and our questions as tasks of its kind.

    log p(continuation | context), summed over tokens        multiple choice: right if argmax over A … D is the answer

The model is handed to the harness' own wrapper with whatever adapter is on it, so windows and memories read as they do
elsewhere. The harness fills a batch up behind the ends of its rows and gives no mask: behind a row's end nothing is
seen by a causal model, nor by a memory, which only ever reads what came before. Our tasks have the prompt of
`tasks/choices.py`, and a test holds the harness' log-likelihoods to ours, item by item.

Source: EleutherAI's lm-evaluation-harness (github.com/EleutherAI/lm-evaluation-harness, MIT). Where this differs from
its command line: softmax is of float32 whatever the weights are, no stream is kept while scoring, requests cut for
their length are counted, and nothing is gathered about the machine. The only file that needs the extra `eval`.
"""

import contextlib
import copy
import difflib
import io
import logging
import math
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nestling.core.errors import ConfigError, ContextError
from nestling.tasks.choices import prompt_text
from nestling.tasks.questions import LETTERS, Question

os.environ.setdefault("DISABLE_MULTIPROC", "1")  # its bootstrap would fork a process that holds a model

try:
    from datasets import Dataset
    from lm_eval import evaluator
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise ContextError(
        f"tasks of lm-evaluation-harness need the package lm-eval ({error})",
        where="eval",
        remedy="pip install 'nestling[eval]'",
    ) from error

VERSION = metadata.version("lm_eval")
BOOTSTRAP = 1000
"""Resamples for the standard error of what is no mean over items."""
SEEDS = (0, 1234, 1234, 1234)
"""Of Python, NumPy, torch and the choice of examples: those of the harness' own command line."""
_OF_CHOICES = ("acc", "acc_norm", "acc_bytes")


class InMemory(HFLM):
    """A causal language model in memory, adapted or not, as a model of the harness, also for `lm_eval.simple_evaluate`.

    Args:
        model: of transformers, with its adapter on; set to evaluation.
        tokenizer: it is copied, because the harness gives those without a token for padding one.
        batch_size: requests at once. All logits of a batch are made: 4 bytes a token and entry of the vocabulary.
        max_length: tokens of a request; what is longer loses its front, and is counted in `cut`. 0: as many as the
            model knows.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, *, batch_size: int = 8, max_length: int = 0) -> None:
        with _quiet():
            super().__init__(
                pretrained=model,
                tokenizer=copy.deepcopy(tokenizer),
                batch_size=batch_size,
                max_length=max_length or None,
                softmax_dtype="float32",  # in bfloat16 letters that differ would often come out alike
            )
        self.cut = 0

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            return self.model(inps, use_cache=False).logits  # nothing is read on behind a request

    def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        self.cut += sum(len(context) + len(end) > self.max_length + 1 for _, context, end in requests)
        return super()._loglikelihood_tokens(requests, *args, **kwargs)

    def tok_batch_encode(
        self, strings: Sequence[str], padding_side: str = "left", left_truncate_len: int | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if left_truncate_len:  # where text is generated
            self.cut += sum(len(self.tok_encode(text)) > left_truncate_len for text in strings)
        return super().tok_batch_encode(strings, padding_side, left_truncate_len, **kwargs)


@dataclass(frozen=True)
class Score:
    """One metric of one task or group: its value, the standard error (None where there is none), the number of items,
    and what guessing would give, where that is known. `by_item`, if the value is its mean: for comparing in pairs."""

    task: str
    metric: str
    value: float
    error: float | None
    items: int
    chance: float | None
    by_item: tuple[float, ...] = ()


@dataclass(frozen=True)
class Tasks:
    """What `load_tasks` loads: the harness' tasks and groups, and the names of those whose scores are shown."""

    loaded: dict[str, Any]
    shown: tuple[str, ...]


def load_tasks(
    names: Sequence[str],
    *,
    own: Mapping[str, Sequence[Question]],
    include: Path | None = None,
    num_fewshot: int | None = None,
) -> Tasks:
    """Load tasks, groups and tags by name. Nothing is fetched for tasks of `own`.

    Args:
        names: of the harness, of `include`, or of `own`.
        own: questions by name of their task.
        include: a folder with YAML files of tasks; functions that those name are imported and run.
        num_fewshot: examples before each item, where a task does not fix it; None: as the task says.

    Raises `ConfigError` (exit 2) for a name that nobody knows, or a task that runs code which a model writes, or needs
    pictures or sound; `ContextError` (exit 3) if a task's data or a package it needs is not there.

    >>> load_tasks(["sums"], own={"sums": [Question("1 + 1?", ("1", "2", "3", "4"), 1, "sums")]}).shown
    ('sums',)
    """
    names = list(dict.fromkeys(names))
    loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
    with _quiet():
        manager = TaskManager(include_path=include, include_defaults=False)
        if not set(names) <= {*own, *manager.all_subtasks}:  # groups too, for they may be of the harness' own tasks
            manager = TaskManager(include_path=include)  # reads thousands of files
        if unknown := [name for name in names if name not in own and name not in manager.all_tasks]:
            raise ConfigError(
                f"{unknown[0]!r} is no task", where="--tasks", remedy=_near(unknown[0], manager.all_tasks, own)
            )
        for name in names:
            try:
                found = manager.load([question_task(name, own[name]) if name in own else name])
            except Exception as error:  # data that is offline or gone, a package that is missing: of many kinds
                reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
                raise ContextError(
                    f"could not be loaded ({type(error).__name__}: {reason.strip().rstrip('.')})",
                    where=name,
                    remedy="Check the network; with HF_HUB_OFFLINE=1 the hub is never asked. Tasks whose name begins "
                    "with nestling_ need none.",
                ) from error
            for kind, entries in loaded.items():
                entries |= found[kind]
    inside = {child for children in loaded["group_map"].values() for child in children}
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            needs = "runs code that the model writes" if getattr(task, "UNSAFE_CODE", False) else "is not of text alone"
            raise ConfigError(needs, where=name, remedy="Leave it out.")
        fixed = task.get_config("num_fewshot")
        if num_fewshot and fixed == 0:
            raise ConfigError("is always asked without examples", where=name, remedy="Leave out --num-fewshot.")
        if fixed is None or num_fewshot is not None:
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
    shown = [name for name in (*loaded["groups"], *loaded["tasks"]) if name in names or name not in inside]
    return Tasks(loaded, tuple(dict.fromkeys(shown)))


def question_task(name: str, questions: Sequence[Question]) -> Any:
    """Our questions as a task of the harness: the prompt of `tasks/choices.py`, and the letter as the answer.

    >>> task = question_task("sums", [Question("1 + 1?", ("1", "2", "3", "4"), 1, "sums")])
    >>> task.doc_to_text(task.test_docs()[0]), task.doc_to_choice(task.test_docs()[0])
    ('1 + 1?\\nA. 1\\nB. 2\\nC. 3\\nD. 4\\nAnswer:', ['A', 'B', 'C', 'D'])
    """
    rows = [{"text": prompt_text(q), "answer": q.answer, "subject": q.subject} for q in questions]

    def read(**_: object) -> dict[str, Dataset]:
        return {"test": Dataset.from_list(rows)}

    with _quiet():
        return ConfigurableTask(
            config={
                "task": name,
                "custom_dataset": read,
                "test_split": "test",
                "output_type": "multiple_choice",
                "doc_to_text": "text",
                "doc_to_choice": list(LETTERS),
                "doc_to_target": "answer",
                "target_delimiter": " ",
                "num_fewshot": 0,
                "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
                "metadata": {"version": 1},
            }
        )


def in_turns(areas: Sequence[Sequence[Question]]) -> list[Question]:
    """The questions of several areas, one of each in turn, so that the first few are of all areas.

    >>> a, b, c = (Question(text, ("", "", "", ""), 0, "") for text in "abc")
    >>> [question.text for question in in_turns([[a, b], [c]])]
    ['a', 'c', 'b']
    """
    return [question for turn in zip_longest(*areas) for question in turn if question is not None]


def score(model: InMemory, tasks: Tasks, *, limit: int = 0) -> list[Score]:
    """Every metric of the shown tasks and groups, in their order. Twice gives the same, examples before items included.

    Args:
        limit: of each task, of a group's single ones too, the first so many items; 0: all.
    """
    try:
        with _seeded(tasks), _quiet(progress=True):
            results: Any = evaluator.evaluate(
                model, tasks.loaded, limit=limit or None, bootstrap_iters=BOOTSTRAP, log_samples=True
            )
    except AssertionError as error:  # the harness' way to say that nothing is left of a request
        raise ConfigError(
            f"{model.max_length} tokens leave no room for a request ({str(error).strip() or 'the harness refuses'})",
            where="--max-length",
            remedy="Give more tokens, or 0 for as many as the model knows.",
        ) from error
    found = []
    for name in tasks.shown:
        leaves = _leaves(name, tasks)
        for key, value in results["results"].get(name, {}).items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, float | int | np.number):
                continue
            error = results["results"][name].get(f"{metric}_stderr,{kind}")
            samples = [s for leaf in leaves for s in results["samples"][leaf] if s["filter"] == kind and metric in s]
            known = isinstance(error, float | np.number) and math.isfinite(error)
            found.append(
                Score(
                    name,
                    metric if kind == "none" else f"{metric} ({kind})",
                    float(value),
                    float(error) if known else None,
                    sum(results["n-samples"][leaf]["effective"] for leaf in leaves),
                    _chance([tasks.loaded["tasks"][leaf] for leaf in leaves], samples, metric),
                    _by_item([s[metric] for s in samples], float(value)),
                )
            )
    return found


def difference(a: Score, b: Score) -> tuple[float, float] | None:
    """a − b over the same items, and its standard error; None where the values are no means over two or more items.

    >>> a, b = (Score("t", "acc", 0, None, 4, None, hits) for hits in ((1, 1, 1, 0), (1, 0, 1, 0)))
    >>> difference(a, b)
    (0.25, 0.25)
    """
    if len(a.by_item) != len(b.by_item) or len(a.by_item) < 2:
        return None
    each = [x - y for x, y in zip(a.by_item, b.by_item, strict=True)]
    return fmean(each), stdev(each) / math.sqrt(len(each))


def _by_item(values: list[Any], mean: float) -> tuple[float, ...]:
    """The values of single items, if the metric is their mean; none where it is made of them in another way."""
    numbers = all(isinstance(value, float | int | np.number) for value in values)
    is_mean = numbers and values and math.isclose(fmean(map(float, values)), mean, rel_tol=1e-9, abs_tol=1e-12)
    return tuple(map(float, values)) if is_mean else ()


def _leaves(name: str, tasks: Tasks) -> list[str]:
    """The single tasks of a group, or the task itself."""
    if name in tasks.loaded["groups"]:
        return [task.task_name for task in tasks.loaded["groups"][name].get_all_tasks()]
    return [name]


def _chance(tasks: list[Any], samples: list[dict[str, Any]], metric: str) -> float | None:
    """What guessing gives, the mean over items of one in so many choices; None for all but plain multiple choice."""
    plain = all(task.OUTPUT_TYPE == "multiple_choice" and not task.multiple_target for task in tasks)
    plain = plain and not any("acc_mutual_info" in task.aggregation() for task in tasks)  # it asks twice as much
    return fmean(1 / len(s["arguments"]) for s in samples) if plain and samples and metric in _OF_CHOICES else None


def _near(name: str, theirs: Sequence[str], own: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, [*own, *theirs], n=3, cutoff=0.5)
    advice = f"Did you mean {', '.join(map(repr, close))}? " if close else ""
    return f"{advice}Without a network: {', '.join(own)}. 'lm-eval ls tasks' lists the harness' {len(theirs):,}."


@contextlib.contextmanager
def _seeded(tasks: Tasks) -> Iterator[None]:
    """Draws as the harness' command line makes them, and afterwards the caller's generators as they were."""
    before = random.getstate(), np.random.get_state()  # noqa: NPY002  the harness draws from it
    with torch.random.fork_rng(devices=[]):
        random.seed(SEEDS[0])
        np.random.seed(SEEDS[1])  # noqa: NPY002
        torch.manual_seed(SEEDS[2])
        for task in tasks.loaded["tasks"].values():
            task.set_fewshot_seed(seed=SEEDS[3])
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002


@contextlib.contextmanager
def _quiet(*, progress: bool = False) -> Iterator[None]:
    """What the harness and its libraries print goes nowhere, but for bars of progress on a terminal where asked for."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    shown = progress and sys.stderr is not None and sys.stderr.isatty()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.ExitStack() as stack:
            if not shown:
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            yield
    finally:
        logging.disable(before)
