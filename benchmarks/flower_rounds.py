"""Seconds and bytes of a round over Flower: our deployment beside a plain Flower app that does the same training.

    python benchmarks/flower_rounds.py [--rounds 6] [--sites 3] [--json]

FLITE on the packaged digits, a site for each client, all on this machine over the loopback without TLS:

in process   a worker is called for one client after another: what training takes, and the state that it ends in;
nestling     `nestling serve`, `join` and `submit` as they are: a starter and a warm worker at each site, our polling;
plain        Flower's programs with Flower's polling. For every message a ClientApp imports torch, builds the model from
             the file of frozen weights, loads the data and trains; FedAvg has the latents as one array, clients do not
             evaluate.

Both federations have the base beforehand and judge every state on the server. Each runs for one round first, then for
`--rounds`; a round lasts from one evaluation to the next, and the median leaves out the first. Of it are

training   at least max(longest client, sum of clients / cores), taken in process;
starts     at least so many times what a message's process does before it can train or call the worker, taken alone;
rest       what is left: polling, HTTP, the server's work, and whatever the cores are contended for.

Bytes are Flower's own counters (`flwr list`: messages and objects, without HTTP's heads): the longer run's minus those
of the run of one round, so that settings and greetings, sent once, are not in them.

No ratio is printed and the exit code is 1 unless our state is that of the run in process to the bit, all sites replied
in every round, and both accuracies are within `NEAR` of it.
"""

import nestling  # first: it sets how idle OpenMP threads wait  # isort: skip

import argparse
import ctypes
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from cells import origin, with_settings

from nestling.build import build
from nestling.codec.message import state_digest
from nestling.config.load import dump_config
from nestling.config.schema import RunConfig
from nestling.core.types import Failure
from nestling.deploy import programs
from nestling.deploy.folder import make_private
from nestling.federation.loop import run_rounds
from nestling.models.backbones import base_bytes
from nestling.runs.environment import describe
from nestling.runs.recorder import read_rows

RESULTS = Path(__file__).parent / "results" / "flower_rounds.json"
NEAR = 0.02
PATIENCE = 1800.0
"""Seconds for whatever has to happen."""
PR_SET_CHILD_SUBREAPER = 36
BIN = Path(sys.executable).parent

PYPROJECT = """\
[project]
name = "plain"
version = "1.0.0"
license = {{ file = "LICENSE" }}
dependencies = []

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.flwr.app]
publisher = "benchmark"

[tool.flwr.app.components]
serverapp = "plain.server:app"
clientapp = "plain.client:app"

[tool.flwr.app.config]
config = {config}
out = {out}
"""

CLIENT = """\
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    import nestling
    import numpy as np
    import torch
    from nestling.build import build
    from nestling.config.load import parse_config
    from nestling.federation.local import train_by_rule

    torch.set_num_threads(1)
    config = parse_config(context.run_config["config"])
    worker, client, local = build(config).workers[0], context.node_config["partition-id"], config.local
    worker.adapter.load_vector(np.array(message.content["arrays"]["latents"].numpy(), np.float32))
    done = local.epochs * (message.content["config"]["server-round"] - 1)
    train_by_rule(
        worker.model, worker.adapter, worker.task, local, {}, client=client, seed=config.seed,
        epochs=range(done, done + local.epochs), of=local.epochs * config.rounds,
    )
    content = RecordDict({
        "arrays": ArrayRecord({"latents": Array(worker.adapter.vector())}),
        "metrics": MetricRecord({"num-examples": worker.task.examples(client)}),
    })
    return Message(content, reply_to=message)
"""

SERVER = """\
import json
import time
from pathlib import Path

from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    import nestling
    import numpy as np
    import torch
    from nestling.build import build
    from nestling.config.load import parse_config

    torch.set_num_threads(1)
    config = parse_config(context.run_config["config"])
    parts, ends, accuracies = build(config), [], []

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        accuracies.append(parts.evaluate(parts.workers[0], np.array(arrays["latents"].numpy(), np.float32)))
        ends.append(time.monotonic())
        return MetricRecord({"accuracy": accuracies[-1]})

    strategy = FedAvg(
        fraction_evaluate=0.0, min_train_nodes=config.task.clients, min_available_nodes=config.task.clients,
        train_metrics_aggr_fn=lambda replies, key: MetricRecord({"replies": len(replies)}),
    )
    result = strategy.start(
        grid, ArrayRecord({"latents": Array(parts.server.state)}), num_rounds=config.rounds, evaluate_fn=evaluate
    )
    told = {
        "seconds": [after - before for before, after in zip(ends, ends[1:])],
        "replies": [metrics["replies"] for metrics in result.train_metrics_clientapp.values()],
        "accuracy": accuracies[-1],
    }
    Path(context.run_config["out"]).write_text(json.dumps(told))
"""

START = "from importlib.metadata import entry_points as e; e(group='console_scripts')['flwr-clientapp'].load()\n"
PLAIN_START = START + "import sys, nestling\nfrom nestling.build import build\n"
PLAIN_START += "from nestling.config.load import load_config\nbuild(load_config(sys.argv[1]))"
OUR_LINE = ["-I", "-S", "-c", "import json, os, signal, socket, sys"]  # as `deploy/starter_call.py`, before the fork


class Processes:
    """What was started, and all that has come of it: nothing outlives `end`, for orphans become this process' own."""

    def __init__(self, folder: Path) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._folder, self._started = folder, list[subprocess.Popen]()

    def start(self, name: str, *line: object, env: Mapping[str, str] | None = None) -> "subprocess.Popen[bytes]":
        """A process whose output is in the log of that name."""
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                list(map(str, line)), cwd=self._folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self._started.append(process)
        return process

    def run(self, name: str, *line: object, env: Mapping[str, str] | None = None) -> float:
        """Start it and wait until it has ended well; returns the seconds it took."""
        began = time.perf_counter()
        if code := self.start(name, *line, env=env).wait(PATIENCE):
            sys.exit(f"{name} ended with {code}:\n{self.log(name)[-3000:]}")
        return time.perf_counter() - began

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text("utf-8", "replace")

    def until(self, name: str, text: str) -> None:
        """Wait until a log has this text."""
        end, process = time.monotonic() + PATIENCE, self._started[-1]
        while text not in self.log(name):
            if time.monotonic() > end or process.poll() is not None:
                sys.exit(f"{name} does not begin:\n{self.log(name)[-3000:]}")
            time.sleep(0.2)

    def end(self) -> None:
        """All of it, gently at first."""
        for process in self._started[::-1]:
            with suppress(ProcessLookupError):
                process.terminate()
        until = time.monotonic() + 20
        while time.monotonic() < until and _descendants():
            time.sleep(0.2)
        while left := _descendants():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)
        for process in self._started:
            process.wait()
        self._started.clear()


def _descendants() -> list[int]:
    parents = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = path.read_text("utf-8", "replace").rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(path.parent.name)] = int(parent)
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


class Timed:
    """An engine that calls one worker for one client after another, and how long each took in each round."""

    def __init__(self, handle: Callable[[int, bytes], bytes]) -> None:
        self._handle, self.seconds = handle, list[dict[int, float]]()

    def exchange(self, messages: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
        replies, took = dict[int, bytes | Failure](), dict[int, float]()
        for client, message in messages.items():
            began = time.perf_counter()
            replies[client] = self._handle(client, message)
            took[client] = time.perf_counter() - began
        self.seconds.append(took)
        return replies


def in_process(config: RunConfig, weights: Path) -> dict[str, Any]:
    """The run without Flower; the base's bytes go to `weights`."""
    torch.set_num_threads(1)  # as at the sites
    parts = build(config)
    weights.write_bytes(base_bytes(parts.base))
    engine = Timed(parts.workers[0].handle)
    *_, done = run_rounds(
        parts.server, engine, parts.task.clients(), lambda state: parts.evaluate(parts.workers[0], state),
        rounds=config.rounds, per_round=0, patience=1, seed=config.seed,
    )  # fmt: skip
    cores = min(config.task.clients, os.cpu_count() or 1)
    least = [max(*took.values(), sum(took.values()) / cores) for took in engine.seconds]
    return {
        "accuracy": done.accuracy,
        "state_digest": state_digest(done.state),
        "base_hash": parts.base_hash,
        "payload_bytes": 4 * parts.agreement.layout.size,
        "message_bytes_down": done.bytes_down // config.task.clients,
        "message_bytes_up": done.bytes_up // config.task.clients,
        "training_seconds": [[took[client] for client in sorted(took)] for took in engine.seconds],
        "training": median(least[1:]),
    }


def ours(config: RunConfig, started: Processes, here: Path, weights: Path, base: str) -> dict[str, Any]:
    """The run over `nestling serve`, `join` and `submit`."""
    nestling_command, port = (sys.executable, "-m", "nestling"), free_port()
    server = ("--server", f"127.0.0.1:{port}", "--insecure")
    started.start("serve", *nestling_command, "serve", "--dir", here / "fed", "--port", port, "--insecure")
    started.until("serve", "Uvicorn running")
    for n in range(config.task.clients):
        make_private(here / f"s{n}")
        (make_private(here / f"s{n}" / "bases") / f"{base}.safetensors").write_bytes(weights.read_bytes())
        started.start(f"site{n}", *nestling_command, "join", *server, "--client", n, "--dir", here / f"s{n}")
        started.until(f"site{n}", "SuperNode ID")
    traffic = []
    for name, rounds in (("one", 1), ("measured", config.rounds)):
        (here / f"{name}.toml").write_text(dump_config(dataclasses.replace(config, name=name, rounds=rounds)))
        started.run(name, *nestling_command, "submit", here / f"{name}.toml", *server, "--json")
        traffic.append(wire(programs.environment(here / "fed", {}), "nestling"))
    result = json.loads(started.log("measured").splitlines()[-1])
    rows = read_rows(Path(result["run_dir"]) / "metrics.jsonl")
    ends = [row["seconds"] for row in rows]
    return {
        "seconds": [ends[0], *(after - before for before, after in pairwise(ends))],
        "replies": [row["accepted"] for row in rows],
        "accuracy": result["accuracy"],
        "state_digest": result["state_digest"],
        **per_message(traffic, config),
    }


def plain(config: RunConfig, started: Processes, here: Path) -> dict[str, Any]:
    """The run over Flower's own programs."""
    port, home = free_port(), here / "plain-home"
    home.mkdir()
    programs.write_connection(home, server=f"127.0.0.1:{port}", ca=None)
    env = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    env |= {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    env |= {"PYTHONUNBUFFERED": "1", "PATH": f"{BIN}{os.pathsep}{env.get('PATH', '')}"}
    link = ("--insecure", "--host", "127.0.0.1", "--port", port, "--database", here / "plain.db")
    started.start("link", BIN / "flower-superlink", *link, "--disable-runtime-dependency-installation", env=env)
    started.until("link", "Uvicorn running")
    for n in range(config.task.clients):
        node = ("--insecure", "--superlink", f"127.0.0.1:{port}", "--port", free_port())
        own = f"partition-id={n} num-partitions={config.task.clients}"
        started.start(f"node{n}", BIN / "flower-supernode", *node, "--node-config", own, env=env)
        started.until(f"node{n}", "SuperNode ID")
    traffic = []
    for name, rounds in (("plain-one", 1), ("plain-measured", config.rounds)):
        app, out = here / name, here / f"{name}.json"
        (app / "plain").mkdir(parents=True)
        text = dump_config(dataclasses.replace(config, rounds=rounds))
        (app / "pyproject.toml").write_text(PYPROJECT.format(config=json.dumps(text), out=json.dumps(str(out))))
        (app / "LICENSE").write_text("Apache-2.0\n")
        for file, content in (("__init__", ""), ("client", CLIENT), ("server", SERVER)):
            (app / "plain" / f"{file}.py").write_text(content)
        started.run(name, BIN / "flwr", "run", app, "nestling", "--stream", env=env)
        if not out.is_file():
            sys.exit(f"{name} has failed:\n{started.log(name)[-3000:]}")
        traffic.append(wire(env, "nestling"))
    return {**json.loads(out.read_text()), **per_message(traffic, config)}


def wire(env: Mapping[str, str], connection: str) -> dict[str, tuple[int, int]]:
    """Of each run: the bytes that Flower counted to the sites, and from them."""
    done = subprocess.run(
        [BIN / "flwr", "list", connection, "--format", "json"], env=env, capture_output=True, text=True, check=True
    )  # fmt: skip
    runs = json.loads(done.stdout[done.stdout.index("{") :])["runs"]
    return {r["run-id"]: tuple(r["network-traffic"][f"{way}-bytes"] for way in ("outbound", "inbound")) for r in runs}


def per_message(traffic: list[dict[str, tuple[int, int]]], config: RunConfig) -> dict[str, float]:
    """Bytes per client and round: the second run's minus the first's, which had one round."""
    (first,), messages = traffic[0].values(), (config.rounds - 1) * config.task.clients
    (second,) = (counted for run, counted in traffic[1].items() if run not in traffic[0])
    return {f"wire_bytes_{way}": (second[i] - first[i]) / messages for i, way in enumerate(("down", "up"))}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(sites: int, rounds: int, here: Path) -> dict[str, Any]:
    """All three, one after another, and what a message's process takes before it can begin."""
    changed = {"rounds": rounds, "task.clients": sites, "machine.references": False, "machine.workers": 1}
    config, weights = with_settings(nestling.load_config("flite-digits"), changed), here / "base.safetensors"
    report: dict[str, Any] = {"in process": in_process(config, weights)}
    print(f"in process: {report['in process']['accuracy']:.2%}", file=sys.stderr, flush=True)
    held = with_settings(config, {"base.weights": str(weights)})
    (here / "held.toml").write_text(dump_config(held))
    started, times = Processes(here), max(1.0, sites / (os.cpu_count() or 1))
    for name, line, federation in (
        ("nestling", OUR_LINE, lambda: ours(config, started, here, weights, report["in process"]["base_hash"])),
        ("plain", ["-c", PLAIN_START, here / "held.toml"], lambda: plain(held, started, here)),
    ):
        try:
            alone = median(started.run("start", sys.executable, *line) for _ in range(3))
            row = federation()
        finally:
            started.end()
        row |= {"round": median(row["seconds"][1:]), "start_seconds": alone, "starts": times * alone}
        row["rest"] = row["round"] - report["in process"]["training"] - row["starts"]
        report[name] = row
        print(f"{name}: {row['round']:.2f} s a round, {row['accuracy']:.2%}", file=sys.stderr, flush=True)
    return report


def check(report: Mapping[str, Any], sites: int) -> None:
    """End the program, before a ratio is printed, unless the three did the same."""
    here = report["in process"]
    if report["nestling"]["state_digest"] != here["state_digest"]:
        sys.exit("our state over Flower is not that of the run in process; not compared")
    for name in ("nestling", "plain"):
        row = report[name]
        if set(row["replies"]) != {sites}:
            sys.exit(f"{name}: {row['replies']} replies in its rounds, of {sites}; not compared")
        if not abs(row["accuracy"] - here["accuracy"]) <= NEAR:
            sys.exit(f"{name}: accuracy {row['accuracy']:.2%}, in process {here['accuracy']:.2%}; not compared")


def table(report: Mapping[str, Any]) -> str:
    """Markdown: a line for each, and what it says."""
    here, lines = report["in process"], []
    for name, title in (("nestling", "`nestling serve`, warm workers"), ("plain", "plain Flower, FedAvg")):
        row = report[name]
        cells = [row["round"], here["training"], row["starts"], row["rest"]]
        sent = [f"{row[f'wire_bytes_{way}']:,.0f}" for way in ("down", "up")]
        lines.append(f"| {title} | {' | '.join([*(f'{s:.2f}' for s in cells), *sent])} | {100 * row['accuracy']:.1f} |")
    head = "| | s a round | training | starts | rest | bytes down | bytes up | accuracy, % |\n|---|" + "---:|" * 7
    return "\n".join([head, *lines]) + (
        f"\n\nA round of the plain app takes {report['plain']['round'] / report['nestling']['round']:.1f} times ours; "
        f"medians of {len(report['plain']['seconds']) - 1} rounds without the first. Bytes are per client and round;"
        f" of them {here['payload_bytes']:,} are numbers, our messages have {here['message_bytes_down']:,} down and "
        f"{here['message_bytes_up']:,} up. In process: {100 * here['accuracy']:.1f} %."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="of which the first is left out")
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--json", action="store_true", help=f"also write results/{RESULTS.name}")
    options = parser.parse_args()
    if min(options.rounds, options.sites) < 2:
        parser.error("--rounds and --sites must be at least 2")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    load = os.getloadavg()[0]
    with TemporaryDirectory(prefix="nestling-") as here:  # a short path: a socket's has to be
        report = measure(options.sites, options.rounds, Path(here))
    check(report, options.sites)
    if options.json:
        head = origin(" ".join(["python benchmarks/flower_rounds.py", *sys.argv[1:]]))
        seen: dict[str, Any] = describe()
        head |= {"platform": seen["platform"], "cpus": seen["cpus"], "load": load, "settings": seen["settings"]}
        head["packages"] = {name: seen["packages"][name] for name in ("flwr", "numpy", "torch")}
        head["poll"] = {"nestling": programs.POLL, "plain": "Flower's defaults"}
        RESULTS.write_text(json.dumps({"origin": head, **report}, indent=1, allow_nan=False) + "\n", "utf-8")
    print(f"{options.sites} sites, {os.cpu_count()} cores, load average before: {load:.1f}\n\n{table(report)}")


if __name__ == "__main__":
    main()
