#!/usr/bin/env bash
# The proof at full size, part by part; every part can be called alone.
#
#   experiments/full_size_proof/run.sh OUT [PART...]     parts: kernels, one, suite (one GPU), two, shared (two GPUs)
#
# OUT gets one .json per part and one .log per call; `python -m experiments.full_size_proof.table OUT` makes the tables.
set -euo pipefail
out=$1; shift
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1
mkdir -p "$out"

kernels() {
  $python -m pytest -q tests/translate/test_translate_joined.py 2>&1 | tee "$out/kernels.log"
  $python -m benchmarks.full_size_tune 2>&1 | tee -a "$out/kernels.log"
}

one() {
  $python -m benchmarks.full_size --out "$out" 2>&1 | tee "$out/benchmark.log"
  $python -m experiments.full_size_proof.prove facts restore ridge calibrate --out "$out" 2>&1 | tee "$out/prove.log"
}

suite() { reproduce suite; }

shared() { reproduce shared -m torch.distributed.run --nproc_per_node=2; }

reproduce() {
  local name=$1 run; shift
  run=$(mktemp -d)
  $python "$@" -m statebridge reproduce all \
    --config experiments/full_size_proof/suite.yaml --random-weights --device cuda --out "$run" 2>&1 | tee "$out/$name.log"
  cp "$run/manifest.json" "$out/$name.json"
  cp "$run/report.md" "$out/$name.md"
  rm -r "$run"
}

two() {
  $python -m torch.distributed.run --nproc_per_node=2 -m experiments.full_size_proof.sharded moments --out "$out" \
    2>&1 | tee "$out/two.log"
  $python -m experiments.full_size_proof.sharded devices --out "$out" 2>&1 | tee -a "$out/two.log"
}

for part in "${@:-one}"; do $part; done
