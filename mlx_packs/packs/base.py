"""A base model that packs are swapped on, in milliseconds and without loading anything again.

Adapters of the same targets, ranks and scales are replaced in place, only their arrays. For others
the modules around them are swapped; the modules of the last few packs are kept, without their
arrays, so that going back and forth builds nothing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np

from ..adapters.lora import Attached
from ..bases.encoder import Embedder
from ..bases.files import TINY, quantization_name
from ..bases.loading import load_base_model
from ..bases.model import BaseModel
from ..bases.tokenizer import with_template
from ..config.arguments import checked_arguments
from ..config.choices import MATMUL_PATHS
from ..config.sampling import Sampling
from ..data.messages import turns_of
from ..errors import PackError
from ..inference.generate import chat_prompt, complete_prompts, raw_prompt, stream
from ..nn.quantized import apply_matmul_path
from ..nn.surgery import replace_modules
from ..objectives.embedding import embedder_of
from ..objectives.reader import rerank
from ..offload.placing import exceeds_memory, put_on_disk
from ..runtime import mx
from ..vision.tokenizer import take_images
from .compatibility import (
    check_activates,
    check_base,
    check_checkpoint,
    check_generates,
    check_use,
    checked_scorer,
    find_base,
    quantize_for,
    quantize_options,
    text_limit,
)
from .making import attach_pack
from .manifest import chat_template_of, template_kwargs_of
from .pack import Pack
from .scored import Input, Prediction, classify, rewards
from .weighted_sum import Packs, as_pack

_SUSPENDED = 4  # adapters that are kept, without their arrays


@dataclass(frozen=True, eq=False)
class ActivePack:
    """The pack on a base, its adapters there, and how frozen weights are used."""

    pack: Pack
    attached: Attached
    matmul_path: str
    base_tokenizer: Any  # the base model's, whose chat template may be another one


@dataclass(repr=False)
class Base(BaseModel):
    """A frozen base model with its tokenizer; packs are applied to it and swapped.

    `load_base` returns it.

    Attributes:
        name: The name that it was loaded by.
        path: The folder of the checkpoint.
        model: The module of mlx-lm, or the encoder.
        tokenizer: The tokenizer.
        config: The contents of config.json.
        fingerprint: A hash of the tensors, which packs are checked against.
        quantization: The quantization as in config.json; empty if the weights are dense.
        compute_dtype: Dtype of the activations.
    """

    active: ActivePack | None = field(default=None, init=False, repr=False, compare=False)
    _suspended: list[Attached] = field(default_factory=list, init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        kind = self.config.get("model_type", "unknown")
        weights = quantization_name(self.quantization)
        active = f", active pack {self.active.pack.name!r}" if self.active is not None else ""
        return f"Base({self.name!r}, {kind}, {weights}, computes in {self.compute_dtype}{active})"

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The variables of the chat template that the active pack was trained with."""
        if self.active is None:
            return {}
        return template_kwargs_of(self.active.pack.manifest)

    @cached_property
    def embedder(self) -> Embedder:
        """The base as it embeds texts: an encoder, or the states of a decoder."""
        if self.architecture == "encoder":
            return Embedder(self.model, self.tokenizer)
        return embedder_of(self)

    @property
    def text_limit(self) -> int:
        """The tokens that are read of a text that is embedded or ranked."""
        manifest = self.active.pack.manifest if self.active else {}
        return text_limit(manifest, self.config)

    @checked_arguments
    def prompt(self, name: str) -> str:
        """Return the text before texts of a kind, by its name; ``query`` may be the pack's."""
        if self.active is not None and name == "query":
            trained = self.active.pack._part("objective").get("query_prompt")
            if trained is not None:
                return trained

        return self.embedder.vectors.sentence_config.prompt(name)

    @checked_arguments
    def encode(
        self, texts: Sequence[str], batch_size: int = 32, prompt_name: str | None = None
    ) -> np.ndarray:
        """Return the embeddings of texts, float32 [N, D], with the active pack.

        Args:
            texts: The texts, N in number.
            batch_size: Number of texts that are computed together.
            prompt_name: Name of the prompt that is put before each text, as the base's
                config_sentence_transformers.json has it; ``"query"`` is the one that the active
                pack was trained with, if it was. None puts nothing before them.

        Raises:
            PackError: If an item is not a text, or the base has no such prompt or embeds no texts.
        """
        prompt = ""
        if prompt_name is not None:
            prompt = self.prompt(prompt_name)
        return self.embedder.encode(texts, batch_size, self.text_limit, prompt)

    @contextmanager
    def applied(self, pack: Packs, matmul_path: str = "quantized") -> Iterator["Base"]:
        """Attach a pack in a ``with`` block, and restore the base model bit-identically after it.

        No weight is reloaded. The pack of an inner block replaces the outer block's pack until the
        inner block ends.

        Args:
            pack: A pack, its folder, or several packs with weights, whose deltas are added up:
                ``{"packs/a": 0.7, "packs/b": 0.3}``, or pairs of a pack and its weight.
            matmul_path: How frozen weights are used: ``"quantized"``, ``"transient"`` or
                ``"dense"``.

        Raises:
            PackError: If the pack does not fit this base model.
        """
        with self._pack_restored():
            self.attach(pack, matmul_path)
            yield self

    def generate(
        self,
        prompt: str | Sequence[Mapping],
        pack: Packs | None = None,
        *,
        raw: bool = False,
        **sampling: Any,
    ) -> str:
        """Return the text that the model generates after a prompt.

        Args:
            prompt: The user's message, or a list of messages with ``role`` and ``content``. Either
                is put into the chat template.
            pack: A pack for this call, as in `applied`; None uses the active pack, if there is one.
            raw: Whether to continue the prompt as plain text, without the chat template.
            **sampling: ``max_tokens`` (default 100), ``temperature`` (default 0: greedy),
                ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty`` and ``seed``.

        Raises:
            PackError: If there is no chat template, the pack does not fit, or a setting is invalid.
        """
        return "".join(self.stream(prompt, pack, raw=raw, **sampling))

    @checked_arguments
    def stream(
        self,
        prompt: str | Sequence[Mapping],
        pack: Packs | None = None,
        *,
        raw: bool = False,
        **sampling: Any,
    ) -> Iterator[str]:
        """Return an iterator over pieces of the text that `generate` returns, as they come.

        The pack of the call stays on the base model until the iterator ends or is closed.

        Args:
            prompt: As in `generate`.
            pack: As in `generate`.
            raw: As in `generate`.
            **sampling: As in `generate`.

        Raises:
            PackError: As in `generate`, before the first piece.
        """
        tokens = self._prompt_tokens(prompt, raw, pack)
        settings = Sampling.from_mapping(sampling)
        pack = None if pack is None else as_pack(pack)

        def pieces() -> Iterator[str]:
            with self._generating(pack):
                yield from stream(self, tokens, settings)

        return pieces()

    @checked_arguments
    def generate_batch(
        self,
        prompts: Sequence[str | Sequence[Mapping]],
        pack: Packs | None = None,
        *,
        raw: bool = False,
        batch_size: int | None = None,
        **sampling: Any,
    ) -> list[str]:
        """Return the text that the model generates after each prompt, several at a time.

        Args:
            prompts: Prompts as in `generate`.
            pack: As in `generate`.
            raw: As in `generate`.
            batch_size: Maximum number of texts that are generated together. None: 32, or fewer
                whose keys and values need an eighth of the memory.
            **sampling: As in `generate`, without ``repetition_penalty``.

        Raises:
            PackError: As in `generate`, or if mlx-lm cannot batch this architecture.
        """
        if isinstance(prompts, str):
            raise PackError("prompts: must be a list of prompts, but is one text.", flag="prompts")

        tokens = [self._prompt_tokens(prompt, raw, pack) for prompt in prompts]
        settings = Sampling.from_mapping(sampling)

        if not tokens:
            return []

        with self._generating(pack):
            return complete_prompts(self, tokens, settings, batch_size)

    @contextmanager
    def _generating(self, pack: Packs | None) -> Iterator[None]:
        """Use a pack, or the active one, by the path that a device generates text fastest by."""
        from ..memory.matmul_path import generation_path

        active = self.active
        if pack is None and active is not None:
            if active.matmul_path != "quantized":  # as it was chosen
                yield
                return
            pack = active.pack
        with activated(self, pack, generation_path(self.model)):
            yield

    def _prompt_tokens(
        self, prompt: str | Sequence[Mapping], raw: bool, pack: Packs | None
    ) -> list[int]:
        self.check_architecture("generate", "decoder")
        if pack is not None:
            check_generates(as_pack(pack))
        elif self.active is not None:
            check_generates(self.active.pack)

        if raw and not isinstance(prompt, str):
            raise PackError("raw: continues a text, but the prompt is messages.", "conflict", "raw")
        if raw:
            return raw_prompt(self, prompt)

        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            messages = [turn.message for turn in turns_of(messages)]
        except ValueError as error:
            raise PackError(f"prompt: {error}", flag="prompt") from None

        if pack is None:
            return chat_prompt(self, messages)

        manifest = as_pack(pack).manifest
        tokenizer = self.active.base_tokenizer if self.active else self.tokenizer
        tokenizer = with_template(tokenizer, chat_template_of(manifest))
        return chat_prompt(self, messages, tokenizer=tokenizer, **template_kwargs_of(manifest))

    @checked_arguments
    def rewards(
        self,
        completions: str | Path | Iterable[Mapping] | Mapping[str, Iterable[Mapping]],
        pack: str | Path | Pack,
        *,
        batch_size: int = 8,
        matmul_path: str = "auto",
    ) -> np.ndarray:
        """Return the rewards of completions by a reward model, float32 [N].

        Args:
            completions: Examples with ``prompt`` and ``completion``, texts or lists of messages, as
                `train_pack` takes them: mappings, a DataFrame or a Dataset.
            pack: A pack of ``--task reward``, or its folder. It is attached for this call only; an
                active pack is attached again afterwards.
            batch_size: Number of completions that are computed together.
            matmul_path: How frozen weights are used, as in `applied`. ``"auto"`` is quantized on a
                GPU, and dense on a CPU with enough memory.

        Raises:
            PackError: If the pack is no reward model or does not fit, or an example cannot be used.
        """
        self.check_architecture("rewards", "decoder")
        pack = checked_scorer(as_pack(pack), "reward")
        with scoring(self, pack, matmul_path) as head:
            return rewards(self, completions, pack, head, batch_size)

    @checked_arguments
    def classify(
        self,
        texts: Sequence[Input],
        pack: str | Path | Pack,
        *,
        batch_size: int = 8,
        matmul_path: str = "auto",
    ) -> list[Prediction]:
        """Return what a classifier says of each text: a label, and the probability of each.

        Args:
            texts: Texts, lists of messages with ``role`` and ``content``, or rows with either, as
                the pack was trained on.
            pack: A pack of ``--task classify``, or its folder. It is attached for this call only;
                an active pack is attached again afterwards.
            batch_size: Number of texts that are computed together.
            matmul_path: As in `rewards`.

        Raises:
            PackError: If the pack is no classifier or does not fit, or a text is empty.
        """
        self.check_architecture("classify", "decoder")
        pack = checked_scorer(as_pack(pack), "classify")
        with scoring(self, pack, matmul_path) as head:
            return classify(self, texts, pack, head, batch_size)

    @checked_arguments
    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        batch_size: int = 8,
        instruction: str | None = None,
    ) -> np.ndarray:
        """Return how well each document answers a query, float32 [N] in 0 to 1.

        Args:
            query: The query.
            documents: The documents, N in number.
            batch_size: Number of documents that are computed together.
            instruction: Criterion of relevance; None is the active pack's own, or Qwen3-Reranker's.

        Raises:
            PackError: If the base model is an encoder, or a text is empty or none.
        """
        self.check_architecture("rerank", "decoder")
        head = None
        if (active := self.active) is not None:
            check_use(active.pack, "rerank")
            head = active.attached.score
            instruction = instruction or active.pack._part("objective").get("instruction")

        return rerank(self, head, query, documents, instruction, batch_size)

    @checked_arguments
    def attach(self, pack: Packs, matmul_path: str = "quantized") -> "Base":
        """Attach a pack until `detach`, in place of the active one, and return the base model.

        `applied` does the same for a ``with`` block. A pack with the same targets, ranks and scales
        as the active one is loaded into the installed adapters, and compiled graphs stay valid. For
        any other pack, the adapted modules are swapped. The weights of the base model are never
        changed.

        Args:
            pack: A pack, its folder, or several packs with weights, as in `applied`.
            matmul_path: How frozen weights are used, as in `applied`.

        Raises:
            PackError: If the pack does not fit or is a reward model; the active pack then stays.
        """
        before = self.active
        after = as_pack(pack)
        check_activates(after)
        check_base(after, self)
        tensors = after.load_tensors()
        if before and before.matmul_path == matmul_path and _fits(before.attached, after):
            before.attached.load(tensors, after.name)
            self._set_active(after, before.attached, matmul_path, before.base_tokenizer)
            return self

        self.detach()
        try:
            self._activate(after, matmul_path)
        except BaseException:
            if before:
                self._activate(before.pack, before.matmul_path)
            raise
        return self

    def detach(self) -> None:
        """Remove the active pack, if there is one; the base model is bit-identical to before."""
        active = self.active
        self.active = None
        if active is None:
            return

        self.tokenizer = active.base_tokenizer
        attached = active.attached
        has_copies = attached.inference_only or attached.notes
        if has_copies or not MATMUL_PATHS[active.matmul_path].in_place:
            attached.detach()
            return

        # the modules are kept for adapters of the same kind
        attached.suspend()
        self._suspended = [attached, *self._suspended[: _SUSPENDED - 1]]

    @contextmanager
    def _pack_restored(self) -> Iterator[None]:
        """Attach the pack that is active now again at the end; detach any other if there is none.

        A pack that cannot be attached leaves the active one as it was.
        """
        before = self.active
        try:
            yield
        finally:
            if before is None:
                self.detach()
            elif self.active is not before:
                self.attach(before.pack, before.matmul_path)

    def _activate(self, pack: Pack, matmul_path: str) -> None:
        attached = next((other for other in self._suspended if _fits(other, pack)), None)
        if attached is None or not MATMUL_PATHS[matmul_path].in_place:
            attached = attach_pack(self, pack, matmul_path)
            modules = attached.installed_modules()
            mx.eval([module.parameters() for _, module in modules])  # DoRA's norms
        else:
            attached.resume(pack.load_tensors(), pack.name)
            self._suspended.remove(attached)

        self._set_active(pack, attached, matmul_path, self.tokenizer)

    def _set_active(
        self, pack: Pack, attached: Attached, matmul_path: str, base_tokenizer: Any
    ) -> None:
        self.active = ActivePack(pack, attached, matmul_path, base_tokenizer)
        self.tokenizer = with_template(base_tokenizer, chat_template_of(pack.manifest))


def _fits(attached: Attached, pack: Pack) -> bool:
    """Whether a pack has the targets, ranks and scales of adapters, and nothing else."""
    if attached.inference_only or pack._beyond_lora:
        return False
    return attached.specs == pack.specs


@checked_arguments
def load_base(
    name: str | Path = TINY,
    quantize: str = "none",
    trust_remote_code: bool = False,
    *,
    double_quant: bool = True,
    keep: Sequence[str] = (),
    compute_dtype: str = "auto",
    lazy: bool = False,
    offload: bool = False,
) -> Base:
    """Load a checkpoint and its tokenizer as a frozen base model.

    On a CPU, floating tensors (scales, norms) are converted to float32, because MLX multiplies
    bfloat16 30 times slower than float32 there. On a GPU, they keep their dtype.

    Args:
        name: ``"tiny"``, a checkpoint folder, a GGUF file (or ``ollama:NAME``; with
            ``dense:`` before it K-quants become dense) or a Hub id. Every checkpoint that mlx-lm
            loads is supported, and NF4 as `packs quantize` and bitsandbytes write it.
        quantize: ``"affine4"``, ``"affine8"``, ``"nf4"``, ``"mxfp4"`` or ``"nvfp4"`` quantizes a
            dense checkpoint while it is read.
        trust_remote_code: Whether to allow executing Python code shipped with the checkpoint.
        double_quant: Whether to store the scales (absmax) of NF4 in 8 bits.
        keep: Modules that ``quantize`` leaves dense: their paths, or ends of paths (``lm_head``).
        compute_dtype: Dtype of activations: ``"auto"`` is the stored one; others are
            ``"bfloat16"``, ``"float16"`` and ``"float32"``. A CPU always computes in float32.
        lazy: Whether to read each weight only when it is first used.
        offload: Whether the transformer blocks stay on disk, and are read whenever they are
            computed (docs/memory.md). The base must be stored as it is used: without ``quantize``.

    Raises:
        PackError: If there is no such checkpoint, or its tensors do not fit its config.json.
    """
    loaded = load_base_model(
        name,
        quantize,
        trust_remote_code,
        double_quant=double_quant,
        keep=keep,
        compute_dtype=compute_dtype,
        lazy=lazy or offload,
    )
    base = Base(**vars(loaded))
    if not base.is_lazy:
        take_images(base.tokenizer, base.path, base.config, base.model)
    if offload:
        put_on_disk(base)
    return base


def name_of(base: Base | str | Path) -> str | Path:
    """The name of a base, by which its files are found."""
    return base.name if isinstance(base, Base) else base


def load_base_for(
    pack: Pack | None,
    model: str | Path = TINY,
    trust_remote_code: bool = False,
    offload_base: str = "off",
) -> Base:
    """Load a pack's base, checked from headers first and quantized as the pack was trained.

    ``offload_base`` is as in `TrainConfig`; ``auto`` is on for a base that is larger than memory.
    """
    options: dict[str, Any] = {}
    if pack is not None:
        _, config = check_checkpoint(pack, model)
        options = {"quantize": quantize_for(pack, config), **quantize_options(pack)}
    is_auto = offload_base == "auto" and options.get("quantize", "none") == "none"
    options["offload"] = offload_base == "on" or (is_auto and exceeds_memory(model))
    return load_base(model, trust_remote_code=trust_remote_code, **options)


def loaded_base(base: Base | str | Path | None, pack: Packs | None) -> tuple[Base, Pack | None]:
    """A loaded base as it is, or by its name, and a pack that is opened if need be.

    Without a base it is the one that the pack was trained on.
    """
    opened = None if pack is None else as_pack(pack)
    if not isinstance(base, Base):
        base = load_base_for(opened, find_base(opened) if base is None else base)
    return base, opened


def check_no_pack(base: Base) -> None:
    """A base with an active pack could not be measured alone."""
    if base.active:
        raise PackError(
            f"{base.name}: has an active pack. Call detach() or leave `applied` first.", "conflict"
        )


@contextmanager
def activated(base: Base, pack: Packs | None, matmul_path: str = "quantized") -> Iterator[None]:
    """The base with a pack, or alone, its frozen weights multiplied by ``matmul_path``."""
    if pack is not None:
        with base.applied(pack, matmul_path):
            yield
        return

    originals = apply_matmul_path(base.model, matmul_path)
    try:
        yield
    finally:
        replace_modules(base.model, originals)


@contextmanager
def scoring(base: Base, pack: Pack, matmul_path: str) -> Iterator[nn.Module | None]:
    """Yield the head of a pack on a base; packs that cannot stay attached are, for this block.

    A pack that was active is attached again afterwards. ``"auto"`` is the path that text is
    generated by.
    """
    from ..memory.matmul_path import generation_path

    check_base(pack, base)
    with base._pack_restored():
        base.detach()
        if matmul_path == "auto":
            matmul_path = generation_path(base.model)
        base._activate(pack, matmul_path)
        yield base.active.attached.score
