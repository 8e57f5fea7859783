"""A base model that packs are swapped on, in milliseconds and without loading anything again.

Adapters of the same targets, ranks and scales are replaced in place, arrays alone. For others the
modules around them are swapped; those of the last few packs are kept, without their arrays, so that
going back and forth builds nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..adapters.lora import Attached
from ..bases.files import TINY
from ..bases.loading import load_base_model
from ..bases.model import BaseModel
from ..config.choices import MATMUL_PATHS
from ..errors import PackError
from ..files import is_hub_id
from ..inference.generate import chat_prompt, complete, raw_prompt
from ..nn.quantized import apply_matmul_path, replace_modules
from ..reading import read_json
from ..runtime import mx
from .pack import Pack
from .weighted_sum import Packs, as_pack

_SUSPENDED = 4  # adapters that are kept, without their arrays


@dataclass(frozen=True, eq=False)
class ActivePack:
    """The pack on a base, its adapters there, and how frozen weights are used."""

    pack: Pack
    attached: Attached
    matmul_path: str


@dataclass
class Base(BaseModel):
    """A frozen base model with its tokenizer, on which packs are applied and swapped."""

    active: ActivePack | None = field(default=None, init=False, repr=False, compare=False)
    suspended: list[Attached] = field(default_factory=list, init=False, repr=False, compare=False)

    @contextmanager
    def applied(self, pack: Packs, matmul_path: str = "quantized") -> Iterator["Base"]:
        """The base with a pack attached; on leaving it is bit-identical to before, not reloaded.

        An inner pack replaces the outer one until it is left.

        Args:
            pack: a pack, its folder, or several with weights, whose deltas add up:
                ``{"packs/a": 0.7, "packs/b": 0.3}``, or pairs of pack and weight.
            matmul_path: how frozen weights are used (quantized, transient, dense).

        Raises:
            PackError: the pack does not fit this base.
        """
        before = self.active
        self.swap_pack(pack, matmul_path)
        try:
            yield self
        finally:
            self.swap_pack(before and before.pack, before.matmul_path if before else "quantized")

    def generate(
        self,
        prompt: str | Sequence[Mapping],
        pack: Packs | None = None,
        *,
        raw: bool = False,
        **sampling: Any,
    ) -> str:
        """Return the text that follows a prompt, with a pack or with what is active.

        Args:
            prompt: the user's message, or messages with ``role`` and ``content``; both are put into
                the chat template.
            pack: as `applied` takes it; None leaves the base as it is.
            raw: continue the prompt, a text, without the chat template.
            **sampling: settings of `Sampling`: ``max_tokens`` (100), ``temperature`` (0), ``top_p``,
                ``top_k``, ``min_p``, ``repetition_penalty``, ``seed``.

        Raises:
            PackError: the base has no chat template, the pack does not fit, or a setting is wrong.
        """
        self.check_architecture("generate", "decoder")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if raw and not isinstance(prompt, str):
            raise PackError("raw: continues a text, but the prompt is messages.", "conflict", "raw")
        tokens = raw_prompt(self, prompt) if raw else chat_prompt(self, messages)
        with nullcontext() if pack is None else self.applied(pack):
            return complete(self, tokens, **sampling)

    def swap_pack(self, pack: Packs | None, matmul_path: str = "quantized") -> None:
        """Replace the active pack by another; None removes it.

        A pack of the same targets, ranks and scales is put into the adapters that are there: traces
        stay good. For others the base's modules are swapped. Base weights are never touched.

        Raises:
            PackError: the pack does not fit; the active pack then stays.
        """
        before = self.active
        after = None if pack is None else as_pack(pack)
        if after is not None:
            after.check_base(self)
            tensors = after.load_tensors()
            if before and before.matmul_path == matmul_path and _fits(before.attached, after):
                before.attached.load(tensors, after.name)
                self.active = ActivePack(after, before.attached, matmul_path)
                return
        self._deactivate()
        if after is None:
            return
        try:
            self._activate(after, matmul_path)
        except BaseException:
            if before:
                self._activate(before.pack, before.matmul_path)
            raise

    def _activate(self, pack: Pack, matmul_path: str) -> None:
        attached = next((other for other in self.suspended if _fits(other, pack)), None)
        if attached is None or not MATMUL_PATHS[matmul_path].in_place:
            attached = pack.attach(self, matmul_path)
            modules = attached.installed_modules()
            mx.eval([module.parameters() for _, module in modules])  # DoRA's norms
        else:
            attached.resume(pack.load_tensors(), pack.name)
            self.suspended.remove(attached)
        self.active = ActivePack(pack, attached, matmul_path)

    def _deactivate(self) -> None:
        """Put the base's own modules back; keep those for adapters, if nothing was copied."""
        active, self.active = self.active, None
        if active is None:
            return
        attached = active.attached
        has_copies = attached.inference_only or attached.notes
        if has_copies or not MATMUL_PATHS[active.matmul_path].in_place:
            attached.detach()
            return
        attached.suspend()
        self.suspended = [attached, *self.suspended[: _SUSPENDED - 1]]


def _fits(attached: Attached, pack: Pack) -> bool:
    """Return whether a pack has the targets, ranks and scales of adapters, and nothing else."""
    if attached.inference_only or pack.beyond_lora:
        return False
    return attached.specs == pack.specs


def load_base(
    name: str | Path = TINY,
    quantize: str = "none",
    trust_remote_code: bool = False,
    *,
    double_quant: bool = True,
    keep: Sequence[str] = (),
    compute_dtype: str = "auto",
    lazy: bool = False,
) -> Base:
    """Load a checkpoint and its tokenizer, frozen, ready for packs.

    On a CPU the floating tensors (scales, norms) are taken to float32: MLX multiplies bf16 there 30
    times slower than fp32. On a GPU they keep their dtype.

    Args:
        name: ``"tiny"``, a checkpoint folder or a hub id: whatever mlx-lm's loader reads, and NF4
            as `packs quantize` and as bitsandbytes write it.
        quantize: ``"affine4"``, ``"affine8"`` or ``"nf4"`` quantizes a dense checkpoint tensor by
            tensor as it is read. A base that is NF4 already stays as it is.
        trust_remote_code: whether to run Python code that comes with the checkpoint.
        double_quant: whether the absmax of NF4 are quantized to 8 bits too.
        keep: names of modules that ``quantize`` leaves dense: leaf (lm_head), tail or path.
        compute_dtype: ``auto`` as stored, or ``bfloat16``, ``float16``, ``float32``; on a CPU
            always float32.
        lazy: whether each weight is read when it is first used.

    Raises:
        PackError: there is no such checkpoint, or its tensors do not fit its config.
    """
    loaded = load_base_model(
        name,
        quantize,
        trust_remote_code,
        double_quant=double_quant,
        keep=keep,
        compute_dtype=compute_dtype,
        lazy=lazy,
    )
    return Base(**vars(loaded))


def find_base(pack: Pack | None) -> str:
    """Return the base that a pack was trained on, as `load_base` takes it; ``tiny`` without a pack.

    It is a name of the Hub, or a folder: where the run beside the pack has it, or here under its name.

    Raises:
        PackError: there is no such folder.
    """
    if pack is None:
        return TINY
    name = pack.manifest["base"]["id"]
    if name == TINY or is_hub_id(name):
        return name
    folders = [name] if Path(name).name == name else []  # a pack leads to no other place
    folders = [*_bases_of_runs(pack), *folders]
    for folder in folders:
        if Path(folder).expanduser().is_dir():
            return folder
    raise PackError(
        f"--model: {pack.name} was trained on {name}, which is not here. Name its folder: --model DIR.",
        "not-found",
        "model",
    )


def _bases_of_runs(pack: Pack) -> list[str]:
    """Return the base of the run that stands beside a pack, or beside the parts of a sum."""
    folders = [pack.path] if pack.path else [identity for identity, _ in pack.parts]
    bases = []
    for folder in folders:
        with suppress(PackError, OSError, AttributeError, KeyError, TypeError):
            identity = read_json(folder.with_name(f"{folder.name}-run") / "config.json")
            bases.append(str(identity["recipe"]["model"]))
    return bases


def load_base_for(
    pack: Pack | None, model: str | Path = TINY, trust_remote_code: bool = False
) -> Base:
    """Load a pack's base, checked from headers first and quantized as the pack was trained.

    Without a pack, load the base as it is.
    """
    if pack is None:
        return load_base(model, trust_remote_code=trust_remote_code)
    _, config = pack.check_checkpoint(model)
    return load_base(model, pack.quantize_for(config), trust_remote_code, **pack.quantize_options)


def generate(
    base: Base | str | Path | None,
    prompt: str | Sequence[Mapping],
    pack: Packs | None = None,
    **options: Any,
) -> str:
    """Return the text that follows a prompt: `Base.generate`, of a base that may have to be loaded.

    Args:
        base: a loaded base, what `load_base` takes, or None for the one that the pack was trained on.
        prompt: the user's message, or messages with ``role`` and ``content``.
        pack: a pack, its folder, or several with weights.
        **options: ``raw``, and the settings of `Sampling`.

    Raises:
        PackError: as `Base.generate`, or the base is not here.
    """
    if not isinstance(base, Base):
        pack = None if pack is None else as_pack(pack)
        base = load_base_for(pack, find_base(pack) if base is None else base)
    return base.generate(prompt, pack, **options)


def check_no_pack(base: Base) -> None:
    """Raise a PackError if a base has an active pack: it could not be measured alone."""
    if base.active:
        raise PackError(f"{base.name}: has an active pack. Leave `applied` first.", "conflict")


@contextmanager
def activated(base: Base, pack: Pack | None, matmul_path: str = "quantized") -> Iterator[None]:
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
