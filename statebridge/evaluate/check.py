"""Stop early: what could only fail after hours is looked for before the first document is read."""

from __future__ import annotations

from statebridge.bridge import Bridge, ModelPair
from statebridge.errors import ConfigError
from statebridge.evaluate.arms import handovers
from statebridge.evaluate.config import EvaluateConfig


def check(pair: ModelPair, bridge: Bridge, config: EvaluateConfig) -> str:
    """Refuse settings that contradict themselves, the bridge or the pair; give the arm that is the hand-over.

    Raises
    ------
    ConfigError
        When the settings contradict themselves; names the key.
    StateMismatch
        When the bridge is for another pair, or a plan cannot be carried out.
    """
    remedy = "Use the bridge that was fitted for this pair."
    bridge.config.source.require(pair.source_identity, "this bridge starts from another source", remedy)
    bridge.config.receiver.require(pair.receiver_identity, "this bridge leads to another receiver", remedy)
    bridges = handovers(bridge, config.plan_names)
    hand = next(iter(bridges))
    generation = config.generation.documents
    if min(config.count, config.batch_size) < 2 or generation == 1:
        raise ConfigError(
            "count, batch_size and generation.documents must be at least 2: the wrong donor is another document "
            "of the batch."
        )
    if generation and (config.generation.new_tokens < 1 or config.generation.temperature <= 0):
        raise ConfigError("generation: new_tokens must be at least 1 and temperature positive.")
    if pair.takes_turns and (generation or config.recall.items_per_depth):
        raise ConfigError(
            "recall and generation need both models on their devices; leave them out, or load the models together."
        )
    widest = max((*config.windows, *config.handover_windows), default=0)
    if widest >= config.prefix:
        raise ConfigError(f"windows: {widest} tokens are not fewer than the prefix of {config.prefix}.")
    arms = {f"window {w}" for w in config.windows} | {f"handover + {w}" for w in config.handover_windows}
    arms |= {*bridges, *config.controls} - {hand}
    known = {"nll", "excess", "top1", "kl", "js", *(f"handover − {arm}" for arm in arms)}
    known |= {"ncr"} if "empty" in arms else set()
    known |= {"tqr"} if "source" in arms else set()
    for name, gate in config.gates.items():
        if unknown := sorted({inequality.metric for inequality in gate} - known):
            raise ConfigError(
                f"gates: {name!r} needs {', '.join(unknown)}, which this run does not measure; add the arm to "
                "controls, plans or windows, or change the gate."
            )
    for branch in config.branches:
        if not branch.on_request and branch.behind not in config.gates:
            raise ConfigError(
                f"branches: {branch.name!r} waits for the gate {branch.behind!r}, which is none of "
                f"{', '.join(config.gates)}; name one of them, or set on_request."
            )
        if widest >= branch.prefix:
            raise ConfigError(
                f"branches: {branch.name!r} has a prefix no longer than the window of {widest}."
            )
    return hand
