"""Training kernels for a GPU: fla's gated delta rule and convolution, and compiled pointwise parts.

`install` replaces functions of transformers' qwen3_5 module for this process, so it is for training
only; models saved from it are ordinary. `check` compares values and gradients with transformers' own
float32 torch path and raises when they are too far apart: call it before spending time on training.
"""

from __future__ import annotations

import inspect

import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from experiments.reference_pair import fla_backward

TORCH_CHUNK_RULE = inspect.unwrap(modeling.torch_chunk_gated_delta_rule)
TORCH_CONVOLUTION = inspect.unwrap(modeling.causal_conv1d_fn)
LIMIT = 0.02  # relative error of bf16 against float32; 0.004 to 0.010 is what bf16 operands give


def _chunk_rule(query, key, value, g, beta, **kwargs):  # type: ignore[no-untyped-def]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(
        query,
        key,
        value,
        g=g.float(),
        beta=beta.float(),
        initial_state=kwargs.get("initial_state"),
        output_final_state=kwargs.get("output_final_state", False),
        use_qk_l2norm_in_kernel=True,
    )


def _convolution(hidden_states, weight, bias=None, activation=None, **kwargs):  # type: ignore[no-untyped-def]
    from fla.modules.causal_conv1d import causal_conv1d

    x = hidden_states.transpose(1, 2)  # [B, T, C]
    return causal_conv1d(x, weight, bias, activation=activation)[0].transpose(1, 2)


def install(compiled: bool) -> None:
    """Use the kernels in every qwen3_5 model of this process.

    Parameters
    ----------
    compiled
        Also run norms, MLP, rotary embedding and the gradient kernel through torch.compile.
    """
    fla_backward.install(compiled)
    modeling.torch_chunk_gated_delta_rule = _chunk_rule
    modeling.causal_conv1d_fn = _convolution
    if compiled:
        for part in (modeling.Qwen3_5RMSNorm, modeling.Qwen3_5RMSNormGated, modeling.Qwen3_5MLP):
            part.forward = torch.compile(part.forward, dynamic=False)
        modeling.apply_rotary_pos_emb = torch.compile(modeling.apply_rotary_pos_emb, dynamic=False)


def _gap(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def check(device: torch.device, heads: int, dim: int) -> dict[str, float]:
    """Compare the installed rule (bf16) with the torch rule (float32), outputs and all gradients.

    Returns
    -------
    dict
        Relative errors by name.

    Raises
    ------
    RuntimeError
        If one of them is above `LIMIT` or not finite.
    """
    gaps: dict[str, float] = {}
    for T in (300, 1024):  # a length with a padded chunk, and one without
        torch.manual_seed(T)
        shape = (2, T, heads, dim)
        q, k, v = (torch.randn(shape, device=device).bfloat16() for _ in range(3))
        g = -torch.rand(shape[:3], device=device) * 0.3
        beta = torch.rand(shape[:3], device=device)
        weight = torch.randn(shape, device=device)
        grads = []
        for rule, dtype in ((TORCH_CHUNK_RULE, torch.float32), (_chunk_rule, torch.bfloat16)):
            inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
            inputs += [x.detach().clone().requires_grad_() for x in (g, beta)]
            out, _ = rule(*inputs[:3], g=inputs[3], beta=inputs[4], use_qk_l2norm_in_kernel=True)
            (out.float() * weight).sum().backward()
            grads.append([out, *(x.grad for x in inputs)])
        for name, wanted, found in zip(("o", "dq", "dk", "dv", "dg", "dbeta"), *grads, strict=True):
            gaps[f"{name} at T={T}"] = _gap(found, wanted)
    if not all(gap < LIMIT for gap in gaps.values()):
        raise RuntimeError(f"the training kernels disagree with the torch path: {gaps}")
    return gaps


def check_convolution(device: torch.device, channels: int, width: int) -> float:
    """Compare the installed convolution with the torch one (output and gradients); return the largest gap."""
    torch.manual_seed(0)
    x = torch.randn(2, channels, 300, device=device).bfloat16()
    weight, scale = torch.randn(channels, width, device=device), torch.randn(2, channels, 300, device=device)
    results = []
    for function, dtype in ((TORCH_CONVOLUTION, torch.float32), (_convolution, torch.bfloat16)):
        inputs = [x.detach().to(dtype).requires_grad_(), weight.detach().clone().requires_grad_()]
        out = function(*inputs, None, activation="silu")
        (out.float() * scale).sum().backward()
        results.append([out, *(tensor.grad for tensor in inputs)])
    gap = max(_gap(found, wanted) for wanted, found in zip(*results, strict=True))
    if not gap < LIMIT:
        raise RuntimeError(f"the training convolution disagrees with the torch path by {gap}")
    return gap
