"""Generate text with a base, with or without a pack, for one prompt or many, by mlx-lm."""

import copy
import os.path
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..bases.supported import is_batchable, reads_in_parts
from ..bases.tokenizer import text_tokens
from ..bases.turns import encode_conversation, given_variables
from ..config.sampling import Sampling
from ..data.conversations import Conversation
from ..data.rendered_parts import check_rendered
from ..errors import PackError

if TYPE_CHECKING:
    from mlx_lm.generate import GenerationResponse

    from ..bases.model import BaseModel
    from ..runtime import mx

# Maps the tokens so far and logits [1, V] to logits.
Processor = Callable[["mx.array", "mx.array"], "mx.array"]

PENALIZED_TOKENS = 64  # to which a repetition penalty applies
_LEAST_SHARED = 16  # tokens that prompts have in common, which are read once
_READ_AT_ONCE = 2048  # tokens of a prompt, as mlx-lm reads them
_MOST_TOGETHER = 32  # texts, as in mlx-lm
_MEMORY_SHARE = 1 / 8  # of the device's memory, for keys and values of texts that are generated
_CACHE_STEP = 256  # tokens for which mlx-lm's caches make room at once


def chat_prompt(
    base: "BaseModel",
    messages: Sequence[Mapping],
    tools: Sequence[Mapping] | None = None,
    tokenizer: Any = None,
    **variables: Any,
) -> list[int]:
    """Return the tokens of a conversation up to the assistant's next turn, by the chat template.

    Messages have ``role`` and ``content``; ``tools`` describe the functions that may be called;
    ``variables`` are others that the template knows, such as ``enable_thinking``. Without a
    template the prompt is the text of a single message, as packs are trained on it.
    ``tokenizer`` is another one than the base model's, by its chat template.
    """
    tokenizer = tokenizer or base.tokenizer
    if not tokenizer.has_chat_template:
        is_text = [message.get("role") for message in messages] == ["user"]
        if is_text and not tools and not messages[0].get("images"):
            return text_tokens(tokenizer, messages[0]["content"])

        raise PackError(
            f"{base.name}: the tokenizer has no chat template, so a prompt is one text. Send one "
            "message of a user, or use a pack that was trained with --chat-template.",
            "unsupported",
            "messages",
        )

    options = {**base.template_kwargs, **given_variables(variables), "tools": tools}
    tokens = encode_conversation(tokenizer, messages, add_generation_prompt=True, **options)
    del options["tools"]
    check_rendered(Conversation(base.name, messages, tools, tokenizer, variables=options))
    return tokens


def raw_prompt(base: "BaseModel", text: str) -> list[int]:
    return text_tokens(base.tokenizer, text)


def stream(
    base: "BaseModel", prompt: Sequence[int], sampling: Sampling | None = None
) -> Iterator[str]:
    """Yield pieces of the text that follows ``prompt``."""
    yield from (piece.text for piece in responses(base, prompt, sampling))


def responses(
    base: "BaseModel",
    prompt: Sequence[int],
    sampling: Sampling | None = None,
    cache: list[Any] | None = None,
) -> Iterator["GenerationResponse"]:
    """Yield the tokens that follow ``prompt``, with pieces of their text, as mlx-lm gives them.

    ``cache``, of mlx-lm too, has the keys and values of the tokens before the prompt; those of the
    prompt and of what follows are added to it.
    """
    from mlx_lm import stream_generate
    from mlx_lm.sample_utils import make_logits_processors, make_sampler

    from ..nn.lora import factors_cast
    from ..runtime import mx

    _check_tokens(base, prompt)
    sampling = sampling or Sampling()
    mx.random.seed(sampling.seed)
    base.model.eval()

    top_k = _valid_top_k(base, sampling)
    penalty = sampling.repetition_penalty

    pieces = stream_generate(
        base.model,
        base.tokenizer,
        list(prompt),
        max_tokens=sampling.max_tokens,
        sampler=make_sampler(sampling.temperature, sampling.top_p, sampling.min_p, top_k=top_k),
        logits_processors=seeing_no_images(
            base,
            make_logits_processors(
                repetition_penalty=None if penalty == 1 else penalty,
                repetition_context_size=PENALIZED_TOKENS,
            ),
        ),
        prompt_cache=cache,
        prefill_step_size=_part_size(base, [prompt]),
    )
    with factors_cast(base.model):
        yield from pieces


def seeing_no_images(base: "BaseModel", processors: Sequence[Processor]) -> list[Processor]:
    """Return processors that are called with the token of the vocabulary for each image token.

    Penalties index logits by tokens, and the tokens of images are numbers below zero.
    """
    images = getattr(base.tokenizer, "_images", None)
    if images is None:
        return list(processors)

    from ..runtime import mx

    def of_vocabulary(process: Processor) -> Processor:
        def call(tokens: "mx.array", logits: "mx.array") -> "mx.array":
            return process(mx.where(tokens < 0, images.token, tokens), logits)

        return call

    return [of_vocabulary(process) for process in processors]


def reads_at_once(base: "BaseModel", prompt: Sequence[int]) -> bool:
    """Return whether a prompt is read in one part, as some models need with images."""
    images = getattr(base.tokenizer, "_images", None)
    return images is not None and images.is_read_at_once and min(prompt) < 0


def _part_size(base: "BaseModel", prompts: Sequence[Sequence[int]]) -> int:
    whole = [len(prompt) for prompt in prompts if reads_at_once(base, prompt)]
    return max([_READ_AT_ONCE, *whole])


def _valid_top_k(base: "BaseModel", sampling: Sampling) -> int:
    """Return the number, or 0, which is none, where mlx-lm would reject it."""
    return sampling.top_k if sampling.top_k < base.vocab_size else 0


def _check_tokens(base: "BaseModel", prompt: Sequence[int]) -> None:
    """Raise PackError for a token that the base lacks: MLX would read past its embeddings."""
    if not len(prompt):
        raise PackError(f"{base.name}: the tokenizer makes no token of the prompt.", "unreadable")
    check_end(prompt)
    if max(prompt) >= base.vocab_size:
        raise PackError(
            f"{base.name}: token {max(prompt)} of the prompt is beyond the base's vocabulary of "
            f"{base.vocab_size}: the tokenizer belongs to another base. Put the tokenizer files of "
            "this one next to its weights.",
            "mismatch",
        )


def check_end(prompt: Sequence[int]) -> None:
    """Raise PackError for an image in the last two tokens, which may be read one at a time.

    The model does not look for images in one token alone (`nn.images.ImageInputs`).
    """
    if min(prompt[-2:]) < 0:
        raise PackError(
            "the prompt ends with an image, which no text follows. Ask a question after it, or use "
            "a chat template that starts an answer.",
            "data",
        )


def complete(
    base: "BaseModel", prompt: Sequence[int], max_tokens: int = 100, **sampling: Any
) -> str:
    """Return the text that follows ``prompt``; ``sampling`` are the settings of `Sampling`."""
    settings = Sampling.from_mapping({"max_tokens": max_tokens, **sampling})
    return "".join(stream(base, prompt, settings))


def sample_batch(
    base: "BaseModel",
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    batch_size: int,
    sampler: "Callable[[mx.array], mx.array] | None" = None,
    shares: bool = True,
) -> list[list[int]]:
    """Return the tokens that follow each prompt, with the one that ends them, by `stream_batch`."""
    tokens: list[list[int]] = [[] for _ in prompts]
    for i, token, _ in stream_batch(base, prompts, max_tokens, batch_size, True, sampler, shares):
        tokens[i].append(token)
    return tokens


def stream_batch(  # noqa: PLR0913 - what a batch of texts depends on
    base: "BaseModel",
    prompts: Sequence[Sequence[int]],
    max_tokens: int | Sequence[int] = 100,
    batch_size: int = 8,
    stop: bool = True,
    sampler: "Callable[[mx.array], mx.array] | None" = None,
    shares: bool = True,
) -> Iterator[tuple[int, int, bool]]:
    """Yield (index of the prompt, token, whether it ends the text) for many prompts.

    Batching is continuous, by mlx-lm: prompts of different lengths share a batch, and when one has
    ended the next takes its place. Without ``stop`` each text has exactly ``max_tokens`` tokens.
    ``sampler`` maps log-probabilities [N, V] to tokens [N]; None takes the likeliest. What the
    prompts begin with is read once, if ``shares``.

    Raises a PackError if the model's cache cannot be batched, or a prompt is empty.
    """
    from mlx_lm.generate import BatchGenerator

    from ..nn.lora import factors_cast

    base.model.eval()
    one_by_one = not is_batchable(base.name, base.model)
    if not one_by_one:
        check_batches(base)

    if not all(len(prompt) for prompt in prompts):
        raise PackError("prompts: one of them is empty. Give each a token.", flag="prompts")
    for prompt in prompts:
        _check_tokens(base, prompt)

    limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
    if one_by_one:
        yield from _generated_alone(base, prompts, limits, stop, sampler)
        return

    stop_tokens = [[token] for token in base.tokenizer.eos_token_ids] if stop else None
    generator = BatchGenerator(
        base.model,
        stop_tokens=stop_tokens,
        sampler=sampler,
        completion_batch_size=batch_size,
        prefill_batch_size=batch_size,
        prefill_step_size=_part_size(base, prompts),
    )
    try:
        with factors_cast(base.model):
            counts: list[int] = [0] * len(prompts)
            read: list[Any] = [None] * len(prompts)
            if shares and reads_in_parts(base.model):
                counts, read = _read_once(base, prompts, batch_size, generator.stream)
            begun = [list(p[:count]) for p, count in zip(prompts, counts, strict=True)]
            rest = [list(p[count:]) for p, count in zip(prompts, counts, strict=True)]
            numbers = generator.insert(rest, limits, read, begun)

            order = {number: i for i, number in enumerate(numbers)}
            while responses := generator.next_generated():
                for response in responses:
                    ends = response.finish_reason == "stop"
                    yield order[response.uid], response.token, ends
    finally:
        generator.close()


def check_batches(base: "BaseModel") -> None:
    """Raise a PackError if mlx-lm cannot batch the caches of a model."""
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(base.model)
    if other := next((c for c in caches if not hasattr(c, "merge")), None):
        raise PackError(
            f"{base.name}: its texts cannot be generated in batches: mlx-lm has no batch of "
            f"{type(other).__name__}.",
            "unsupported",
        )


def _read_once(
    base: "BaseModel", prompts: Sequence[Sequence[int]], batch_size: int, stream: "mx.Stream"
) -> tuple[list[int], list[list[Any] | None]]:
    """Return how many tokens of each prompt were read, and the caches that have them; None is none.

    What all prompts begin with is read once, and so is each prompt if some come several times. All
    texts begin together as they would otherwise, so that samples are the same: each prompt has two
    tokens left at least, or each has one.
    """
    from mlx_lm.models.cache import make_prompt_cache

    common = len(os.path.commonprefix([list(prompt) for prompt in prompts]))
    shortest = min(len(prompt) for prompt in prompts)
    common = min(common, shortest - 2)
    shared = None
    if any(reads_at_once(base, prompt[common:]) for prompt in prompts):
        common = 0
    if len(prompts) == 1 or common < _LEAST_SHARED:
        common = 0
    else:
        shared = make_prompt_cache(base.model)
        _read(base, prompts[0][:common], shared, stream)

    distinct = list(dict.fromkeys(tuple(prompt) for prompt in prompts))
    caches = dict.fromkeys(distinct, (common, shared))
    repeats = len(distinct) < len(prompts) and shortest > _LEAST_SHARED
    if repeats and len(distinct) <= batch_size:
        for prompt in distinct:
            own = copy.deepcopy(shared) or make_prompt_cache(base.model)
            _read(base, prompt[common:-1], own, stream)
            caches[prompt] = len(prompt) - 1, own

    begun = [caches[tuple(prompt)] for prompt in prompts]
    return [count for count, _ in begun], [cache for _, cache in begun]


def _read(base: "BaseModel", tokens: Sequence[int], cache: list[Any], stream: "mx.Stream") -> None:
    """Let a cache have tokens, some at a time."""
    from ..runtime import mx

    with mx.stream(stream):
        step = _part_size(base, [tokens])
        for start in range(0, len(tokens), step):
            base.model(mx.array([tokens[start : start + step]]), cache=cache)
            mx.eval([each.state for each in cache])


def _generated_alone(
    base: "BaseModel",
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    stop: bool,
    sampler: "Callable[[mx.array], mx.array] | None",
) -> Iterator[tuple[int, int, bool]]:
    """Yield what `stream_batch` does, one prompt after the other."""
    from mlx_lm.generate import generate_step

    from ..nn.lora import factors_cast
    from ..runtime import mx

    ends = base.tokenizer.eos_token_ids if stop else ()
    with factors_cast(base.model):
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            steps = generate_step(mx.array(prompt), base.model, max_tokens=limit, sampler=sampler)
            for token, _ in steps:
                is_end = int(token) in ends
                yield i, int(token), is_end
                if is_end:
                    break


def complete_batch(
    base: "BaseModel",
    prompts: Sequence[Sequence[int]],
    max_tokens: int | Sequence[int] = 100,
    batch_size: int = 8,
    sampler: "Callable[[mx.array], mx.array] | None" = None,
) -> list[str]:
    """Return the text that follows each prompt, in their order; without a sampler it is greedy."""
    tokens: list[list[int]] = [[] for _ in prompts]
    for i, token, ends in stream_batch(base, prompts, max_tokens, batch_size, True, sampler):
        if not ends:
            tokens[i].append(token)
    return [text_of(base, generated) for generated in tokens]


def complete_prompts(
    base: "BaseModel",
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    batch_size: int | None = None,
) -> list[str]:
    """Return the text that follows each prompt, in their order, with the settings of `Sampling`.

    Without a ``batch_size``, as many are generated together as fit.

    Raises a PackError as `stream_batch`, or for a repetition penalty, which no batch has.
    """
    from mlx_lm.sample_utils import make_sampler

    from ..runtime import mx

    if sampling.repetition_penalty != 1:
        raise PackError(
            "--repetition-penalty: is not available for batches. Leave it out, or generate one "
            "text at a time.",
            "unsupported",
        )

    sampler = None
    if sampling.temperature:
        top_k = _valid_top_k(base, sampling)
        mx.random.seed(sampling.seed)
        sampler = make_sampler(sampling.temperature, sampling.top_p, sampling.min_p, top_k=top_k)

    if batch_size is None and len(prompts) == 1:
        batch_size = 1  # nothing to measure for
    elif batch_size is None:
        batch_size = texts_that_fit(base, max(map(len, prompts)) + sampling.max_tokens)
    return complete_batch(base, prompts, sampling.max_tokens, batch_size, sampler)


def texts_that_fit(base: "BaseModel", tokens: int) -> int:
    """Return how many texts with up to ``tokens`` are generated together, as memory allows."""
    from mlx_lm.models.cache import make_prompt_cache

    from ..runtime import mx, total_memory

    base.model.eval()
    caches = make_prompt_cache(base.model)
    mx.eval(base.model(mx.zeros((1, 1), mx.int32), cache=caches))
    one = sum(cache.nbytes for cache in caches) * -(-tokens // _CACHE_STEP)
    return max(1, min(_MOST_TOGETHER, int(_MEMORY_SHARE * total_memory()) // max(1, one)))


def text_of(base: "BaseModel", tokens: Sequence[int]) -> str:
    """Return tokens as the text that `stream` would yield."""
    detokenizer = base.tokenizer.detokenizer
    detokenizer.reset()
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return detokenizer.text
