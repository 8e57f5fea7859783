"""Text from a base, with or without a pack; decoding is mlx-lm's."""

from collections.abc import Iterator, Mapping, Sequence

from .errors import PackError
from .loading import Base


def chat_prompt(base: Base, messages: Sequence[Mapping], tools=None) -> list[int]:
    """Tokens of a conversation that waits for an answer.

    Raises: PackError if the base has no chat template.
    """
    if not base.tokenizer.has_chat_template:
        raise PackError(f"{base.name}: the tokenizer has no chat template; use --raw.")
    return base.tokenizer.apply_chat_template(
        list(messages), tools=tools, add_generation_prompt=True
    )


def stream(
    base: Base,
    prompt: Sequence[int],
    max_tokens: int = 100,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[str]:
    """Pieces of text that follow ``prompt``; greedy at temperature 0."""
    from mlx_lm import stream_generate
    from mlx_lm.sample_utils import make_sampler

    from .runtime import mx

    mx.random.seed(seed)
    base.model.eval()
    for piece in stream_generate(
        base.model,
        base.tokenizer,
        list(prompt),
        max_tokens=max_tokens,
        sampler=make_sampler(temp=temperature),
    ):
        yield piece.text


def complete(base: Base, prompt: Sequence[int], max_tokens: int = 100, **sampling) -> str:
    """The text that follows ``prompt``, whole."""
    return "".join(stream(base, prompt, max_tokens, **sampling))
