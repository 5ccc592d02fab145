"""`statebridge handoff`: the source reads a prompt, the receiver answers.

Text goes to stdout as it comes, what it took to stderr; with `--format json` everything is one object on
stdout. The hand-over itself is the bridge room's work.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from statebridge.cli.options import (
    DeviceOption,
    DtypeOption,
    Format,
    FormatOption,
    SeedOption,
    print_json,
)
from statebridge.cli.pair_options import ReceiverOption, SourceOption, load_pair

if TYPE_CHECKING:
    from statebridge.bridge import Reply


def handoff(
    source: SourceOption,
    receiver: ReceiverOption,
    bridge: Annotated[str, typer.Option(help="Folder or hub name of the bridge.")],
    prompt: Annotated[str | None, typer.Argument(help="The prompt; stdin when there is none.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A UTF-8 file that holds the prompt.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's message.")] = False,
    state: Annotated[
        Path | None, typer.Option(help="State file of the source after a first part of the prompt.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float | None, typer.Option(help="Sample at this temperature.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the likeliest token; the default.")] = False,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text; repeatable.")] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any other option of generate, such as top_p=0.9."),
    ] = None,
    seed: SeedOption = 0,
    bridge_tokens: Annotated[
        int, typer.Option(min=1, help="Last tokens of the prompt that the receiver reads itself.")
    ] = 1,
    plan: Annotated[
        str | None, typer.Option(help="Translate or copy each of K, R, C, such as TDD; else the bridge's.")
    ] = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "auto",
    format: FormatOption = Format.human,
) -> None:
    """Let the source read a prompt and the receiver answer it, without reading its prefix.

    [bold]Examples[/bold]

        statebridge handoff --source small/ --receiver big/ --bridge bridge/ "Once upon a time"

        statebridge handoff --source small/ --receiver big/ --bridge bridge/ --prompt-file book.txt
        --temperature 0.8 --stop "THE END"

        cat book.txt | statebridge handoff --source small/ --receiver big/ --bridge bridge/ --format json
    """
    from statebridge.errors import ConfigError

    if greedy and temperature is not None:
        raise ConfigError("--greedy and --temperature contradict each other; give one of them.")
    if temperature is not None and not temperature > 0:
        raise ConfigError(f"--temperature must be positive, found {temperature}; use --greedy for 0.")
    generation: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature is not None}
    if temperature is not None:
        generation["temperature"] = temperature
    generation |= _options(options or [])
    if stop:
        generation["stop_strings"] = stop
    text = _prompt(prompt, prompt_file)

    import torch
    from transformers import TextStreamer

    from statebridge.bridge import Bridge
    from statebridge.state import HybridState

    loaded = Bridge.from_pretrained(bridge)
    loaded = loaded if plan is None else loaded.with_plan(plan)
    begun = None if state is None else HybridState.load(state)
    pair = load_pair(source, receiver, device, dtype)
    streamed = format is Format.human and generation.get("num_beams", 1) == 1
    if streamed:
        generation["streamer"] = TextStreamer(pair.tokenizer, skip_prompt=True, skip_special_tokens=True)
    torch.manual_seed(seed)
    try:
        reply = pair.handoff(
            [{"role": "user", "content": text}] if chat else text,
            bridge=loaded,
            state=begun,
            bridge_tokens=bridge_tokens,
            **generation,
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"transformers' generate refuses these options: {error}") from error
    if format is Format.json:
        print_json(_record(reply))
        return
    if not streamed:
        typer.echo(reply.text)
    typer.echo(_summary(reply), err=True)


def _prompt(prompt: str | None, file: Path | None) -> str:
    from statebridge.errors import ConfigError

    if prompt is not None and file is not None:
        raise ConfigError("Give the prompt as an argument or as --prompt-file, not both.")
    if prompt is not None:
        return prompt
    if file is None:
        if sys.stdin.isatty():
            raise ConfigError("There is no prompt; give one as an argument, as --prompt-file or on stdin.")
        return sys.stdin.read()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The prompt file {file} cannot be read ({error}).") from error


def _options(settings: list[str]) -> dict[str, Any]:
    import yaml

    from statebridge.errors import ConfigError

    options = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not name or not equals:
            raise ConfigError(f"--set {setting!r} must have the form name=value.")
        options[name] = yaml.safe_load(value)
    return options


def _record(reply: Reply) -> dict[str, Any]:
    return {
        "text": reply.text,
        "new_ids": reply.new_ids.tolist(),
        "plan": reply.plan,
        "prefix_tokens": reply.prefix_tokens,
        "bridge_tokens": reply.bridge_tokens,
        "prefix_tokens_processed": reply.prefix_tokens_processed,
        "moved_bytes": dict(reply.moved_bytes),
        "seconds": {name: round(value, 6) for name, value in reply.seconds.items()},
    }


def _summary(reply: Reply) -> str:
    seconds, count = reply.seconds, reply.new_ids.shape[1]
    moved = ", ".join(f"{name} {_size(size)}" for name, size in reply.moved_bytes.items() if size)
    handed = seconds["capture"] + seconds["translate"]
    read = f" in {seconds['source_prefill']:.2f} s" if seconds["source_prefill"] else " before"
    rows = {
        "read by the source": f"{reply.prefix_tokens:,} tokens{read}",
        "handed over": f"{moved} in {1000 * handed:,.0f} ms (plan {reply.plan})",
        "read by the receiver": f"{reply.bridge_tokens:,} bridge token{'s' * (reply.bridge_tokens > 1)}, "
        f"{reply.prefix_tokens_processed:,} prefix tokens; first token after {1000 * seconds['first_token']:,.0f} ms",
        "generated": f"{count:,} tokens in {seconds['generate']:.2f} s",
    }
    return "\n" + "\n".join(f"{name:<21} {value}" for name, value in rows.items())


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:,.1f} kB"
