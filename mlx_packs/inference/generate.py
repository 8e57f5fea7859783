"""Text from a base, with or without a pack, one prompt or many; decoding is mlx-lm's."""

from collections.abc import Iterator, Mapping, Sequence

from ..bases.model import BaseModel
from ..errors import PackError


def chat_prompt(base: BaseModel, messages: Sequence[Mapping], tools=None) -> list[int]:
    """Tokens of a conversation that waits for an answer.

    Raises: PackError if the base has no chat template.
    """
    if not base.tokenizer.has_chat_template:
        raise PackError(f"{base.name}: the tokenizer has no chat template; use --raw.")
    return base.tokenizer.apply_chat_template(
        list(messages), tools=tools, add_generation_prompt=True
    )


def stream(
    base: BaseModel,
    prompt: Sequence[int],
    max_tokens: int = 100,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[str]:
    """Pieces of text that follow ``prompt``; greedy at temperature 0."""
    from mlx_lm import stream_generate
    from mlx_lm.sample_utils import make_sampler

    from ..runtime import mx

    _check_tokens(base, prompt)
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


def _check_tokens(base: BaseModel, prompt: Sequence[int]) -> None:
    """Raises: PackError for a token that the base does not have: MLX would read past the table."""
    if prompt and max(prompt) >= base.vocab_size:
        raise PackError(
            f"{base.name}: token {max(prompt)} of the prompt lies beyond the base's vocabulary of "
            f"{base.vocab_size}: the tokenizer belongs to another base; put the tokenizer files of "
            "this one beside its weights."
        )


def complete(base: BaseModel, prompt: Sequence[int], max_tokens: int = 100, **sampling) -> str:
    """The text that follows ``prompt``, whole."""
    return "".join(stream(base, prompt, max_tokens, **sampling))


def stream_batch(
    base: BaseModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int | Sequence[int] = 100,
    batch_size: int = 8,
    stop: bool = True,
) -> Iterator[tuple[int, int]]:
    """(prompt, token) of many prompts as they come, greedy, ``batch_size`` at a time.

    Batching is continuous, by mlx-lm: prompts of different lengths share a batch, and when one has
    ended the next takes its place.

    Args:
        max_tokens: for each answer, or one number for all.
        stop: end an answer at the end of its turn; else it has ``max_tokens`` whatever it says.
    Raises: PackError for a model that keeps what cannot be put into one batch, or an empty prompt.
    """
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.models.cache import make_prompt_cache

    base.model.eval()
    if other := next((c for c in make_prompt_cache(base.model) if not hasattr(c, "merge")), None):
        raise PackError(
            f"{base.name}: answers cannot be batched: mlx-lm has no batch of "
            f"{type(other).__name__}."
        )
    if not all(len(prompt) for prompt in prompts):
        raise PackError("a prompt is empty.")
    for prompt in prompts:
        _check_tokens(base, prompt)
    most = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
    generator = BatchGenerator(
        base.model,
        stop_tokens=[[token] for token in base.tokenizer.eos_token_ids] if stop else None,
        completion_batch_size=batch_size,
        prefill_batch_size=batch_size,
    )
    try:
        numbers = generator.insert([list(prompt) for prompt in prompts], most)
        order = {number: i for i, number in enumerate(numbers)}
        while found := generator.next_generated():
            for answer in found:
                if answer.finish_reason != "stop":
                    yield order[answer.uid], answer.token
    finally:
        generator.close()


def complete_batch(
    base: BaseModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int | Sequence[int] = 100,
    batch_size: int = 8,
) -> list[str]:
    """The greedy text that follows each prompt, in their order."""
    tokens: list[list[int]] = [[] for _ in prompts]
    for i, token in stream_batch(base, prompts, max_tokens, batch_size):
        tokens[i].append(token)
    return [_text(base, found) for found in tokens]


def _text(base: BaseModel, tokens: Sequence[int]) -> str:
    """Tokens as `stream` turns them into text."""
    detokenizer = base.tokenizer.detokenizer
    detokenizer.reset()
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return detokenizer.text
