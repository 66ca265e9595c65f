"""A report as one file: no script, no address outside itself, readable in ten years and on a telephone.

Everything that came from a run is text to the template (autoescape is on); control characters are shown as escapes;
home folders, passwords and tokens are taken out. The page forbids itself scripts and connections.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from nestling.core.files import write_atomic
from nestling.report.compare import Comparison, compare
from nestling.report.plots import figure_files, inline_svg
from nestling.report.recalls import client_headings, client_table, of_questions, recall_caption, recall_rows
from nestling.report.recalls import headings as recall_headings
from nestling.report.tables import HEADINGS, by_method, cells, human_bytes, human_seconds
from nestling.runs.environment import without_private
from nestling.runs.files import printable
from nestling.runs.recorder import RunRecord, Traffic
from nestling.runs.result import Result


def write_report(run_dirs: Sequence[Path], path: Path) -> Comparison:
    """Compare the runs and write the page to `path`. Raises what `compare` raises, and `StorageError`."""
    comparison = compare(run_dirs)
    write_atomic(path, render(comparison).encode())
    return comparison


def render(comparison: Comparison) -> str:
    """The page as text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["clean"] = _clean
    environment.filters["bytes"] = human_bytes
    environment.filters["seconds"] = human_seconds
    template = environment.from_string(Path(__file__).with_name("report.html.j2").read_text("utf-8"))
    runs = comparison.runs
    return template.render(
        title=_title(runs),
        comparison=comparison,
        headings=HEADINGS,
        rows=[(row, cells(row)) for row in comparison.rows],
        figure=_figure(comparison),
        recalls=[_recalls(run) for run in runs if run.result.recalls],
        runs=[_facts(run) for run in runs],
        traffic=_traffic(runs),
        environments=_environments(runs),
    )


def _title(runs: Sequence[RunRecord]) -> str:
    names = list(dict.fromkeys(run.result.name for run in runs))
    return names[0] if len(names) == 1 else f"{len(runs)} runs: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"


def _figure(comparison: Comparison) -> Markup:
    runs = comparison.runs
    files = figure_files([run.result for run in runs], [run.metrics for run in runs])
    # The one text that is not escaped: drawn by us, its labels are outlines and not text.
    return Markup(inline_svg(files["svg"]))  # noqa: S704


def _facts(run: RunRecord) -> dict[str, Any]:
    result = run.result
    weights = f" of {result.model_parameters:,} weights" if result.model_parameters else ""
    references = result.seconds_references
    facts = {
        "task": result.task,
        "method": f"{result.method} ({result.adapter}), {result.codec}",
        "size": f"{result.clients:,} clients, {result.rounds:,} rounds",
        "split": _split(result),
        "seed": str(result.seed),
        "trained": f"{result.trainable_parameters:,} numbers{weights}",
        "time": human_seconds(result.seconds)
        + ("" if references is None else f", and {human_seconds(references)} for the reference rows"),
        "base": result.base_hash[:16],
        "final state": result.state_digest[:16],
    }
    if result.averaging_error is not None:
        facts["averaging error"] = f"{result.averaging_error:.3g}"
    return {
        "name": run.path.name,
        "status": run.status,
        "facts": facts,
        "config": run.config,
        "command": run.command,
        # Who declined has sent nothing: such a client is in the result's counts only.
        "declined": sorted((Counter(result.rejected) - Counter(run.refusals)).items()),
        "rejected": sorted(run.refusals.items()),
        "refused": run.refused,
        "unshown": sum(run.refusals.values()) - len(run.refused),
    }


def _split(result: Result) -> str:
    if result.recalls:
        return "a subject area each" if of_questions(result) else "a kind of fact each"
    if result.alpha is not None:
        return f"Dirichlet, α = {result.alpha:g}"
    whole = result.task.endswith(("whole articles", "whole works"))
    return "no article with two clients" if whole else "equal shares"


def _recalls(run: RunRecord) -> dict[str, Any]:
    rows = recall_rows(run.result)
    clients = client_headings(rows)
    last = " The last columns are exact % of each client." if clients else ""
    return {
        "name": run.path.name,
        "title": "Questions answered" if of_questions(run.result) else "Facts recalled",
        "headings": [*recall_headings(run.result), *clients],
        "rows": [(row, row.cells(clients)) for row in rows],
        "by_client": client_table(run.result),
        "caption": recall_caption(run.result) + last,
    }


def _traffic(runs: Sequence[RunRecord]) -> list[tuple[str, Traffic]]:
    """The messages of each method, over its seeds: one line per direction and codec."""
    run_of = {id(run.result): run for run in runs}
    lines = []
    for label, group in by_method(run.result for run in runs).items():
        kinds: dict[tuple[str, str], list[Traffic]] = {}
        for kind in (kind for result in group for kind in run_of[id(result)].traffic):
            kinds.setdefault((kind.direction, kind.codec), []).append(kind)
        lines += [(label, _together(same)) for same in kinds.values()]
    return lines


def _together(kinds: Sequence[Traffic]) -> Traffic:
    return Traffic(
        kinds[0].direction,
        kinds[0].codec,
        messages=sum(kind.messages for kind in kinds),
        smallest=min(kind.smallest for kind in kinds),
        largest=max(kind.largest for kind in kinds),
        payload_bytes=sum(kind.payload_bytes for kind in kinds),
        wire_bytes=sum(kind.wire_bytes for kind in kinds),
    )


def _environments(runs: Sequence[RunRecord]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Each distinct environment once, with the runs made in it."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for run in runs:
        groups.setdefault(tuple(_lines(run.environment)), []).append(run.path.name)
    return [(", ".join(names) if len(groups) > 1 else "", list(lines)) for lines, names in groups.items()]


def _lines(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    def text(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{key} {entry}" for key, entry in value.items()) or "none"
        return "unknown" if value is None else str(value)

    return [(str(key), text(value)) for key, value in environment.items()]


def _clean(value: object) -> str:
    return without_private(printable(str(value), keep="\n\t"))
