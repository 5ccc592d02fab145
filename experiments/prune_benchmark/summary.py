"""From the files of a run to result.json and scores.json: means, paired differences, the published order, speed.

All scores are errors, so a negative difference says that the first arm is better. Intervals are paired
percentile bootstraps over tasks. The published order is that DeCoPrune is better than temporal difference,
random and reversed at the same budget; each pair comes out as holds, turned round, or open.

    python -m experiments.prune_benchmark.summary --folder runs/prune
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from statebridge.stats import Bootstrap, Interval, ScoreTable, difference, mean_score

RIVALS = ("temporal_difference", "random", "reversed_discrepancy", "streaming")
PUBLISHED = RIVALS[:3]
_BOOTSTRAP = Bootstrap(seed=0)


def summarise(folder: Path) -> dict[str, Any]:
    """Return everything that the report says."""
    about = _read(folder / "about.json")
    chosen = _read(folder / "chosen.json")
    arms = {content["arm"]: content for content in map(_read, sorted((folder / "test").glob("*.json")))}
    suffix = "+reindex" if chosen["reindexed"] else ""
    full, main = f"full{suffix}", about["config"]["main"]
    names = list(arms[full]["scores"])
    tables = {
        name: ScoreTable.from_columns(
            arms[full]["tasks"], {arm: content["scores"][name] for arm, content in arms.items()}
        )
        for name in names
    }
    rows = []
    for arm, content in arms.items():
        reference = "full+reindex" if content["reindexed"] else "full"
        rows.append(
            {key: content[key] for key in ("arm", "policy", "settings", "reindexed", "pr", "pr_generated")}
            | {"cache_bytes": content["cache_bytes"], "peak_bytes": content["peak_bytes"]}
            | {name: _plain(mean_score(tables[name], arm, _BOOTSTRAP)) for name in names}
            | {
                f"{name}_minus_full": _plain(difference(tables[name], arm, reference, _BOOTSTRAP))
                for name in names
            }
        )
    return {
        "about": about,
        "chosen": chosen,
        "suffix": suffix,
        "tasks": len(arms[full]["tasks"]),
        "arms": rows,
        "order": {name: _order(tables[name], suffix, about["config"]["ratios"]) for name in names},
        "main": main,
        "kinds": _kinds(arms, full, main, suffix, names),
        "reindexing": {name: _reindexing(tables[name]) for name in names},
        "speed": _speed(folder),
    }


def task_scores(folder: Path) -> dict[str, Any]:
    """Return what the intervals come from: every score of every task and arm, to six digits."""
    arms = [_read(path) for path in sorted((folder / "test").glob("*.json"))]
    scores = {
        name: {arm["arm"]: [float(f"{value:.6g}") for value in arm["scores"][name]] for arm in arms}
        for name in arms[0]["scores"]
    }
    return {"tasks": arms[0]["tasks"], "scores": scores}


def _order(table: ScoreTable, suffix: str, ratios: list[float]) -> list[dict[str, Any]]:
    """DeCoPrune and its head-specific variant against every rival at every budget, in both ways of spending it."""
    found = []
    for each in (False, True):
        for ratio in ratios:

            def arm(policy: str, each: bool = each, ratio: float = ratio) -> str:
                # random and streaming spend the same in each chunk anyway
                form = "-each" if each and policy not in ("random", "streaming") else ""
                return f"{policy}@{ratio}{form}{suffix}"

            for ours in ("decoprune", "decoprune_hs"):
                for rival in (*RIVALS, *(("decoprune",) if ours == "decoprune_hs" else ())):
                    if not {arm(ours), arm(rival)} <= set(table.arms):
                        continue
                    gap = difference(table, arm(ours), arm(rival), _BOOTSTRAP)
                    found.append(
                        {
                            "ours": ours,
                            "rival": rival,
                            "ratio": ratio,
                            "each": each,
                            "published": ours == "decoprune" and rival in PUBLISHED,
                            "difference": _plain(gap),
                            "verdict": _verdict(gap),
                        }
                    )
    return found


def _verdict(gap: Interval) -> str:
    if not gap.excludes(0):
        return "open"
    return "holds" if gap.estimate < 0 else "turned round"


def _kinds(
    arms: dict[str, Any], full: str, main: float, suffix: str, names: list[str]
) -> list[dict[str, Any]]:
    """The headline arms for each kind of task alone."""
    rows = []
    shown = [arm for arm in arms if arm in (full, f"streaming{suffix}") or arm.endswith(f"@{main}{suffix}")]
    for kind in dict.fromkeys(task.split("-")[0] for task in arms[full]["tasks"]):
        mine = [i for i, task in enumerate(arms[full]["tasks"]) if task.startswith(kind)]
        for arm in shown:
            means = {name: sum(arms[arm]["scores"][name][i] for i in mine) / len(mine) for name in names}
            rows.append({"kind": kind, "tasks": len(mine), "arm": arm} | means)
    return rows


def _reindexing(table: ScoreTable) -> list[dict[str, Any]]:
    """What re-indexing changes in each arm that ran both ways."""
    found = []
    for arm in table.arms:
        moved = f"{arm}+reindex"
        if moved in table.arms:
            gap = difference(table, moved, arm, _BOOTSTRAP)
            found.append({"arm": arm, "difference": _plain(gap)})
    return found


def _speed(folder: Path) -> list[dict[str, Any]]:
    rows = [_read(path) for path in sorted((folder / "speed").glob("*.json"))]
    full = {row["rows"]: row["seconds"] for row in rows if row["arm"] == "full"}
    return [row | {"times_faster": full[row["rows"]] / row["seconds"]} for row in rows]


def _plain(interval: Interval) -> dict[str, float]:
    kept = dataclasses.asdict(interval)
    return {key: kept[key] for key in ("estimate", "low", "high")}


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="folder of the run")
    args = parser.parse_args()
    result = summarise(args.folder)
    (args.folder / "result.json").write_text(
        json.dumps(result, separators=(",", ":")) + "\n", encoding="utf-8"
    )
    scores = json.dumps(task_scores(args.folder), separators=(",", ":"))
    (args.folder / "scores.json").write_text(scores + "\n", encoding="utf-8")
    for row in result["order"]["target_mse"]:
        d = row["difference"]
        print(
            f"{row['ours']} − {row['rival']} at {row['ratio']}{' each' if row['each'] else ''}: {d['estimate']:+.5f} "
            f"[{d['low']:+.5f}, {d['high']:+.5f}]  {row['verdict']}"
        )


if __name__ == "__main__":
    main()
