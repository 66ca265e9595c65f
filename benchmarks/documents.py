"""The tables of README.md and of RESULTS.md, CLAIMS.md and BENCHMARKS.md in docs/, written out of what lies in
benchmarks/results and of what `nestling plan` counts.

    python benchmarks/documents.py [--check]

What stands in a page between `<!-- table: NAME -->` and `<!-- end -->` is this program's, and is replaced; text around
it is nobody's but the writer's. With --check nothing is written, and a page that differs ends the program with 1 (the
suite does the same). A table whose file of results does not exist says so, and how to make it.
"""

import nestling  # first: it sets how idle OpenMP threads wait

# isort: split
import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import Any

from claims import claims_table
from message_bytes import count, planned
from pareto import row_of
from saved import Missing, lines, points, read, result

from nestling.config.schema import LoraConfig, MemoryConfig
from nestling.counts import Plan
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


# Counted, not measured


def bytes_of_shapes() -> str:
    """What FedNL sends for the shapes of published models."""
    rows = []
    for model in ("SmolLM2-135M", "Llama-3.2-1B", "Qwen2.5-1.5B"):
        for kind in ("rules", "gates, per channel", "latent over rules, 32 a tensor"):
            row = count(model, kind)
            numbers = (f"{row[key]:,}" for key in ("numbers", "gates", "bits"))
            rows.append((model, kind, *numbers, f"{row['payload_bytes_up']:,} B", f"{row['memory_bytes']:,} B"))
    return lines(("model", "what is sent", "numbers", "of them gates", "bits", "payload up", "a stream's memory"), rows)


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


FLITE = (
    ("CIFAR-100, ResNet-18", "flite-cifar100-resnet18"),
    ("CIFAR-10, ResNet-18", "flite-cifar10-resnet18"),
    ("Tiny ImageNet, ResNet-34", "flite-tiny-imagenet-resnet34"),
    ("WikiText-2, TinyGPT", "flite-wikitext2-tinygpt"),
    ("its stand-in, Shakespeare", "flite-shakespeare-tinygpt"),
)


def papers_flite() -> str:
    """The FLITE paper's runs: each command, and what its plan says."""
    rows = []
    for table, preset in FLITE:
        config = nestling.load_config(preset)
        plan = nestling.plan(config)
        up = [
            f"{nestling.plan(replace(config, codec=replace(config.codec, bits=bits))).payload_bytes_up:,}"
            for bits in (32, 8, 4)
        ]
        counted = (f"{plan.adapted_parameters:,}", f"{plan.payload_factor:,}", human_bytes(plan.total_wire_bytes))
        numbers = f"{plan.trainable_parameters:,}"
        rows.append((table, f"`nestling run {preset}`", numbers, *up, *counted, *held(plan)))
    head = ("paper's table", "command", "numbers sent", "bytes up, float32", "int8", "int4", "weights they adapt")
    return lines((*head, "times smaller", "whole run, float32", "steps", "memory"), rows)


def held(plan: Plan) -> tuple[str, str]:
    """Steps of all clients in the whole run, and what a client holds besides its activations."""
    steps = "as the text is long" if plan.steps is None else f"{plan.steps:,}"
    return steps, human_bytes(plan.weights_bytes + plan.training_bytes)


def papers_fednl() -> str:
    """The FedNL paper's runs: each command, and what its plan says."""
    rows = []
    for preset, model, flags in (
        ("mmlu-qwen2.5-1.5b", "Qwen2.5-1.5B", ""),
        ("mmlu-llama-3.2-1b", "Llama-3.2-1B", ""),
        ("needle-qwen2.5-1.5b", "Qwen2.5-1.5B", ""),
        ("needle-qwen2.5-1.5b", "Llama-3.2-1B", " --base.model meta-llama/Llama-3.2-1B"),
    ):
        config = nestling.load_config(preset)
        assert isinstance(config.adapter, MemoryConfig)
        rank, window = config.adapter.rank, config.adapter.window
        up = [
            f"{planned(replace(config, adapter=adapter), model).payload_bytes_up:,} B"
            for adapter in (
                config.adapter,
                replace(config.adapter, share="gates"),
                replace(config.adapter, dim=32),
                LoraConfig(rank=rank, alpha=2.0 * rank, window=window),
            )
        ]
        plan = planned(config, model)
        stream = f"{sum(plan.stream_bytes.values()):,} B" if window else "grows"
        whole = human_bytes(plan.total_wire_bytes)
        rows.append((f"`nestling run {preset}{flags}`", *up, whole, *held(plan), stream))
    head = ("command", "rules", "gates alone", "latents of rules", "FedAvg-LoRA", "whole run, rules")
    return lines((*head, "steps", "memory", "held by a stream"), rows)


EARLIER = (("*with earlier addresses*", "needle_smollm2_address"),)
TABLES: dict[str, Callable[[], str]] = {
    "digits": lambda: runs("digits_5_seeds"),
    "digits-seeds": seeds,
    "resnet18": lambda: runs("digits_resnet18_w32"),
    "pareto": pareto,
    "ablations": ablations,
    "quantisers": quantisers,
    "needle-short": lambda: recalls(
        "needle_smollm2_short",
        more=[("FedAvg-LoRA of the same budget, window of 64", "needle_smollm2_lora_short")],
    ),
    "needle-short-kinds": lambda: kinds("needle_smollm2_short"),
    "needle-short-ablations": memory_ablations,
    "needle-seven": lambda: recalls("needle_smollm2_product", more=EARLIER),
    "needle-seven-kinds": lambda: kinds("needle_smollm2_product", more=EARLIER),
    "needle-seven-depths": lambda: depths("needle_smollm2_product", more=EARLIER),
    "needle-own": lambda: recalls("needle_smollm2"),
    "needle-lengths": lengths,
    "stream": lambda: stream("streaming_product"),
    "stream-memory": lambda: stream_memory("streaming"),
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
