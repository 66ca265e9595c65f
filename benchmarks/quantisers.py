"""How much of a vector each quantiser loses, for how many bytes: Gaussian latents of 20 layers of 64 numbers.

    python benchmarks/quantisers.py [--seeds 200] [--layers 20] [--numbers 64] [--json [FILE]]

The layers' scales are equal, or spread tenfold (log-uniform from 1 to 10, drawn anew with each seed). Printed are means
over seeds of ‖x − x̂‖² / ‖x‖², of the whole vector and of the layer that fares worst, and the standard deviation of the
first. Every vector goes there and back through the codec; bytes are those of its body. Beside them stand the figures of
the simulation by which the codecs were chosen ("published simulation"), whose draws of scales, and whose int4 for each
layer, were not quite these.
"""

import nestling  # noqa: F401  first: it sets how idle OpenMP threads wait

# isort: split
import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from nestling.codec.codecs import CODECS, body_size, decode_body, encode_body
from nestling.codec.form import Limits
from nestling.core.vectors import Layout

RESULTS = Path(__file__).parent / "results" / "quantisers.json"
SPREADS = {"equal": 1.0, "tenfold": 10.0}
PUBLISHED = {
    ("int4-message", "equal"): "0.016",
    ("int4-message", "tenfold"): "0.030 (worst 0.55)",
    ("int4-tensor", "equal"): "0.008",
    ("int4-tensor", "tenfold"): "0.008",
    ("rotated4", "equal"): "0.0095",
    ("rotated4", "tenfold"): "0.0095",
    ("rotated2", "equal"): "0.12",
    ("rotated2", "tenfold"): "0.12",
    ("int2-message", "equal"): "0.42 to 0.98",
    ("int2-message", "tenfold"): "0.42 to 0.98",
}


def latents(seed: int, layers: int, numbers: int, spread: float) -> np.ndarray:
    """float32[layers · numbers]: normal numbers times their layer's scale, log-uniform in 1 … spread."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((layers, numbers))
    return (x * spread ** random.random((layers, 1))).astype(np.float32).ravel()


def measure(codec: str, spread: float, options: argparse.Namespace) -> dict[str, Any]:
    """Means over seeds for one codec and one spread of the layers' scales."""
    layout = Layout.of((f"layer{index}", (options.numbers,)) for index in range(options.layers))
    errors, worst = [], []
    for seed in range(options.seeds):
        x, key = latents(seed, options.layers, options.numbers, spread), seed.to_bytes(28, "little")
        body = encode_body(codec, layout, x, key=key)
        assert len(body) == body_size(codec, layout)
        left = decode_body(codec, layout, body, Limits(), key=key).astype(np.float64) - x
        lost, had = (np.square(v.astype(np.float64)).reshape(options.layers, -1).sum(axis=1) for v in (left, x))
        errors.append(lost.sum() / had.sum())
        worst.append((lost / had).max())
    return {
        "bytes": body_size(codec, layout),
        "error": float(np.mean(errors)),
        "deviation": float(np.std(errors)),
        "worst_layer": float(np.mean(worst)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--numbers", type=int, default=64, help="of each layer")
    parser.add_argument("--json", type=Path, nargs="?", const=RESULTS, help=f"also write this file ({RESULTS.name})")
    options = parser.parse_args()
    codecs = [name for name in CODECS if name.startswith(("int", "rotated"))]
    codecs.sort(key=lambda name: next(character for character in name if character.isdigit()), reverse=True)
    rows = [
        {"codec": codec, "scales": scales, **measure(codec, spread, options)}
        for codec in codecs
        for scales, spread in SPREADS.items()
    ]
    if options.json:
        settings = {name: getattr(options, name) for name in ("seeds", "layers", "numbers")}
        report = {"numpy": np.__version__, "options": settings, "spreads": SPREADS, "results": rows}
        options.json.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", "utf-8")
    print("| codec | bytes | layers' scales | error | ± | worst layer | published simulation |")
    print("|---|---:|---|---:|---:|---:|---|")
    shape_is_theirs = (options.layers, options.numbers) == (20, 64)
    for row in rows:
        published = PUBLISHED.get((row["codec"], row["scales"]), "") if shape_is_theirs else ""
        print(
            f"| {row['codec']} | {row['bytes']:,} | {row['scales']} | {row['error']:.3g} | {row['deviation']:.1g} | "
            f"{row['worst_layer']:.3g} | {published} |"
        )


if __name__ == "__main__":
    main()
