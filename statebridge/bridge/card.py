"""The card of a bridge: what it connects, how it was fitted, and the scores that admitted it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from statebridge.bridge.artefact import BridgeConfig

_NAMES = {"key": "keys", "value": "values", "recurrent_state": "R", "conv_state": "C"}


def render_card(config: BridgeConfig) -> str:
    """Markdown with a metadata head, made from a bridge's config alone."""
    source, receiver = (model.name or model.model_type for model in (config.source, config.receiver))
    lines = [
        "---",
        "library_name: statebridge",
        "tags:",
        "- statebridge",
        "- state-handoff",
        "---",
        "",
        f"# Bridge from {source} to {receiver}",
        "",
        "Translates the inference state (attention keys and values, recurrent matrices, convolution history) of",
        "the source model into a state of the receiver, which continues without reading the prefix.",
        "",
        "```python",
        "import statebridge",
        "",
        'bridge = statebridge.Bridge.from_pretrained("<this folder>")',
        "receiver_state = bridge(source_state)",
        "```",
        "",
        f"Plan **{config.plan}** (order K, R, C; T translates, D copies).",
        "",
        "| | source | receiver |",
        "|---|---|---|",
        f"| family | {config.source.model_type} | {config.receiver.model_type} |",
        f"| layers | {len(config.source.layers)} | {len(config.receiver.layers)} |",
        f"| weights (sampled sha256) | `{config.source.weights[:16]}` | `{config.receiver.weights[:16]}` |",
        "",
    ]
    errors = config.fit.get("errors")
    if errors:
        lines += [
            "Relative tensor error on validation documents, translated and copied (0 is exact, 1 is the mean):",
            "",
            "| component | translated | copied |",
            "|---|---|---|",
            *(
                f"| {name} | {translated:.3f} | {'shapes differ' if copied is None else f'{copied:.3f}'} |"
                for name, (translated, copied) in mean_errors(errors).items()
            ),
            "",
            "Tensor error does not predict behaviour: choose a plan by the scores of an evaluation.",
            "",
        ]
    settings = config.fit.get("settings")
    if settings:
        lines += [
            f"Fitted on {settings['fit_documents']} documents, regularisation chosen on "
            f"{settings['validation_documents']}, prefixes of {', '.join(map(str, settings['checkpoints']))} tokens, "
            f"seed {settings['seed']}.",
            "",
        ]
    if config.calibration:
        lines += _calibration(config.calibration)
    return "\n".join(lines)


def _calibration(report: Mapping[str, Any]) -> list[str]:
    """What a card says of a calibrator: the grid, the choice, and what each part is worth."""
    chosen = report["chosen"]
    rows = [
        f"| {point['rank']} | {point['penalty']:g} | {point['step']} | {point['validation_kl']:.5f} |"
        for point in report["grid"]
    ]
    documents = len(report["documents"]["validation"])
    lines = [
        f"A calibrator of {report['trainable_values']:,} trained values stands on top of the plan. Rank "
        f"{chosen['rank']} and penalty weight {chosen['penalty']:g} were chosen on {documents} validation documents "
        "by the KL divergence from the native receiver:",
        "",
        "| rank | penalty weight | best step | validation KL, nats |",
        "|---|---|---|---|",
        *rows,
        "",
        "| on the validation documents | KL, nats |",
        "|---|---|",
        *(f"| {name} | {value:.5f} |" for name, value in mean_kl(report).items()),
        "",
    ]
    return lines


def mean_kl(report: Mapping[str, Any]) -> dict[str, float]:
    """Validation KL of the plan alone, calibrated, and without each component, mean over documents."""
    words = {"plan": "the plan alone", "calibrated": "calibrated"}
    return {
        words.get(name, f"calibrated {name}"): sum(values) / len(values)
        for name, values in report["validation_kl"].items()
    }


def mean_errors(errors: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[float, float | None]]:
    """Mean over layers of the validation errors of a fit, by component: (translated, copied).

    The copied one is None where the models' shapes differ and there is no copy.
    """
    means: dict[str, tuple[float, float | None]] = {}
    for field, name in _NAMES.items():
        found = [error for key, error in errors.items() if key.endswith(f".{field}")]
        copied = [error["copied"] for error in found if error["copied"] is not None]
        if found:
            translated = sum(error["translated"] for error in found) / len(found)
            means[name] = (translated, sum(copied) / len(copied) if copied else None)
    return means
