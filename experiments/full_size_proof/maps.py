"""Random maps near the identity for every part of a pair's state: a bridge that costs what a fitted one costs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from statebridge.bridge import Bridge, ModelPair
from statebridge.bridge.artefact import BridgeConfig
from statebridge.bridge.geometry import Geometry
from statebridge.calibrate import Calibrator
from statebridge.translate import BlockAffine, HeadAffine, HeadBilinear, Translator

PLANS = ("DDD", "TDD", "TTT")


def random_maps(pair: ModelPair, seed: int = 0) -> dict[tuple[int, str], Translator]:
    """Maps of all parts, on the receiver's device."""
    generator = torch.Generator().manual_seed(seed)
    device = pair.receiver.device

    def near_identity(count: int, source: int, receiver: int) -> torch.Tensor:
        noise = torch.randn(count, source, receiver, generator=generator) * (0.1 * source**-0.5)
        return (torch.eye(source, receiver) + noise).to(device)

    def noise(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.1).to(device)

    geometry = Geometry.of(pair)
    maps: dict[tuple[int, str], Translator] = {}
    for index, (heads, ks, kr, vs, vr) in geometry.key_value.items():
        maps[index, "key"] = HeadAffine(near_identity(heads, ks, kr), noise(heads, kr))
        maps[index, "value"] = HeadAffine(near_identity(heads, vs, vr), noise(heads, vr))
    for index, ((heads, *a), (_, *b)) in geometry.recurrent.items():
        left, right = near_identity(heads, b[0], a[0]), near_identity(heads, b[1], a[1])
        maps[index, "recurrent_state"] = HeadBilinear(left, right, noise(heads, *a), noise(heads, *b))
    for index, layout in geometry.conv.items():
        sizes = {size: len(members) for size, members in layout.buckets().items()}
        maps[index, "conv_state"] = BlockAffine(
            layout,
            tuple(near_identity(count, size, size) for size, count in sizes.items()),
            tuple(noise(count, size) for size, count in sizes.items()),
        )
    return maps


def random_bridges(pair: ModelPair, seed: int = 0) -> dict[str, Bridge]:
    """One bridge per plan, and one with a calibrator on top of TDD."""
    maps = random_maps(pair, seed)
    config = BridgeConfig(pair.source_identity, pair.receiver_identity, "TTT", "")
    bridges = {plan: Bridge(dataclasses.replace(config, plan=plan), maps) for plan in PLANS}
    bridges["TDD + calibrator"] = bridges["TDD"].with_calibrator(random_calibrator(pair, seed))
    return bridges


def random_calibrator(pair: ModelPair, seed: int = 0, rank: int = 4) -> Calibrator:
    """A calibrator whose residuals are small and not 0."""
    made: Any = Calibrator.identity(pair.receiver_identity.layers, rank, seed=seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.02)
    return made.to(pair.receiver.device)
