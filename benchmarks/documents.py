"""The tables of README.md and of RESULTS.md, CLAIMS.md and BENCHMARKS.md in docs/, written out of what lies in
benchmarks/results and of what `nestling plan` counts.

    python benchmarks/documents.py [--check]

What stands in a page between `<!-- table: NAME -->` and `<!-- end -->` is this program's, and is replaced; text around
it is nobody's but the writer's. With --check nothing is written, and a page that differs ends the program with 1 (the
suite does the same). A table whose file of results does not exist says so, and how to make it.
"""

import nestling  # noqa: F401  first: it sets how idle OpenMP threads wait

# isort: split
import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import flower_language
import flower_rounds
import privacy
from claims import claims_table
from pareto import row_of
from planned_tables import bytes_of_shapes, papers_fednl, papers_flite
from saved import Missing, lines, points, read, result

from nestling.report.intervals import interval
from nestling.report.recalls import HEADINGS, recall_rows
from nestling.report.tables import Row, accuracy_text, caption_of, human_bytes, rows_of, to_markdown
from nestling.runs.result import Result
from nestling.tasks.recall import paired_difference

HERE = Path(__file__).parent
PAGES = tuple(HERE.parent / name for name in ("README.md", "docs/RESULTS.md", "docs/CLAIMS.md", "docs/BENCHMARKS.md"))
WIDTH = 160  # of a line of a page
_BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


# Images


def runs(name: str) -> str:
    """Runs side by side, as `nestling report` prints them."""
    results = [Result.from_dict(entry) for entry in read(name)]
    return f"{to_markdown(rows_of(results))}\n{fill(caption_of(results), WIDTH)}\n"


def seeds() -> str:
    """The main job seed by seed, each difference with its 95 % t-interval over the seeds."""
    by_method: dict[tuple[str, str], dict[int, float]] = {}
    for entry in map(Result.from_dict, read("digits_5_seeds")):
        by_method.setdefault((entry.method, entry.codec), {})[entry.seed] = 100 * entry.accuracy
    flite, int4, fedavg = (
        by_method[key] for key in (("flite", "float32"), ("flite", "int4-message"), ("fedavg", "float32"))
    )
    head = ("seed", "flite, float32", "flite, int4", "fedavg", "fedavg − flite", "int4 − float32")
    differences = [(fedavg[s] - flite[s], int4[s] - flite[s]) for s in flite]
    rows = [
        (str(s), *(f"{m[s]:.1f}" for m in (flite, int4, fedavg)), *(f"{d:+.1f}".replace("-", "−") for d in two))
        for s, two in zip(flite, differences, strict=True)
    ]
    means = []
    for column in zip(*differences, strict=True):
        low, high = interval(column, 0) or (column[0], column[0])
        means.append(points(sum(column) / len(column) / 100, low / 100, high / 100))
    return lines(head, [*rows, ("mean, with the 95 % interval over seeds", "", "", "", *means)])


def pareto() -> str:
    """Every method at its bytes."""
    report = read("pareto", "python benchmarks/pareto.py --json")
    items = Result.from_dict(next(iter(report["methods"].values()))["results"][0]).test_items
    rows = [Row(name, tuple(known), interval(tuple(known), items)) for name, known in report["references"].items()]
    methods = [row_of(name, list(map(Result.from_dict, m["results"]))) for name, m in report["methods"].items()]
    return to_markdown(rows + sorted(methods, key=lambda row: row.payload_up or 0))


def ablations() -> str:
    """FLITE's claims, one change at a time."""
    rows = []
    for entry in read("ablations", "python benchmarks/ablations.py --json")["rows"]:
        results = list(map(Result.from_dict, entry["results"]))
        frozen = 100 * sum(r.accuracy_base or 0 for r in results) / len(results)
        accuracy = accuracy_text(row_of(entry["setting"], results))
        sent, up = results[0].trainable_parameters, results[0].payload_bytes_up
        rows.append((entry["claim"], entry["setting"], accuracy, f"{frozen:.1f}", f"{sent:,}", f"{up:,} B"))
    return lines(("claim", "setting", "accuracy % ↑", "frozen base %", "numbers sent", "up ↓"), rows)


def quantisers() -> str:
    """Errors of each quantiser."""
    kinds: dict[str, dict[str, Any]] = {}
    for entry in read("quantisers", "python benchmarks/quantisers.py --json")["results"]:
        kinds.setdefault(entry["codec"], {})[entry["scales"]] = entry
    head = ("codec", "bytes", "equal scales", "worst layer", "tenfold spread", "worst layer")
    rows = [
        (name, f"{of['equal']['bytes']:,}", *(f"{of[s][k]:.2g}" for s in of for k in ("error", "worst_layer")))
        for name, of in kinds.items()
    ]
    return lines(head, rows)


def hostile() -> str:
    """Accuracy under each rule and attack, one line a rule."""
    found: dict[tuple[float, str], dict[str, float]] = {}
    for row in read("hostile", "python benchmarks/hostile.py --json")["rows"]:
        accuracies = [accuracy for accuracy, _ in row["found"]]
        found.setdefault((row["alpha"], row["rule"]), {})[row["attack"]] = sum(accuracies) / len(accuracies)
    attacks = list(next(iter(found.values())))
    rows = [
        (f"{alpha:g}", rule, *(f"{100 * cells[attack]:.1f}" for attack in attacks))
        for (alpha, rule), cells in found.items()
    ]
    return lines(("α", "rule", *attacks), rows)


# Language


def recalls(name: str, *, more: Sequence[tuple[str, str]] = ()) -> str:
    """Who answers how much, `more` rows from other files: (label, file), the trained row of each."""
    rows = [row.cells() for row in recall_rows(result(name))]
    for label, other in more:
        (trained,) = (row for row in recall_rows(result(other)) if row.label == result(other).method)
        rows.append((label, *trained.cells()[1:]))
    of = result(name)
    exact, choice = (points(*of.gains[key]) for key in ("exact", "choice"))
    said = (
        f"{of.test_items:,} held-out items, the same for every row; exact: greedy answer, word for word; of four: the"
        " likeliest of four values from the same text, chance 25 %; loss: of an answer's token. Memory on − memory off,"
        f" paired over items, with the 95 % interval: exact **{exact}** points, of four **{choice}**."
    )
    return f"{lines(HEADINGS, rows)}\n{fill(said, WIDTH)}\n"


def kinds(name: str, *, more: Sequence[tuple[str, str]] = ()) -> str:
    """Exact and four-choice answers by kind of fact."""
    columns = dict(result(name).recalls)
    columns |= {label: result(other).recalls["trained"] for label, other in more}
    names = {"trained": "memory"}
    rows = [
        (client["template"], *(both(clients[i]) for clients in columns.values()))
        for i, client in enumerate(columns["trained"])
    ]
    return lines(("kind of fact: exact %, of four %", *(names.get(row, row) for row in columns)), rows)


def both(client: dict[str, Any]) -> str:
    return ", ".join(f"{100 * client[key] / client['items']:.0f}" for key in ("exact", "chosen"))


def depths(name: str, *, more: Sequence[tuple[str, str]] = ()) -> str:
    """Exact answers by the depth of the fact."""
    columns = {"full attention": result(name).recalls["full attention"], "memory": result(name).recalls["trained"]}
    columns |= {label: result(other).recalls["trained"] for label, other in more}
    found: dict[str, dict[str, list[int]]] = {}
    for row, clients in columns.items():
        for client in clients:
            for depth, (right, items) in client["by_depth"].items():
                cell = found.setdefault(depth, {}).setdefault(row, [0, 0])
                cell[0], cell[1] = cell[0] + right, cell[1] + items
    rows = [
        (depth, f"{cells['memory'][1]}", *(f"{100 * cells[row][0] / cells[row][1]:.0f}" for row in columns))
        for depth, cells in sorted(found.items())
    ]
    return lines(("depth of the fact: exact %", "items", *columns), rows)


def memory_ablations() -> str:
    """The short form with one change at a time, paired with it over the same items."""
    shipped = result("needle_smollm2_short")
    changes = {"as shipped": shipped} | {
        f"`{flags}`": Result.from_dict(entry) for flags, entry in read("needle_smollm2_short_ablations").items()
    }
    rows = []
    for label, of in changes.items():
        (row,) = (row for row in recall_rows(of) if row.label == of.method)
        hits = [[h == "1" for c in r.recalls["trained"] for h in c["hits"]] for r in (shipped, of)]
        less = "" if of is shipped else points(*paired_difference(*hits), digits=0)
        clients = (both(client) for client in of.recalls["trained"])
        shares = (f"{100 * share:.1f}" for share in (row.exact, row.chosen))
        loss = "–" if row.loss is None else f"{row.loss:.3f}"
        rows.append((label, f"{of.trainable_parameters:,}", *shares, loss, *clients, less))
    templates = (client["template"] for client in shipped.recalls["trained"])
    head = ("change", "numbers", "exact % ↑", "of four % ↑", "loss ↓", *templates)
    return lines((*head, "shipped − this, exact points"), rows)


def lengths() -> str:
    """Recall by length of the text, and what the memory adds to the window and has before full attention."""
    rows = []
    saved = read("recall", "python benchmarks/recall.py --memory RUN --json")["rows"]
    for length in saved["memory"]:
        hits = {row: {key: every(saved[row][length], key) for key in ("hits", "choices")} for row in saved}
        for row in saved:
            mine = hits[row]
            items, losses = len(mine["hits"]), (c["loss"] * c["items"] for c in saved[row][length])
            shares = (f"{100 * sum(mine[key]) / items:.1f}" for key in mine)
            gains = [
                points(*paired_difference(mine[key], hits[other][key])) if row == "memory" else ""
                for other in ("window alone", "full attention")
                for key in mine
            ]
            rows.append((f"{int(length):,}", row, str(items), *shares, f"{sum(losses) / items:.2f}", *gains))
    head = (
        "tokens",
        "read by",
        "items",
        "exact % ↑",
        "of four % ↑",
        "loss ↓",
        "memory − window: exact points",
        "of four",
    )
    return lines((*head, "memory − full attention: exact points", "of four"), rows)


def every(clients: list[dict[str, Any]], key: str) -> list[bool]:
    """The hits of all clients in one list."""
    return [hit for client in clients for hit in client[key]]


def stream(name: str) -> str:
    """Next-token loss over a stream by bins of 1,024 tokens, and against the first bin."""
    rows = {row["row"]: row for row in read(name)["losses"]}
    titles = {"full": "full attention", "window": "window", "lora": "LoRA, window", "memory": "FedNL"}
    count = len(next(iter(rows.values()))["bins"])
    shown = [i for i in (0, 1, 3, 7, 11, 15) if i < count]
    table = []
    for i in shown:
        cells = (f"{row['bins'][i]:.3f} ({100 * row['relative'][i]:+.1f} %)" for row in rows.values())
        table.append((f"{i + 1}K", *(cell.replace("-", "−") for cell in cells)))
    table.append(("perplexity of all", *(f"{row['perplexity']:.1f}" for row in rows.values())))
    return lines(("tokens", *(titles[row] for row in rows)), table)


def stream_memory(name: str) -> str:
    """What a stream holds at growing lengths, and the peak of a process that reads it."""
    cells: dict[int, dict[str, Any]] = {}
    for row in read(name)["memory"]:
        cells.setdefault(row["tokens"], {})[row["row"]] = row
    titles = {"full": "full attention", "window": "window", "lora": "LoRA, window", "memory": "FedNL"}
    shown = [row for row in titles if any(row in found for found in cells.values())]
    rows = []
    for tokens in (1024, 4096, 16384, 65536):
        found = [cells.get(tokens, {}).get(row) for row in shown]
        pairs = [(f"{r['cache_bytes']:,} B", human_bytes(r["peak_bytes"])) if r else ("–", "–") for r in found]
        rows.append((f"{tokens:,}", *(cell for pair in pairs for cell in pair)))
    return lines(("tokens", *(cell for row in shown for cell in (f"{titles[row]}: cache", "peak"))), rows)


def speed(name: str) -> str:
    """How fast a language model reads and trains."""
    found = read(name)
    rows = [
        (f"{kind} {batch} × {tokens}: {row['row']}", f"{row['tokens_per_second']:,.0f}", f"{row['time_ratio']:.2f}×")
        for kind in ("reading", "training")
        for batch, tokens in [found["options"][{"reading": "read", "training": "train"}[kind]]]
        for row in found[kind]
    ]
    return lines(("", "tokens/s", "time"), rows)


def generating(name: str) -> str:
    """One token after growing contexts."""
    rows = [
        (
            f"{row['context']:,}",
            *(
                text
                for model in ("plain", "memory")
                for text in (f"{row[f'{model}_tokens_per_second']:.1f}", human_bytes(row[f"{model}_bytes"]))
            ),
        )
        for row in read(name)["generating"]
    ]
    head = ("one token after", "plain, KV cache: tokens/s", "cache", "window + memory: tokens/s", "held")
    return lines(head, rows)


def printed(module: Any) -> str:
    """The table that a benchmark prints."""
    name = module.RESULTS.stem
    return module.table(read(name, f"python benchmarks/{name}.py --json")) + "\n"


LORA = "FedAvg-LoRA of the same budget, window of 64"
EARLIER = (("*with earlier addresses*", "needle_smollm2_address"),)
SEVEN = ((LORA, "needle_smollm2_lora"), *EARLIER)
TABLES: dict[str, Callable[[], str]] = {
    "digits": lambda: runs("digits_5_seeds"),
    "digits-seeds": seeds,
    "resnet18": lambda: runs("digits_resnet18_w32"),
    "pareto": pareto,
    "ablations": ablations,
    "quantisers": quantisers,
    "hostile": hostile,
    "privacy": lambda: printed(privacy),
    "needle-short": lambda: recalls(
        "needle_smollm2_short",
        more=[(LORA, "needle_smollm2_lora_short")],
    ),
    "needle-short-kinds": lambda: kinds("needle_smollm2_short"),
    "needle-short-ablations": memory_ablations,
    "needle-seven": lambda: recalls("needle_smollm2_product", more=SEVEN),
    "needle-seven-kinds": lambda: kinds("needle_smollm2_product", more=SEVEN),
    "needle-seven-depths": lambda: depths("needle_smollm2_product", more=EARLIER),
    "needle-own": lambda: recalls("needle_smollm2"),
    "needle-lengths": lengths,
    "stream": lambda: stream("streaming_product"),
    "stream-memory": lambda: stream_memory("streaming_memory"),
    "speed": lambda: speed("language"),
    "generating": lambda: generating("language"),
    "flower-rounds": lambda: printed(flower_rounds),
    "flower-language": lambda: printed(flower_language),
    "shapes": bytes_of_shapes,
    "papers-flite": papers_flite,
    "papers-fednl": papers_fednl,
    "claims": claims_table,
}


def filled(page: str) -> str:
    """The page with every table as the results have it. Raises `KeyError` for a table that nobody makes."""

    def table(found: re.Match[str]) -> str:
        try:
            text = TABLES[found[2]]()
        except Missing as missing:
            text = f"*N{str(missing)[1:]} makes this table.*\n"
        return f"{found[1]}{text}{found[3]}"

    return _BLOCK.sub(table, page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not up to date")
    options = parser.parse_args()
    stale = [path for path in PAGES if filled(path.read_text("utf-8")) != path.read_text("utf-8")]
    if options.check and stale:
        sys.exit(f"not what benchmarks/results says: {', '.join(path.name for path in stale)}")
    for path in stale:
        path.write_text(filled(path.read_text("utf-8")), "utf-8")
        print(path.name)


if __name__ == "__main__":
    main()
