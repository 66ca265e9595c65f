"""What the two papers claim, beside what we measured, each with a verdict that follows from numbers.

The verdict is computed here from benchmarks/results, not written: *reproduced* if our 95 % interval lies on the side
the claim says (or holds its figure, where it is one), *contradicted* if it lies on the other, *not told apart* if it
holds both, *direction only* where what we measured is another quantity than theirs. `documents.py` puts the table into
docs/CLAIMS.md. Differences of runs are paired, over seeds (t) or over items (bootstrap).
"""

import nestling  # first: it sets how idle OpenMP threads wait

# isort: split
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from saved import Missing, lines, points, read, result

from nestling.counts import plan
from nestling.report.intervals import interval
from nestling.report.tables import human_bytes
from nestling.runs.result import Result
from nestling.tasks.recall import paired_difference

HALF = 0.005
"""Half a point, within which two methods count as equal."""
PARETO, ABLATIONS = "python benchmarks/pareto.py --json", "python benchmarks/ablations.py --json"
NO_DATA = ("its data are on no package index; one command is in [BENCHMARKS.md](BENCHMARKS.md)", "not testable here")


@dataclass(frozen=True)
class Claim:
    """One line: what is claimed, the paper's figure, and ours with the verdict."""

    says: str
    figure: str
    ours: Callable[[], tuple[str, str]]


def verdict(low: float, high: float, *, above: float) -> str:
    """Whether an interval says that the number is above a bound.

    >>> verdict(1.0, 2.0, above=0.0), verdict(-2.0, -1.0, above=0.0), verdict(-1.0, 1.0, above=0.0)
    ('reproduced', 'contradicted', 'not told apart')
    """
    return "reproduced" if low > above else "contradicted" if high < above else "not told apart"


def over_seeds(a: list[Result], b: list[Result]) -> tuple[float, float, float]:
    """Mean of a − b over the seeds both have, and the ends of its 95 % t-interval."""
    other = {r.seed: r.accuracy for r in b}
    found = [r.accuracy - other[r.seed] for r in a if r.seed in other]
    mean = sum(found) / len(found)
    low, high = interval(found, 0) or (float("-inf"), float("inf"))  # one seed says nothing of others
    return mean, low, high


def digits(method: str, codec: str = "float32", file: str = "digits_5_seeds") -> list[Result]:
    """The runs of one method in the main table."""
    results = map(Result.from_dict, read(file))
    return [r for r in results if (r.method, r.codec) == (method, codec)]


def swept(claim: str, setting: str) -> list[Result]:
    """The runs of one row of the ablations."""
    rows = read("ablations", ABLATIONS)["rows"]
    (row,) = (r for r in rows if (r["claim"], r["setting"]) == (claim, setting))
    return list(map(Result.from_dict, row["results"]))


def method(label: str) -> list[Result]:
    """The runs of one row of the table of all methods."""
    return list(map(Result.from_dict, read("pareto", PARETO)["methods"][label]["results"]))


def mean(results: list[Result]) -> float:
    return sum(r.accuracy for r in results) / len(results)


def within(low: float, high: float, *, bound: float) -> str:
    """Whether an interval says that a difference is at most a bound, either way.

    >>> within(-0.002, 0.004, bound=0.005), within(0.007, 0.025, bound=0.005), within(-0.01, 0.012, bound=0.005)
    ('reproduced', 'contradicted', 'not told apart')
    """
    if -bound <= low and high <= bound:
        return "reproduced"
    return "contradicted" if low > bound or high < -bound else "not told apart"


# FLITE


def averaging() -> tuple[str, str]:
    worst = max(float("nan") if r.averaging_error is None else r.averaging_error for r in digits("flite"))
    return f"{worst:.0e} (main job, 5 seeds)", "reproduced" if worst < 1e-6 else "contradicted"


def payload() -> tuple[str, str]:
    config = nestling.load_config("flite-cifar100-resnet18")
    planned = plan(config)
    factor = 4 * planned.adapted_parameters / planned.payload_bytes_up
    text = f"{planned.payload_bytes_up:,} B for {planned.adapted_parameters:,} weights: {factor:,.0f}×"
    return text, "reproduced" if round(factor) == 8718 else "contradicted"


def gap() -> tuple[str, str]:
    small = over_seeds(digits("fedavg"), digits("flite"))
    file = "digits_resnet18_w32"
    large = over_seeds(digits("fedavg", file=file), digits("flite", file=file))
    text = f"FedAvg − FLITE: {points(*small)} with 77,744 weights, {points(*large)} with 2.8 million"
    said = [within(*found[1:], bound=HALF) for found in (small, large)]
    return text, f"{said[0]} on the small network, {said[1]} on the larger"


def gain() -> tuple[str, str]:
    found = over_seeds(digits("flite"), digits("fedavg"))
    return f"{points(*found)} (main job, α = 0.1)", verdict(*found[1:], above=0)


def int4() -> tuple[str, str]:
    found = over_seeds(digits("flite", "int4-message"), digits("flite"))
    return f"{points(*found)} (5 seeds)", within(*found[1:], bound=HALF)


def rotated() -> tuple[str, str]:
    found = over_seeds(method("FLITE, rotated 2 bits"), method("FLITE"))
    return f"{points(*found)} at 328 B", verdict(*found[1:], above=-HALF)


def naive() -> tuple[str, str]:
    one, fair, plain = (
        mean(method(f"FedAvg{end}")) for end in (", int4 of weights (naive)", ", int4 of differences (fair)", "")
    )
    text = f"weights {100 * one:.1f} %, differences {100 * fair:.1f} %, float32 {100 * plain:.1f} %"
    if one > plain - 0.05:
        return text, "contradicted"
    return text, "reproduced, as an artefact of coding" if fair > plain - 0.02 else "reproduced"


def scratch() -> tuple[str, str]:
    flite, fedavg = (swept("from scratch", f"{name} on a random base") for name in ("FLITE", "FedAvg"))
    text = f"{100 * mean(flite):.1f} % (FedAvg from the same base {100 * mean(fedavg):.1f} %)"
    low, high = over_seeds(fedavg, flite)[1:]
    return text, verdict(low, high, above=0)


def head() -> tuple[str, str]:
    found = over_seeds(swept("the method", FLITE), swept("head", "random rows, frozen"))
    return f"{points(*found)} against random rows", verdict(*found[1:], above=0)


FLITE = "FLITE: 1,280 latents, frozen orthonormal head"

# FedNL


def hits(of: Result, row: str = "trained", key: str = "hits") -> list[bool]:
    return [hit == "1" for client in of.recalls[row] for hit in client[key]]


def used() -> tuple[str, str]:
    of = result("needle_smollm2_product")
    text = (
        f"memory on − off, 1,400 items of seven kinds: of four {points(*of.gains['choice'])}, exact"
        f" {points(*of.gains['exact'])}; of four {100 * sum(hits(of, key='choices')) / of.test_items:.1f} %"
    )
    return text, verdict(*of.gains["choice"][1:], above=0)


def beside_full() -> tuple[str, str]:
    of = result("needle_smollm2_product")
    found = paired_difference(hits(of), hits(of, "full attention"))
    return f"exact {points(*found)} against full attention", "below it" if found[2] < 0 else "not told apart"


def beside_local() -> tuple[str, str]:
    of = result("needle_smollm2_product")
    found = [paired_difference(hits(of), hits(of, row)) for row in ("local only", "centralised")]
    text = f"exact {points(*found[0])} against local only, {points(*found[1])} against centralised (seven clients)"
    return text, verdict(*found[0][1:], above=0)


def longer() -> tuple[str, str]:
    rows = read("recall", "python benchmarks/recall.py --memory RUN --json")["rows"]
    on, window, full = (
        [h for c in rows[row]["1024"] for h in c["hits"]] for row in ("memory", "window alone", "full attention")
    )
    gain, beside = paired_difference(on, window), paired_difference(on, full)
    text = (
        f"at 1,024 tokens, trained on 256, its two best kinds of seven, 60 items: exact {points(*gain)} against the"
        f" window, {points(*beside)} against full attention"
    )
    return text, "direction only" if gain[1] > 0 else verdict(*gain[1:], above=0)


def beside_lora() -> tuple[str, str]:
    ours, lora = result("needle_smollm2_product"), result("needle_smollm2_lora")
    assert ours.base_hash == lora.base_hash
    four, exact = (paired_difference(hits(ours, key=key), hits(lora, key=key)) for key in ("choices", "hits"))
    text = f"of four {points(*four)}, exact {points(*exact)} (seven kinds of fact, 1,400 items)"
    return text, verdict(*four[1:], above=0)


def without(flags: str) -> Callable[[], tuple[str, str]]:
    """What a part is worth in the short form."""

    def found() -> tuple[str, str]:
        other = Result.from_dict(read("needle_smollm2_short_ablations")[flags])
        worth = paired_difference(hits(result("needle_smollm2_short")), hits(other))
        said = verdict(*worth[1:], above=0)
        return f"worth {points(*worth)} exact answers", "direction only" if said == "reproduced" else said

    return found


def streaming() -> tuple[str, str]:
    rows: dict[str, Any] = {row["row"]: row for row in read("streaming_product")["losses"]}
    less = [a - b for a, b in zip(rows["window"]["bins"], rows["memory"]["bins"], strict=True)]
    low, high = interval(less, 0) or (less[0], less[0])
    text = (
        f"the memory loses {-sum(less) / len(less):.2f} nats a token more than the window without it"
        f" [{-high:.2f}, {-low:.2f}] (16 bins of one stream); perplexity {rows['memory']['perplexity']:.0f} and"
        f" {rows['window']['perplexity']:.0f}"
    )
    return text, verdict(low, high, above=0)


def constant() -> tuple[str, str]:
    rows = [r for r in read("streaming_memory")["memory"] if r["row"] == "memory"]
    held = sorted({f"{r['cache_bytes']:,} B" for r in rows})
    text = f"{', '.join(held)} at {rows[0]['tokens']:,} to {rows[-1]['tokens']:,} tokens, with a window"
    return text, "reproduced, with a window only" if len(held) == 1 else "contradicted"


def saving() -> tuple[str, str]:
    lora, gates = 11_272_192, 32_768  # the paper's own counts, of Llama-3.2-1B
    factor, sent = lora / gates, 2 * gates
    said = ["350×" if round(factor, -1) == 350 else f"{factor:.0f}×, not 350", human_bytes(sent) + ", not 0.26 MB"]
    text = f"{'; '.join(said)}: at float16, by its own counts"
    return text, "reproduced" if round(factor, -1) == 350 and round(sent / 1e6, 2) == 0.26 else "contradicted"


CLAIMS = {
    "FLITE ([arXiv 2607.18343](https://arxiv.org/abs/2607.18343))": [
        Claim("averaging latents is averaging weights", "6e-8", averaging),
        Claim("ResNet-18 in 5,120 bytes, int4 in 648", "8,718×", payload),
        Claim("as good as FedAvg within half a point", "74.67 and 75.16 %", gap),
        Claim("better than FedAvg where clients differ (α = 0.1)", "+0.97 points", gain),
        Claim("int4 latents cost nothing", "+0.06 points", int4),
        Claim("*ours:* two rotated bits cost less than half a point", "–", rotated),
        Claim("int4 of all weights collapses", "1.11 %", naive),
        Claim("from scratch it fails", "2.5 %", scratch),
        Claim("a frozen orthonormal head helps", "+0.54 points", head),
        Claim("CIFAR-10, CIFAR-100, Tiny ImageNet, WikiText-2", "tables", lambda: NO_DATA),
    ],
    "FedNL ([arXiv 2605.16350](https://arxiv.org/abs/2605.16350))": [
        Claim("facts beyond the window are recalled (needle, four choices)", "29.7 %, chance 25", used),
        Claim("*ours:* where that stands", "–", beside_full),
        Claim("it holds on longer text than was trained on", "1,024 to 16,384 tokens", longer),
        Claim("federating gains over training alone", "–", beside_local),
        Claim("more than LoRA of the same budget", "29.7 and 28.6 %", beside_lora),
        Claim("the delta rule, not addition", "perplexity 29.8, 1,576", without("--adapter.update additive")),
        Claim("the gate", "perplexity 29.8, 349", without("--adapter.gate none")),
        Claim("the low-rank part, trained", "perplexity 29.8, 149", without("--adapter.low-rank frozen")),
        Claim("over a stream the memory lowers the loss", "−2.1 % (FedAvg +3.1 %)", streaming),
        Claim("memory is constant in the length", "O(1)", constant),
        Claim("gates are 350 times smaller than LoRA", "350×, 0.26 MB", saving),
        Claim("MMLU in five clients", "58.88 and 58.00 %", lambda: NO_DATA),
    ],
}


def claims_table() -> str:
    """All claims in Markdown, a table for each paper."""
    pieces = []
    for paper, claims in CLAIMS.items():
        rows = []
        for claim in claims:
            try:
                ours, said = claim.ours()
            except Missing as missing:
                ours, said = str(missing), "–"
            rows.append((claim.says, claim.figure, ours, f"**{said}**" if said != "–" else said))
        pieces.append(f"### {paper}\n\n" + lines(("claim", "the paper", "ours", "verdict"), rows, words=True))
    return "\n".join(pieces)
