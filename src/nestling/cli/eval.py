"""`nestling eval`: a model, adapted or not, on tasks of lm-evaluation-harness, the frozen base beside it.

The reference row is asked the same items, and a difference is paired over them. Of our own questions those are asked
that a run holds out, so that none it was trained on counts.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from math import isfinite
from os.path import isdir, isfile, lexists  # unlike Path's, False for a name too long for the system
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nestling.cli.places import Place, is_adapted, place_of
from nestling.config.checks import is_count, is_text
from nestling.config.schema import ChoicesConfig, MemoryConfig
from nestling.core.errors import ConfigError
from nestling.core.files import write_atomic
from nestling.runs.files import printable, to_json

if TYPE_CHECKING:
    from nestling.inference.harness import Score, Tasks
    from nestling.tasks.questions import Question

OWN: Mapping[str, Literal["wordnet", "mmlu-dev", "mmlu"]] = {
    "nestling_wordnet": "wordnet",
    "nestling_mmlu_dev": "mmlu-dev",
    "nestling_mmlu": "mmlu",
}
"""Our questions as tasks: name and set. The last one comes from the hub, unless the run has it in a folder."""
BASE = "frozen base"


@dataclasses.dataclass(frozen=True)
class Eval:
    """Score a model on tasks of lm-evaluation-harness, with the adapter of RUN on it and without."""

    run: tyro.conf.Positional[str]
    """A run's folder, an adapter's, or a model by itself: smollm2-135m, a folder, a .gguf file, a name on the hub."""
    tasks: tuple[str, ...]
    """nestling_mmlu_dev and nestling_wordnet (once fetched, without a network), nestling_mmlu, and all names
    of lm-evaluation-harness ('lm-eval ls tasks'), whose data comes from the hub."""
    limit: int = 0
    """The first so many items of each task, and of each task of a group; 0: all."""
    num_fewshot: int | None = None
    """Examples before each item; none given: as the task says. Ours have none."""
    memory_off: bool = False
    """A row more: a memory turned off, which is the frozen base behind the memory's window."""
    include: str = ""
    """A folder with tasks of your own as YAML. Python functions that they name are run."""
    batch_size: int = 8
    max_length: int = 0
    """Tokens of a request, of which the front is cut; 0: as many as the model knows."""
    model: str = ""
    """The model that the adapter is for; empty: the run's, or smollm2-135m."""
    dtype: str = ""
    """bfloat16 or float32, of the weights; empty: the run's, or bfloat16."""
    device: str = "cpu"
    """cpu, or a CUDA device such as cuda:0."""
    json: str = ""
    """Also write all numbers to this file."""


def evaluate(args: Sequence[str]) -> int:
    """`nestling eval RUN --tasks TASK …`: prints a table; notes go to the standard error."""
    command = tyro.cli(tyro.conf.FlagCreatePairsOff[Eval], args=list(args), prog="nestling eval")
    _check(command)
    place = _place(command)
    from nestling.adapters.store import from_pretrained
    from nestling.build import check_device
    from nestling.inference.harness import load_tasks  # says so if the extra is missing
    from nestling.models.language import load_language_model

    check_device(command.device)
    include = Path(command.include) if command.include else None
    model, tokenizer = load_language_model(place.model, dtype=place.dtype, device=command.device)
    own = {name: _questions(OWN[name], place, tokenizer) if name in command.tasks else [] for name in OWN}
    tasks = load_tasks(command.tasks, own=own, include=include, num_fewshot=command.num_fewshot)
    adapter: Any = None if place.adapter is None else from_pretrained(model, place.adapter)
    if command.memory_off and not isinstance(adapter and adapter.config, MemoryConfig):
        raise ConfigError("there is no memory to turn off", where="--memory-off", remedy="Leave it out.")
    rows: dict[str, list[Score]] = {}
    cut = 0
    if adapter is not None:
        rows[adapter.config.kind], cut = _asked(command, model, tokenizer, tasks, row=adapter.config.kind)
        if command.memory_off:
            with adapter.switch(memory=False):
                rows["memory off"], _ = _asked(command, model, tokenizer, tasks, row="memory off")
        adapter.detach()
    rows[BASE], cut_of_base = _asked(command, model, tokenizer, tasks, row=BASE)
    notes = _notes(command, place, max(cut, cut_of_base))
    _show(rows, notes)
    if command.json:
        write_atomic(Path(command.json), (to_json(_values(command, place, rows, notes), indent=2) + "\n").encode())
    return 0


def _asked(command: Eval, model: Any, tokenizer: Any, tasks: "Tasks", *, row: str) -> "tuple[list[Score], int]":
    """The scores of the model as it is now, and how many requests were cut for their length."""
    from nestling.inference.harness import InMemory, score

    print(f"nestling: scoring, {row}", file=sys.stderr, flush=True)
    held = InMemory(model, tokenizer, batch_size=command.batch_size, max_length=command.max_length)
    return score(held, tasks, limit=command.limit), held.cut


def _check(command: Eval) -> None:
    """Before minutes of reading."""
    if not command.run:
        raise ConfigError("is empty", where="RUN", remedy="Give a run's folder, an adapter's, or a model.")
    if not command.tasks:
        raise ConfigError("no task was given", where="--tasks", remedy=f"Give one or more, such as {', '.join(OWN)}.")
    is_text("RUN", command.run)
    is_text("--model", command.model)
    is_count("--limit", command.limit, 0)
    is_count("--num-fewshot", command.num_fewshot or 0, 0)
    is_count("--batch-size", command.batch_size, 1)
    is_count("--max-length", command.max_length, 0)
    if command.include and not isdir(command.include):
        raise ConfigError("is not a folder", where=printable(command.include), remedy="Give one with YAML files.")
    if command.json and (isdir(command.json) or not isdir(Path(command.json).parent)):
        raise ConfigError(
            "cannot be written", where=printable(command.json), remedy="Give a file in a folder that is there."
        )


def _place(command: Eval) -> Place:
    """What RUN is. A path whose folder is there is meant as one, also where it could be a name on the hub."""
    path = Path(command.run)
    if is_adapted(path):
        return place_of(command.run, model=command.model, dtype=command.dtype)
    if command.model:
        raise ConfigError("RUN is a model by itself", where="--model", remedy="Leave it out.")
    if isdir(path) and not isfile(path / "config.json"):
        return place_of(command.run)  # says what it is not
    if not lexists(path) and path.parent != Path() and isdir(path.parent):
        raise ConfigError("is not there", where=printable(command.run), remedy="See 'nestling ls' for the runs.")
    return place_of("", model=command.run, dtype=command.dtype)


def _questions(data: Literal["wordnet", "mmlu-dev", "mmlu"], place: Place, tokenizer: Any) -> "list[Question]":
    """Of a set that the run was trained on, the questions it holds out; else those that any such run would hold out by
    default, and of MMLU's development questions all."""
    from nestling.build_language import questions_path
    from nestling.inference.harness import in_turns
    from nestling.tasks.choices import ChoicesTask
    from nestling.tasks.questions import load_questions

    trained = place.settings.task if place.settings is not None else None
    settings = trained if isinstance(trained, ChoicesConfig) and trained.data == data else ChoicesConfig(data=data)
    questions = load_questions(data, questions_path(settings))
    if questions.scarce and settings is not trained:
        return in_turns(list(questions.domains.values()))

    def tokenize(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    task = ChoicesTask(tokenize, questions, train_items=settings.train_items, test_items=settings.test_items)
    return in_turns([task.held_out(client) for client in task.clients()])


def _notes(command: Eval, place: Place, cut: int) -> list[str]:
    """What a reader must know besides the numbers."""
    trained = place.settings.task if place.settings is not None else None
    notes = []
    theirs = any("mmlu" in name and name not in OWN for name in command.tasks)
    if theirs and isinstance(trained, ChoicesConfig) and trained.data == "mmlu":
        notes.append("the run was trained on questions of MMLU's test split; nestling_mmlu asks those it held out")
    if place.adapter is not None and place.settings is None and set(command.tasks) & set(OWN):
        notes.append("no run's settings lie beside this adapter: it may have been trained on some of these questions")
    if cut:
        notes.append(f"{cut:,} requests were longer than the model reads at once and lost their front")
    return notes


def _show(rows: "Mapping[str, list[Score]]", notes: Sequence[str]) -> None:
    """The table: a line for each metric, a column for each row of the model, and what the first one gains."""
    from nestling.inference.harness import difference

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), caption_justify="left")
    names = list(rows)
    for heading in ("task", "metric"):
        table.add_column(heading, no_wrap=heading == "task", overflow="fold")
    for heading in ("items", *names, *(("difference",) if len(names) > 1 else ()), "chance"):
        table.add_column(
            heading, justify="right", overflow="fold", style="dim" if heading == BASE and len(names) > 1 else ""
        )
    for scores in zip(*rows.values(), strict=True):
        gain = difference(scores[0], scores[-1])
        cells = [f"{scores[0].items:,}", *(_with_error(s.value, s.error) for s in scores)]
        if len(names) > 1:
            cells.append("–" if gain is None else f"{gain[0]:+.3f} ± {gain[1]:.3f}")
        cells.append("–" if scores[0].chance is None else f"{scores[0].chance:.3f}")
        table.add_row(*(Text(printable(cell)) for cell in (scores[0].task, scores[0].metric, *cells)))
    parts = ["± is one standard error"]
    if len(names) > 1:
        parts.append(f"difference: {names[0]} − {BASE}, paired over items")
    table.caption = Text(" ".join(f"{part[0].upper()}{part[1:]}." for part in (*parts, *notes)))
    console = Console()
    if not console.is_terminal:  # a program reads this: a line per metric, nothing cut
        console.width = 1 << 10
    console.print(table)


def _with_error(value: float, error: float | None) -> str:
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


def _values(command: Eval, place: Place, rows: "Mapping[str, list[Score]]", notes: Sequence[str]) -> dict[str, Any]:
    """All numbers, for a file; those that are not finite as null."""
    from nestling.inference.harness import VERSION

    def plain(score: "Score") -> dict[str, Any]:
        fields = {f.name: getattr(score, f.name) for f in dataclasses.fields(score)}
        fields["by_item"] = [x if isfinite(x) else None for x in score.by_item]
        return fields | {"value": score.value if isfinite(score.value) else None}

    return {
        "lm_eval": VERSION,
        "model": place.model,
        "dtype": place.dtype,
        "adapter": None if place.adapter is None else str(place.adapter),
        "limit": command.limit,
        "num_fewshot": command.num_fewshot,
        "notes": list(notes),
        "rows": {name: [plain(score) for score in scores] for name, scores in rows.items()},
    }
