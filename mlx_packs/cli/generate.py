"""`packs generate` and `packs chat`: text from a base model, with packs or without."""

import signal
import sys
from contextlib import closing
from inspect import cleandoc
from typing import TYPE_CHECKING

import click

from .. import signals
from ..bases.turns import IMAGE_MARK
from ..errors import PackError
from ..terminal import echo, printable
from . import options
from .options import option
from .output import print_report, wants_json

if TYPE_CHECKING:
    import mlx.nn as nn

    from ..inference.chat import ChatSession
    from ..packs.base import Base
    from ..packs.pack import Pack


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
@options.offload_base
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
    from ..config.sampling import Sampling
    from ..inference.chat import question
    from ..inference.generate import chat_prompt, raw_prompt, stream
    from ..memory.matmul_path import generation_path
    from ..packs.base import activated

    offload_base = sampling.pop("offload_base")
    settings = Sampling.from_mapping({k: v for k, v in sampling.items() if v is not None})
    prompt = _text("--prompt", sys.stdin.buffer.read() if prompt == "-" else prompt)
    system = _text("--system", system or "")

    if not prompt.strip():
        raise PackError("--prompt: is empty.")
    for flag, value, part in (
        ("--template-kwargs", template_kwargs, "template"),
        ("--image", images, "place for an image"),
    ):
        if raw and value:
            text = f"--raw and {flag}: raw text has no {part}. Leave one out."
            raise PackError(text, "conflict", "raw")

    pack, base = _opened("generate", model, packs, trust_remote_code, offload_base)

    messages = [question(prompt, images)]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    pieces = []
    with activated(base, pack, generation_path(base.model)):
        tokens = raw_prompt(base, prompt) if raw else chat_prompt(base, messages, **template_kwargs)
        for piece in stream(base, tokens, settings):
            pieces.append(piece)
            if not wants_json():
                echo(piece, end="")

    report = {
        "prompt": prompt,
        "text": "".join(pieces),
        "pack": " + ".join(packs) or None,
        "model": options.base_of(model, pack),
    }
    print_report(report, [""])


def _opened(
    command: str, model: str | None, packs: tuple[str, ...], *options_of_base
) -> "tuple[Pack | None, Base]":
    """Return the pack and its base; the seconds per token are shown if blocks are on disk."""
    pack = options.text_pack(packs)
    base = options.load_base(model, pack, *options_of_base)
    base.check_architecture(command, "decoder")
    if (blocks := base.blocks_on_disk) is not None:
        echo(f"offload {blocks.token_line()}", err=True)
    return pack, base


def _text(flag: str, given: str | bytes) -> str:
    """Return a text of the command line or of a pipe, which must be UTF-8."""
    try:
        content = given if isinstance(given, bytes) else given.encode()
        return content.decode()
    except UnicodeError:
        raise PackError(f"{flag}: is not UTF-8.") from None


@click.command()
@options.model_of_pack
@options.packs(
    "Pack to start with; PACK=0.7 applies 70 % of its delta. The deltas of several "
    "packs are added up."
)
@options.images("Image that the first message is about; may be given several times.")
@option("--system", default="", metavar="TEXT", help="System message that comes before all others.")
@options.template_kwargs("Variables of the chat template, such as '{\"enable_thinking\": false}'.")
@options.sampling(max_tokens=512)
@options.offload_base
@options.trust_remote_code
@options.backend
def chat(
    model: str | None,
    packs: tuple[str, ...],
    images: tuple[str, ...],
    system: str,
    template_kwargs: dict,
    offload_base: str,
    trust_remote_code: bool,
    **settings,
) -> None:
    """Chat with a base model, with or without packs.

    \b
    /pack PACK    answer with this pack from now on (PACK=0.7 applies 70 % of it)
    /base         answer without a pack
    /image FILE   add an image to the next message
    /history      show the conversation
    /clear        start a new conversation
    /quit         leave (or Ctrl-D); Ctrl-C ends an answer

    If standard input is not a terminal, each of its lines is a message.
    """  # noqa: D301 - click keeps the lines after \b
    from ..config.sampling import Sampling
    from ..inference.chat import ChatSession
    from ..inference.generate import chat_prompt

    overrides = {name: value for name, value in settings.items() if value is not None}
    sampling = Sampling.from_mapping({"max_tokens": 512, **overrides})

    pack, base = _opened("chat", model, packs, trust_remote_code, offload_base)
    model_in_use = _ModelInUse(base)
    model_in_use.switch_to(pack)
    # without a template for conversations it fails now, not at the second question
    roles = ("user", "assistant", "user")
    chat_prompt(base, [{"role": role, "content": "?"} for role in roles], **template_kwargs)

    if sys.stdin.isatty():
        on = f" with {' + '.join(packs)}" if packs else ""
        echo(printable(f"{base.summary()}{on}. /help lists the commands, /quit leaves."))

    conversation = ChatSession(base, system, sampling, template_kwargs)
    for image in images:
        conversation.attach(image)
    _talk(conversation, model_in_use)


class _ModelInUse:
    """The base with a pack or without, by the matmul path that generates fastest."""

    def __init__(self, base: "Base") -> None:
        from ..memory.matmul_path import generation_path

        self._base = base
        self._matmul_path = generation_path(base.model)
        self._originals: list[tuple[str, nn.Module]] = []

    def switch_to(self, pack: "Pack | None") -> None:
        """Use a pack from now on, or the base alone; after an error the model is as before."""
        from ..nn.quantized import apply_matmul_path
        from ..nn.surgery import replace_modules

        base = self._base
        replace_modules(base.model, self._originals)
        self._originals = []
        try:
            if pack is None:
                base.detach()
            else:
                base.attach(pack, self._matmul_path)
        finally:
            if base.active is None:
                self._originals = apply_matmul_path(base.model, self._matmul_path)


def _talk(conversation: "ChatSession", model_in_use: _ModelInUse) -> None:
    while (line := _next_line()) is not None:
        try:
            if line.startswith("/"):
                if not _obey(line, conversation, model_in_use):
                    return
            elif line:
                _answer(conversation, line)
        except PackError as error:
            echo(printable(str(error)), err=True)


def _next_line() -> str | None:
    """Return the next line without the spaces around it; None where there is none."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.strip() if line else None

    import readline  # noqa: F401 (lines can be edited, and earlier ones taken again)

    try:
        return input("> ").strip()
    except EOFError:
        echo("")
        return None


def _answer(conversation: "ChatSession", line: str) -> None:
    with signals.deferred() as asked, closing(conversation.reply(line)) as pieces:
        for piece in pieces:
            echo(piece, end="")
            if asked:
                break
        echo("")
        if asked == [signal.SIGINT]:  # that ends the answer, not the conversation
            asked.clear()


def _obey(line: str, conversation: "ChatSession", model_in_use: _ModelInUse) -> bool:
    """Execute a line that begins with a slash; return False to leave."""
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    if command == "/quit":
        return False

    if command == "/base" or command == "/pack" and rest:
        pack = options.text_pack([rest]) if command == "/pack" else None
        model_in_use.switch_to(pack)
        conversation.forget_keys()
        echo(printable(f"({rest or 'the base alone'})"))
    elif command == "/image" and rest:
        conversation.attach(rest)
        echo(printable(f"({rest} is sent with your next message)"))
    elif command == "/clear":
        conversation.clear()
        echo("(a new conversation)")
    elif command == "/history":
        for message in conversation.messages:
            text = message["content"].replace(IMAGE_MARK, "[image]")
            echo(f"{message['role']}: {text}")
    elif command in ("/help", "/pack", "/image"):
        echo(cleandoc(chat.help or "").split("\n\n")[1].removeprefix("\b\n"))
    else:
        raise PackError(f"{command}: is not a command. /help lists them.", "unknown")

    return True
