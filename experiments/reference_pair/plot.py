"""Draws the loss curves of the finished runs, from the CSV files that train.py wrote."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "curves", nargs="+", metavar="LABEL=CSV", help="runs that follow each other or compete"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    figure, (text, answer) = plt.subplots(1, 2, figsize=(8, 3), dpi=100)
    for item in args.curves:
        label, path = item.split("=", 1)
        rows = list(csv.DictReader(Path(path).read_text().splitlines()))
        tokens = [int(row["tokens"]) / 1e6 for row in rows]
        text.plot(tokens, [float(row["text_nll"]) for row in rows], label=label, lw=1)
        answer.plot(tokens, [float(row["answer_nll"]) for row in rows], label=label, lw=1)
    text.set(title="prose", xlabel="million tokens", ylabel="nats per token", ylim=(2.9, 4.5))
    answer.set(title="answers of recall documents", xlabel="million tokens", yscale="log")
    text.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(args.out)


if __name__ == "__main__":
    main()
