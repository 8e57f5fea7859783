"""Model families, and what is particular to each.

Families of mlx-lm and mlx-vlm that are not in the table are trained, too; docs/families.md lists
them all, and tests/bases/test_families.py trains each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ImageFacts:
    """How a family takes images, by the vision tower and the image processor of mlx-vlm."""

    placeholder: str  # what its chat template writes for an image
    # what it writes around that, without which mlx-vlm's processor does not count or place tokens
    before: str = ""
    after: str = ""
    scaled: bool = False  # whether the language model scales what it embeds, and so features, too
    divided: bool = False  # whether mlx-vlm divides by that scale, of the outer hidden_size
    interleaved: bool = False  # whether three axes of positions take turns in the pairs of a head
    # blocks in which the tokens of an image see each other: ``none``, ``all``, or ``config``, those
    # with a window if ``use_bidirectional_attention`` is ``vision``
    sees: str = "none"


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is particular to a model family."""

    plan: str | None  # ``dense`` or ``hybrid``, or the family of the language model beside a tower
    text_model: str | None = None  # the language model's in mlx-lm, if its own name is none there
    images: ImageFacts | None = None
    gguf: str = ""  # ``general.architecture`` of its GGUF files; empty if it is not known
    # In GGUF files, the tensors of a block by their path in it, and whether rows of q and k are in
    # the order of interleaved rotary embeddings.
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    permuted: bool = False
    untrainable: str = ""
    untrainable_on_metal: str = ""
    # whether texts in a batch of mlx-lm differ from each alone: a mask without a batch axis, or a
    # recurrent state that padding runs through
    one_by_one: bool = False
    # whether logits are the same if a part of the prompt is read before: not with windows that show
    # a key more than caches keep
    reads_in_parts: bool = True
    cache_differs: bool = False  # logits with a cache are other ones than without


_ATTENTION = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
_DENSE = {
    **_ATTENTION,
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_PHI3 = {
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GPT2 = {
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_LLAMA = Family(plan="dense", gguf="llama", gguf_names=_DENSE, permuted=True)
_QWEN3_5 = Family(plan="hybrid", gguf="qwen35", gguf_names=_DENSE)

_QWEN = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
_QWEN2_VL = Family(plan="qwen2", images=ImageFacts(*_QWEN))
_IDEFICS3 = Family(plan="llama", text_model="llama", images=ImageFacts("<image>"))

UNTRAINABLE = {
    "bitnet": "its projections (BitLinear) are a kernel for Metal that has no gradient",
    "dbrx": "its experts are chosen on the host, which a compiled step cannot do",
    "deepseek_v41": "its router lets gradients into indices, which MLX rejects",
    "limite": "its attention multiplies by weights of its projections that it scales before",
    "llada2_moe": "it makes text by diffusion, not one token after the other",
    "longcat_flash_sparse": "its router lets gradients into indices, which MLX rejects",
    "muse_spark": "its attention and norms are kernels for Metal that have no gradient",
    "nemotron_labs_diffusion": "it makes text by diffusion, not one token after the other",
    "olmo": "mlx-lm needs the package ai2-olmo for it and ends the program without",
    "prism_hadamard_qwen35": "its projections are HadamardQuantizedLinear, which carry no adapters",
    "recurrent_gemma": "mlx-lm's Model is not set up as a module and cannot be frozen",
}
# Whose forward pass is: embedding, blocks that pass on one array, norm, head; `--pipeline` gives
# each rank some of the blocks. tests/extras/test_pipeline.py splits a model of each.
SPLITTABLE = (
    "qwen3 qwen2 llama mistral gemma2 gemma3_text olmo2 phi3 qwen3_moe mixtral glm4_moe gpt_oss"
).split()
_ONE_BY_ONE = (
    "afm7 baichuan_m1 bailing_moe_linear gear gpt_bigcode jamba longcat_flash_ngram mamba "
    "nemotron-nas nemotron_h olmo_hybrid phi3small qwen4_exp z1t"
)
# By ``model_type``, or the name of the module in mlx_lm.models or mlx_vlm.models.
FAMILIES: Mapping[str, Family] = {
    "qwen3": Family(plan="dense", gguf="qwen3", gguf_names=_DENSE),
    "qwen2": Family(plan="dense", gguf="qwen2", gguf_names=_DENSE),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe": Family(plan="hybrid"),
    "qwen3_5_moe_text": Family(plan="hybrid"),
    "qwen3_next": Family(plan="hybrid"),
    "qwen3_moe": Family(plan="hybrid", gguf="qwen3moe", gguf_names=_ATTENTION),
    "gemma": Family(plan=None, gguf="gemma", gguf_names=_DENSE),
    "gemma2": Family(plan=None, gguf="gemma2", gguf_names=_DENSE, one_by_one=True),
    "gemma3_text": Family(plan=None, gguf="gemma3", gguf_names=_DENSE),
    "phi3": Family(plan=None, gguf="phi3", gguf_names=_PHI3),
    "gpt2": Family(plan=None, gguf="gpt2", gguf_names=_GPT2),
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
    "qwen3_vl": Family(plan="qwen3", images=ImageFacts(*_QWEN, interleaved=True)),
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
    "gemma3": Family(
        plan=None,
        gguf="gemma3",
        gguf_names=_DENSE,
        images=ImageFacts("<start_of_image>", scaled=True, divided=True, sees="all"),
    ),
    "llava": Family(plan="llama", images=ImageFacts("<image>")),
    "mistral3": Family(plan="mistral", images=ImageFacts("[IMG]")),
    "gemma4": Family(plan=None, images=ImageFacts("<|image|>", scaled=True, sees="config")),
    "rwkv7": Family(
        plan=None,
        untrainable_on_metal="its kernel for Metal (the recurrence) has no gradient",
        one_by_one=True,
    ),
    "plamo3": Family(plan=None, reads_in_parts=False),
    "deepseek_v4": Family(plan=None, cache_differs=True),
    "gemma3n": Family(plan=None, cache_differs=True),
    **dict.fromkeys(_ONE_BY_ONE.split(), Family(plan=None, one_by_one=True)),
    **{name: Family(plan=None, untrainable=reason) for name, reason in UNTRAINABLE.items()},
}
_OTHER = Family(plan=None)
VISION_FAMILIES = {name: family.images for name, family in FAMILIES.items() if family.images}

# How names of tensors of a language model begin, in files and in memory, and in one of mlx-lm.
_TEXT_NAMES = {
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.",
    "text_model.": "model.",
    **{name: name for name in ("lm_head.", "model.embed_tokens.", "model.layers.", "model.norm.")},
}

# How paths begin in a base and in another program: where mlx-lm has the family, and where the
# language model is of another one (`Family.text_model`).
_ELSEWHERE: Mapping[str, tuple[dict[str, str], dict[str, str]]] = {
    "transformers": (
        {"language_model.model.": "model.language_model.", "language_model.lm_head": "lm_head"},
        {"model.": "model.text_model."},
    ),
    "mlx-vlm": ({}, {"model.": "language_model.", "lm_head": "language_model.lm_head"}),
}


def facts_of(name: str | None) -> Family:
    """The facts of a family; the usual ones if it is not in the table."""
    return FAMILIES.get(name, _OTHER) if name else _OTHER


def name_in_text_model(stored: str) -> str | None:
    """Return the name of a tensor in a language model without images; None for other tensors."""
    begin = next((begin for begin in _TEXT_NAMES if stored.startswith(begin)), None)
    return begin and _TEXT_NAMES[begin] + stored.removeprefix(begin)


def path_in(path: str, model_type: str, program: str) -> str:
    """Return the path of a module of a base as ``transformers`` or ``mlx-vlm`` names it."""
    return _renamed(path, _names_in(program, model_type))


def path_from(path: str, model_type: str, program: str) -> str:
    """Return the path in a base of a module that ``transformers`` or ``mlx-vlm`` names."""
    names = {there: here for here, there in reversed(_names_in(program, model_type).items())}
    return _renamed(path, names)


def _names_in(program: str, model_type: str) -> dict[str, str]:
    if program == "transformers" and model_type == "gpt2":
        return {"model.": "transformer."}
    if model_type not in VISION_FAMILIES:
        return {}
    return _ELSEWHERE[program][FAMILIES[model_type].text_model is not None]


def _renamed(path: str, names: Mapping[str, str]) -> str:
    """Replace the first of these beginnings that a path has."""
    for begin, other in names.items():
        if path.startswith(begin):
            return other + path.removeprefix(begin)
    return path


def has_vision_tower(config: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint is of one of these families, with its vision tower."""
    is_of_family = config.get("model_type") in VISION_FAMILIES
    return is_of_family and bool(config.get("vision_config")) and image_token_of(config) is not None


def image_token_of(config: Mapping[str, Any]) -> int | None:
    """Return the token that stands for a feature of an image; None if a config names none."""
    for name in ("image_token_id", "image_token_index"):
        if isinstance(token := config.get(name), int):
            return token
    return None


def mrope_sections(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return how many pairs of a head turn by each axis of positions; None with one axis."""
    text = config.get("text_config") or config
    for name in ("rope_scaling", "rope_parameters"):
        for part in (text, config):
            if sections := (part.get(name) or {}).get("mrope_section"):
                return tuple(sections)
    return None
