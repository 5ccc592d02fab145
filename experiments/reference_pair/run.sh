#!/bin/sh
# The reference pair, from text to checkpoints. Needs a GPU with flash-linear-attention for the training.
#   run.sh BOOKS_TRAIN TECH_PROPOSALS BOOKS_HELDOUT WORK_FOLDER
set -eu
books=$1 tech=$2 heldout=$3 work=$4
gpus=${GPUS:-2}
here=experiments/reference_pair
train="python -m torch.distributed.run --nproc_per_node=$gpus -m experiments.reference_pair.train"

python -m experiments.reference_pair.tokenizer "$books" "$tech" \
    --characters 60000000 12000000 --out "$work/tokenizer"
python -m experiments.reference_pair.data "$books" "$tech" --split "$(basename "$tech")" \
    --tokenizer "$work/tokenizer" --out "$work/data" --recall 4224:12000 16640:1000
common="--data $work/data --tokenizer $work/tokenizer --compile"
$train $here/configs/source.yaml $common --out "$work/source"
# The first stage of the receiver ran on one GPU.
python -m experiments.reference_pair.train $here/configs/receiver.yaml $common \
    --out "$work/receiver_first" --grow-from "$work/source/model"
$train $here/configs/receiver_long.yaml $common \
    --out "$work/receiver" --grow-from "$work/receiver_first/model"
# Nothing was chosen on the second half of the books.
python -m experiments.reference_pair.judge "$work/source/model" "$work/receiver/model" "$heldout" \
    --skip 71 --count 72 --out "$work/judged"
