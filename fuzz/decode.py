"""Coverage-guided fuzzing of everything that reads bytes nobody vouches for: messages, checkpoints, lines of records.

    python fuzz/decode.py [--seconds 600] [INPUT ...]        (make fuzz; needs the extra "fuzz")

The readers and what must hold for what they answer are in tests/fuzzing.py, which the tests call without a fuzzer. It
begins with valid inputs of each kind, and mutations go through the checksums. A finding, with what came out, ends it
with an exit code that is not 0; its input lies under runs/fuzz/, and runs again as INPUT. What was learnt stays there.
"""

import argparse
import hashlib
import sys
from pathlib import Path

import atheris

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
with atheris.instrument_imports(include=["nestling.codec", "nestling.core", "nestling.runs"]):
    from fuzzing import corpus, one_input

LONGEST = 4096  # bytes of an input, above the longest of the corpus
MEMORY = 1024  # MiB of the whole process: what an input claims must not decide an allocation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("inputs", nargs="*", type=Path, metavar="INPUT", help="run these alone, once each")
    options = parser.parse_args()
    found = ROOT / "runs" / "fuzz"
    kept = found / "corpus"
    kept.mkdir(parents=True, exist_ok=True)
    for data in corpus():
        (kept / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    usual = [f"-max_len={LONGEST}", f"-rss_limit_mb={MEMORY}", "-timeout=10", f"-artifact_prefix={found}/"]
    many = [f"-max_total_time={options.seconds}", "-keep_seed=1", "-print_final_stats=1", str(kept)]
    atheris.Setup([sys.argv[0], *usual, *(map(str, options.inputs) if options.inputs else many)], _one_input)
    atheris.Fuzz()


def _one_input(data: bytes) -> None:
    one_input(data)


if __name__ == "__main__":
    main()
