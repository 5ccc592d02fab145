"""What a state needs to know of a transformers model: geometry, dtypes, devices, identity, backend.

Geometry is measured, not derived from config fields that differ by family: the model reads one token into a
fresh cache, once, and the cache shows what each layer keeps, in which shape, dtype and on which device.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from packaging.version import Version

from statebridge.capture.families import FamilyRule, rule_for
from statebridge.capture.kernels import runnable_kernels
from statebridge.capture.walker import check_cache, layer_parts, new_cache
from statebridge.errors import UnsupportedModel
from statebridge.state import LayerSpec, LayerState, ModelIdentity, RopeSpec

OLDEST_TRANSFORMERS = "5.16.0"
_SAMPLES = 64  # weight values hashed per parameter


@dataclass(frozen=True)
class ModelProfile:
    """Measured facts of one model.

    Attributes
    ----------
    identity
        What a state must match.
    rule
        The family's rule.
    dtypes
        Per layer, field name -> dtype that the model itself caches.
    devices
        Per layer, the device of its cache tensors; None for a layer without state.
    """

    identity: ModelIdentity
    rule: FamilyRule
    dtypes: tuple[dict[str, torch.dtype], ...]
    devices: tuple[torch.device | None, ...]

    @property
    def recurrent(self) -> bool:
        """Whether any layer folds tokens into R or C, where padding cannot be told apart any more."""
        return any(spec.kind in ("recurrent", "hybrid") for spec in self.identity.layers)


_profiles: weakref.WeakKeyDictionary[torch.nn.Module, tuple[object, ModelProfile]] = (
    weakref.WeakKeyDictionary()
)


def profile(model: Any) -> ModelProfile:
    """Measure `model`, or return what was measured while its weights have not changed.

    A change made through `parameter.data` moves no version counter and is not seen.

    Raises
    ------
    UnsupportedModel
        When transformers is too old, the family is refused, or weights are offloaded.
    """
    if Version(transformers.__version__) < Version(OLDEST_TRANSFORMERS):
        raise UnsupportedModel(
            f"transformers {transformers.__version__} keeps hybrid caches in a way that loses state; "
            f"install transformers {OLDEST_TRANSFORMERS} or newer."
        )
    fingerprint = _fingerprint(model)
    known = _profiles.get(model)
    if known is not None and fingerprint is not None and known[0] == fingerprint:
        return known[1]
    measured = _measure(model)
    _profiles[model] = (fingerprint, measured)
    return measured


def identity_of(model: Any) -> ModelIdentity:
    """Identity of `model`; see `ModelIdentity`."""
    return profile(model).identity


def text_config(model: Any) -> Any:
    """Config of the text decoder, also of a multimodal model."""
    return model.config.get_text_config(decoder=True)


def cache_keyword(model: Any) -> str:
    """Name of the cache argument of `model.forward`: `cache` since transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def cache_of(output: Any) -> Any:
    """The cache in a model output, under its old or its new name; None without one."""
    return output["cache"] if "cache" in output else output.get("past_key_values")


def backend_of(model: Any) -> tuple[tuple[str, str], ...]:
    """Kernels and versions that a bit-exact continuation depends on."""
    versions = {name: _version(name) for name in ("torch", "transformers", "flash-linear-attention")}
    device = next(model.parameters()).device
    facts = {
        "attention": str(getattr(text_config(model), "_attn_implementation", "")),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        **versions,
    }
    return tuple(sorted((key, value) for key, value in facts.items() if value))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _fingerprint(model: Any) -> object | None:
    """Addresses and version counters of weights and rotary buffers; None when they are not tracked."""
    try:
        return tuple((t.data_ptr(), t._version, t.dtype, t.device) for t in _tensors(model))
    except RuntimeError:  # inference tensors keep no version counter
        return None


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers; `model.parameters()` takes four times as long, and every hand-over asks."""
    waiting = [model]
    while waiting:
        module = waiting.pop()
        for held in (module._parameters, module._buffers):
            for tensor in held.values():
                if tensor is not None:
                    yield tensor
        waiting.extend(child for child in module._modules.values() if child is not None)


def _measure(model: Any) -> ModelProfile:
    config = text_config(model)
    rule_for(config, recurrent=False)  # a refused family is named before anything runs
    weights = _weights_digest(model)
    cache = cache_of(_probe(model))
    if cache is None:
        raise UnsupportedModel(f"{config.model_type} returns no cache, so its state cannot be read.")
    check_cache(cache)
    parts = [LayerState(**layer_parts(layer)) for layer in cache.layers]
    specs = tuple(part.spec for part in parts)
    rule = rule_for(config, recurrent=any(spec.kind in ("recurrent", "hybrid") for spec in specs))
    if not any(spec.key for spec in specs):
        raise UnsupportedModel(f"{config.model_type} has no attention layer, so its cache counts no tokens.")
    return ModelProfile(
        identity=ModelIdentity(
            model_type=config.model_type,
            vocab_size=int(config.vocab_size),
            layers=specs,
            rope=_rope(model, config),
            weights=weights,
            name=str(getattr(model.config, "_name_or_path", "") or ""),
            revision=str(getattr(model.config, "_commit_hash", "") or ""),
        ),
        rule=rule,
        dtypes=tuple({field: tensor.dtype for field, tensor in part.tensors()} for part in parts),
        devices=tuple(next((t.device for _, t in part.tensors()), None) for part in parts),
    )


def _probe(model: Any) -> Any:
    """Output of `model` after one token, read into a fresh cache in eval mode."""
    cache = new_cache(model)
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.get_input_embeddings().weight.device)
    modes = {module: module.training for module in model.modules()}
    model.eval()  # gradient checkpointing would otherwise switch the cache off
    try:
        with torch.no_grad(), runnable_kernels(model):
            # explicit positions keep a multimodal model from storing rope deltas
            return model(input_ids=token, position_ids=token, use_cache=True, **{cache_keyword(model): cache})
    finally:
        for module, mode in modes.items():
            module.training = mode


def expected_layers(model: Any) -> tuple[LayerSpec, ...]:
    """Geometry of the model's state, one entry per layer."""
    return profile(model).identity.layers


def _rope(model: Any, config: Any) -> RopeSpec | None:
    parameters = getattr(config, "rope_parameters", None) or {}
    found = set()
    for module in model.get_decoder().modules():
        frequencies = getattr(module, "inv_freq", None)
        if isinstance(frequencies, torch.Tensor):
            spec = RopeSpec(
                inv_freq=tuple(float(x) for x in frequencies.float().cpu()),
                attention_scaling=float(getattr(module, "attention_scaling", 1.0)),
                axis=_mrope_axes(getattr(module, "mrope_section", None), int(frequencies.numel())),
                rope_type=str(parameters.get("rope_type", "default")),
            )
            found.add(spec)
    if len(found) > 1:
        raise UnsupportedModel(f"{config.model_type} has {len(found)} different rotary embeddings, not one.")
    if any(spec.rope_type == "dynamic" for spec in found):
        raise UnsupportedModel(
            f"{config.model_type} with dynamic rotary scaling keeps frequencies that depend on what it read "
            "before, outside any cache; use another rope_type."
        )
    return found.pop() if found else None


def _mrope_axes(section: list[int] | None, pairs: int) -> tuple[int, ...]:
    """Axis of each channel pair under interleaved multimodal rotary positions (Qwen3-VL and later)."""
    if not section:
        return ()
    axes = [0] * pairs
    for axis in (1, 2):
        for channel in range(axis, min(section[axis] * 3, pairs), 3):
            axes[channel] = axis
    return tuple(axes)


def _weights_digest(model: Any) -> str:
    """sha256 over sampled values of every decoder weight, rounded to bfloat16."""
    named = dict(model.get_decoder().named_parameters())
    head = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        named["lm_head.weight"] = head.weight
    sha = hashlib.sha256()
    samples = []
    for name in sorted(named):
        parameter = named[name].detach()
        if parameter.device.type == "meta":
            raise UnsupportedModel(
                f"The weight {name} is offloaded, so the model cannot be identified; "
                "load it onto devices that hold all of it."
            )
        flat = parameter.reshape(-1)
        # on the CPU, because devices round differently; float32 rounds the last place of a large weight upwards
        index = torch.linspace(0, flat.numel() - 1, min(_SAMPLES, flat.numel()), device="cpu").long()
        samples.append(flat[index.clamp_(max=flat.numel() - 1).to(flat.device)].to(torch.bfloat16))
        sha.update(f"{name} {tuple(parameter.shape)}\n".encode())
    for values in _to_host(samples):
        sha.update(values.view(torch.int16).numpy().tobytes())
    return sha.hexdigest()


def _to_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy many small tensors with one transfer per device."""
    out: list[torch.Tensor | None] = [None] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        group = [i for i, tensor in enumerate(tensors) if tensor.device == device]
        joined = torch.cat([tensors[i] for i in group]).cpu()
        start = 0
        for i in group:
            out[i] = joined[start : start + tensors[i].numel()]
            start += tensors[i].numel()
    return [tensor for tensor in out if tensor is not None]
