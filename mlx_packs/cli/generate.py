"""`packs generate`: text from a base model, with packs or without."""

import sys

import click

from ..errors import PackError
from ..terminal import echo
from . import options
from .options import option
from .output import print_report, wants_json


@click.command()
@options.model_of_pack
@options.packs(
    "Pack to apply; PACK=0.7 applies 70 % of its delta. The deltas of several packs are added up."
)
@option(
    "--prompt",
    required=True,
    metavar="TEXT",
    help="Message of the user; - reads it from standard input.",
)
@options.images("Image that the prompt is about, before its text; may be given several times.")
@option("--system", metavar="TEXT", help="System message that comes before the prompt.")
@option("--raw", is_flag=True, help="Continue the prompt as plain text, without the chat template.")
@options.template_kwargs("Variables of the chat template, such as '{\"enable_thinking\": false}'.")
@options.sampling()
@options.execution
def generate(
    model: str | None,
    packs: tuple[str, ...],
    prompt: str,
    images: tuple[str, ...],
    system: str | None,
    trust_remote_code: bool,
    raw: bool,
    template_kwargs: dict,
    **sampling,
) -> None:
    """Generate text as a stream, with or without packs.

    Control characters in the text are shown as "?"; --json keeps them, escaped.
    """
    from ..config.fields import build
    from ..config.sampling import Sampling
    from ..inference.generate import chat_prompt, raw_prompt, stream
    from ..memory.matmul_path import generation_path
    from ..packs.base import activated, load_base_for

    settings = build(Sampling, {k: v for k, v in sampling.items() if v is not None})
    prompt = _text("--prompt", sys.stdin.buffer.read() if prompt == "-" else prompt)
    system = _text("--system", system or "")

    if not prompt.strip():
        raise PackError("--prompt: is empty.")
    if raw and template_kwargs:
        raise PackError(
            "--raw and --template-kwargs: raw text has no template. Leave one out.",
            "conflict",
            "raw",
        )
    if raw and images:
        raise PackError(
            "--raw and --image: raw text has no place for an image. Leave one out.",
            "conflict",
            "raw",
        )

    pack = options.one_pack(packs)
    model = options.base_of(model, pack)
    base = load_base_for(pack, model, trust_remote_code)
    base.check_architecture("generate", "decoder")

    messages = _messages(system, prompt, images)
    pieces = []
    with activated(base, pack, generation_path(base.model)):
        if raw:
            tokens = raw_prompt(base, prompt)
        else:
            tokens = chat_prompt(base, messages, **template_kwargs)
        for piece in stream(base, tokens, settings):
            pieces.append(piece)
            if not wants_json():
                echo(piece, end="")

    report = {
        "prompt": prompt,
        "text": "".join(pieces),
        "pack": " + ".join(packs) or None,
        "model": model,
    }
    print_report(report, [""])


def _messages(system: str, prompt: str, images: tuple[str, ...]) -> list[dict]:
    """Return the messages of a prompt, in the form of chat templates."""
    from ..inference.chat import question

    messages = [question(prompt, images)]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _text(flag: str, given: str | bytes) -> str:
    """Return a text of the command line or of a pipe, which must be UTF-8."""
    try:
        content = given if isinstance(given, bytes) else given.encode()
        return content.decode()
    except UnicodeError:
        raise PackError(f"{flag}: is not UTF-8.") from None
