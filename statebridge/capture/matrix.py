"""The support matrix as Markdown, from the rules themselves: `python -m statebridge.capture.matrix`.

What a family keeps follows from its rule; plain attention families need none and stand as one row. What a tiny
model of each family really keeps is compared with these rows by a test.
"""

from __future__ import annotations

from statebridge.capture.families import FAMILIES, REFUSED

_YES, _NO = "yes", "–"
_AXES = {"HKV": "`[B, H, K, V]`", "HPN": "`[B, H, P, N]`", "PN": "`[B, P, N]`", "": _NO}


def support_matrix() -> str:
    """Markdown table family × component, and the refused families with their reasons."""
    lines = [
        "| family (`model_type`) | K | R | C | continues | bridges |",
        "|---|---|---|---|---|---|",
    ]
    for name, rule in sorted(FAMILIES.items()):
        steps = "one token at a time" if rule.single_step else "any number of tokens"
        bridge = "fit and hand over" if rule.gated_delta else "capture and restore"
        lines.append(f"| `{name}` | {_YES} | {_AXES[rule.recurrent_axes]} | {_YES} | {steps} | {bridge} |")
    lines.append(
        f"| plain attention (`llama`, `qwen3`, …) | {_YES} | {_NO} | {_NO} | any number of tokens "
        "| capture and restore |"
    )
    lines += ["", "Refused, with the reason:", ""]
    lines += [f"- `{name}`: {reason}." for name, reason in sorted(REFUSED.items())]
    lines.append("- sliding-window, static, quantised, offloaded and encoder-decoder caches.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(support_matrix(), end="")
