"""Two models that take turns on one device, for a device that does not hold both.

Held are both models on the host, and one of them on the device: the one that was asked for last. Code that works
with a `ModelPair` works with this one as it is, as long as it asks the pair for a model right before each use.
"""

from __future__ import annotations

from typing import Any

import torch

from statebridge.bridge.pair import ModelPair


class TurnPair(ModelPair):
    """Source and receiver that take turns on one device.

    Whichever is asked for, as `pair.source` or `pair.receiver`, moves to the device, and the other to the host.
    """

    device: torch.device

    @classmethod
    def of(cls, pair: ModelPair, device: str | torch.device) -> TurnPair:
        """The models of a pair, which both lie on the host now, taking turns on `device`."""
        turns = cls(pair.source, pair.receiver, pair.tokenizer)
        object.__setattr__(turns, "device", torch.device(device))
        return turns

    @property
    def takes_turns(self) -> bool:
        """True: a change from one model to the other costs moving both."""
        return True

    def __getattribute__(self, name: str) -> Any:
        """Attributes as they are; a model comes to the device first."""
        found = super().__getattribute__(name)
        if name not in ("source", "receiver"):
            return found
        values = super().__getattribute__("__dict__")
        other = values["receiver" if name == "source" else "source"]
        if "device" in values and found.device != values["device"]:
            other.to("cpu")
            found.to(values["device"])
        return found
