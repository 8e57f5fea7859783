"""The widths of a decoder of the Llama family, by its config, and what images add to its memory.

The vision tower of a base is released.
"""

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace

from ..bases.families import (
    FAMILIES,
    facts_of,
    name_in_text_model,
)
from ..bases.geometry import Heads
from ..bases.precision import activation_bytes
from ..config.choices import ARCHITECTURES
from ..errors import PackError
from .headers import Headers, Tensors

_OTHER_TEXTS = ("mistral4",)  # of a mistral3: language models that are not of the Llama family


def plan_of(config: Mapping) -> str | None:
    return facts_of(config.get("model_type")).plan


def has_images(config: Mapping) -> bool:
    """Whether the plan is the one of the language model beside a vision tower."""
    return plan_of(config) not in (None, "dense", "hybrid")


def text_config(config: Mapping) -> dict:
    """Return the config of the language model of a checkpoint that may have more."""
    plan = plan_of(config)
    if plan in (None, "dense"):
        return dict(config)

    text = config.get("text_config") or {}
    family = config["model_type"] if plan == "hybrid" else plan
    if text.get("model_type") in _OTHER_TEXTS:
        family = text["model_type"]
    return {"dtype": config.get("dtype"), **config, **text, "model_type": family}


def language_model(headers: Headers) -> Headers:
    """Return the headers of the language model of a base, by the names of one without images."""
    if plan_of(headers.config) in (None, "dense"):
        return headers

    named = {name_in_text_model(stored): tensor for stored, tensor in headers.tensors.items()}
    tensors = {name: tensor for name, tensor in named.items() if name}
    return replace(headers, config=text_config(headers.config), tensors=tensors)


@dataclass(frozen=True)
class Sizes:
    """Widths of a base of the Llama family, and where its modules are.

    Attributes:
        queries: Heads x head_dim.
        keys: KV heads x head_dim.
        modules: Path -> (out, in) of linear layers and embeddings.
    """

    hidden: int
    ffn: int
    blocks: int
    heads: int
    queries: int
    keys: int
    vocab: int
    head_norms: bool
    modules: dict[str, tuple[int, int]]

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Those of ``modules`` that are in blocks."""
        return {path: shape for path, shape in self.modules.items() if "layers" in path}

    @property
    def stacks(self) -> dict[str, tuple[int, int, int]]:
        """Path -> (experts, out, in) of the experts of a mixture, as mlx-lm stacks them."""
        return {}

    @property
    def weights(self) -> int:
        return sum(map(math.prod, self.modules.values()))


def sizes_of(config: Mapping, tensors: Tensors) -> Sizes:
    """Return the sizes; raise a PackError where the formula does not know the family."""
    family = config.get("model_type")
    if plan_of(config) != "dense":
        others = [t for facts in ARCHITECTURES.values() for t in facts.model_types]
        names = ", ".join((*(name for name, facts in FAMILIES.items() if facts.plan), *others))
        raise PackError(f"no plan for model_type '{family}'. Known are {names}.", "unsupported")

    heads = Heads.of(dict(config))
    blocks = config.get("num_hidden_layers")
    vocab = config.get("vocab_size")
    if not all(isinstance(n, int) and n > 0 for n in (*astuple(heads), blocks, vocab)):
        raise PackError(
            "no plan: config.json lacks a size (hidden, FFN, heads, blocks or vocab).",
            "unsupported",
        )

    hidden = heads.hidden
    ffn = heads.ffn
    queries = heads.heads * heads.head_dim
    keys = heads.kv_heads * heads.head_dim
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }

    modules = {"model.embed_tokens": (vocab, hidden)}
    for i in range(blocks):
        modules |= {f"model.layers.{i}.{name}": shape for name, shape in shapes.items()}
    if "lm_head.weight" in tensors and not config.get("tie_word_embeddings"):
        modules["lm_head"] = (vocab, hidden)

    norms = any(name.endswith("self_attn.q_norm.weight") for name in tensors)
    return Sizes(hidden, ffn, blocks, heads.heads, queries, keys, vocab, norms, modules)


def feature_bytes(text: Headers, headers: Headers, in_batch: int) -> int:
    """Return the bytes of the features of a batch of some tokens, as read and as one array.

    ``text`` are the headers of the language model. Where rows are not known, each token of a batch
    is one of an image, and there are no others.
    """
    tokens = headers.image_tokens
    if tokens is None:
        tokens = in_batch

    vision = headers.config.get("vision_config") or {}
    levels = len(vision.get("deepstack_visual_indexes") or ())
    of_token = activation_bytes(headers.config, "auto") * (1 + levels) * text.config["hidden_size"]
    return 2 * of_token * min(tokens, in_batch)
