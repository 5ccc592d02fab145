"""Loading a pair: names, dtypes, tokenizers that must agree, checkpoints that must be whole."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import tiny_pair
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken

from statebridge.bridge import ModelPair, tokenizer_digest
from statebridge.errors import StateMismatch, UnsupportedModel


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The tiny pair as model folders."""
    root = tmp_path_factory.mktemp("pair")
    pair = tiny_pair.pair()
    for name, model in (("source", pair.source), ("receiver", pair.receiver)):
        model.save_pretrained(root / name)
        pair.tokenizer.save_pretrained(root / name)
    return str(root / "source"), str(root / "receiver")


def test_a_loaded_pair_is_the_same_pair(folders: tuple[str, str]) -> None:
    pair = ModelPair.from_pretrained(*folders)
    known = tiny_pair.pair()
    assert not pair.source_identity.differences(known.source_identity)
    assert not pair.receiver_identity.differences(known.receiver_identity)
    assert pair.source_identity.differences(pair.receiver_identity)
    assert not pair.receiver.training
    assert tokenizer_digest(pair.tokenizer) == tokenizer_digest(known.tokenizer)


def test_dtype_and_devices(folders: tuple[str, str]) -> None:
    pair = ModelPair.from_pretrained(*folders, dtype="bfloat16", device_map=("cpu", "cpu"))
    assert pair.source.dtype == pair.receiver.dtype == torch.bfloat16
    assert not pair.source_identity.differences(tiny_pair.pair().source_identity)
    with pytest.raises(UnsupportedModel, match="'int12' is no dtype"):
        ModelPair.from_pretrained(*folders, dtype="int12")


def test_models_that_cannot_be_loaded(folders: tuple[str, str], tmp_path: Path) -> None:
    for name in ("nobody/nothing", str(tmp_path / "absent"), str(tmp_path)):
        with pytest.raises(UnsupportedModel, match="cannot be loaded"):
            ModelPair.from_pretrained(name, folders[1])


def test_a_checkpoint_that_lacks_weights(folders: tuple[str, str], tmp_path: Path) -> None:
    pair = tiny_pair.pair()
    pair.receiver.save_pretrained(tmp_path)
    pair.tokenizer.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))
    save_file(
        {k: t for k, t in tensors.items() if k != name}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(UnsupportedModel, match=r"lacks 1 weights, the first is .*up_proj\.weight"):
        ModelPair.from_pretrained(folders[0], str(tmp_path))


def test_a_model_without_tokenizer(folders: tuple[str, str], tmp_path: Path) -> None:
    tiny_pair.pair().source.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="has no tokenizer"):
        ModelPair.from_pretrained(str(tmp_path), folders[1])


def test_tokenizers_must_cut_alike(folders: tuple[str, str], tmp_path: Path) -> None:
    tiny_pair.pair().receiver.save_pretrained(tmp_path)
    other = copy.deepcopy(tiny_pair.tokenizer())
    other.add_tokens([AddedToken("the")])
    other.save_pretrained(tmp_path)
    with pytest.raises(
        StateMismatch, match=r"different tokenizers.*vocabulary size: expected 259, found 260"
    ):
        ModelPair.from_pretrained(folders[0], str(tmp_path))


def test_the_digest_follows_the_tokenizer_and_not_its_calls() -> None:
    tokenizer = copy.deepcopy(tiny_pair.tokenizer())
    before = tokenizer_digest(tokenizer)
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    fresh = copy.deepcopy(tokenizer)
    assert tokenizer_digest(fresh) == before == tokenizer_digest(tokenizer)
    tokenizer.add_tokens(["new"])
    assert tokenizer_digest(tokenizer) != before
