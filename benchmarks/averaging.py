"""The averaging identity on the full-width ResNet-18, after real local steps on real images.

    max |Σ p_k θ(z_k) − θ(Σ p_k z_k)| / max |θ|

Eight clients take some AdamW steps on their own share of MNIST (as three equal colour channels); the models they arrive
at are averaged as weights and as latents, and the two compared. The paper measures 6e-8.

    python benchmarks/averaging.py [--steps 5] [--model resnet18] [--width 64] [--json]
"""

import nestling  # first: it sets how idle OpenMP threads wait  # isort: skip

import argparse
import json

import numpy as np
import torch
import torch.nn.functional as F

from nestling.adapters.base import averaging_error
from nestling.models.resnet import make_resnet
from nestling.tasks.data import load_images
from nestling.tasks.partition import dirichlet_shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    images, _ = load_images("digits")
    shares = dirichlet_shares(images.y, clients=args.clients, alpha=0.1, seed=0)
    model = make_resnet(args.model, width=args.width, channels=3, classes=10, seed=0)
    adapter = nestling.attach(model, nestling.LatentConfig(seed=7, targets=("*conv*",)))
    start, states, weights = adapter.vector(), [], []
    for share in shares:
        if not len(share):
            continue
        adapter.load_vector(start)
        optimizer = torch.optim.AdamW(adapter.trainable(), lr=3e-2, weight_decay=0.0)
        for step in range(args.steps):
            items = np.take(share, range(32 * step, 32 * (step + 1)), mode="wrap")
            x = torch.from_numpy(images.x[items]).float().div(255).expand(-1, 3, -1, -1)
            loss = F.cross_entropy(model(x), torch.from_numpy(images.y[items]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        states.append(adapter.vector())
        weights.append(len(share))
    report = {
        "model": args.model,
        "width": args.width,
        "adapted_weights": sum(t.numel() for t in adapter.weights().values()),
        "clients": len(states),
        "steps": args.steps,
        "largest_latent": float(max(np.abs(s).max() for s in states)),
        "averaging_error": averaging_error(adapter, states, weights),
    }
    if args.json:
        print(json.dumps(report))
    else:
        print(
            "  ".join(
                f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in report.items()
            )
        )
    if not report["averaging_error"] <= 1e-6:
        raise SystemExit("averaging latents is not averaging weights: the adapter is wrong")


if __name__ == "__main__":
    main()
