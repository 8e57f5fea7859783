"""Estimate the peak memory of training a Qwen3.5, a Qwen3-Next, or a mixture of experts of Qwen3.

Most blocks of the first two have the gated delta rule (`ops.gated_delta`) in place of attention,
and their mixtures a shared expert. What a block keeps was read off measured peaks of small models
on a CPU, one size changed at a time; it is all that autodiff keeps, since the families' own blocks
recompute nothing by themselves.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .. import runtime
from ..bases.geometry import Heads
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..errors import PackError
from ..kinds import check_keys
from ..ops import gated_delta
from .decoder_sizes import Sizes
from .headers import Headers, Tensors
from .step import Level, Pass, Step

_OF_EXPERTS = {"gate_proj", "up_proj", "down_proj"}
_HEAD_KEYS = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)
_KEYS = (
    *_HEAD_KEYS,
    "linear_conv_kernel_dim",
    *("num_hidden_layers", "vocab_size", "full_attention_interval"),
    *("hidden_size", "num_attention_heads"),
)
_MIXTURE_KEYS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
# what the config of a qwen3_moe lacks: attention is in every block, and no expert is shared
_NOT_HYBRID = {
    **dict.fromkeys((*_HEAD_KEYS, "linear_conv_kernel_dim"), 0),
    **{"full_attention_interval": 1, "shared_expert_intermediate_size": 0},
}


@dataclass(frozen=True)
class HybridSizes(Sizes):
    """Widths of a hybrid base, or of a mixture with attention in every block.

    Attributes:
        ffn: Width of the feed-forward, or of the shared expert of a mixture; 0 without one.
        recurrent: By block, whether it has the gated delta rule rather than attention.
        experts: Of a mixture, beside the shared one.
        routed: Experts of a token.
    """

    recurrent: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    experts: int = 0
    routed: int = 0
    expert_ffn: int = 0

    @property
    def is_hybrid(self) -> bool:
        return any(self.recurrent)

    @property
    def weights(self) -> int:
        of_experts = self.experts * self.hidden * (3 * self.expert_ffn + 1)
        return super().weights + self.blocks * of_experts

    @property
    def stacks(self) -> dict[str, tuple[int, int, int]]:
        if not self.experts:
            return {}
        into = (self.experts, self.expert_ffn, self.hidden)
        out = (self.experts, self.hidden, self.expert_ffn)
        shapes = {"gate_proj": into, "up_proj": into, "down_proj": out}
        return {
            f"model.layers.{i}.mlp.switch_mlp.{name}": shape
            for i in range(self.blocks)
            for name, shape in shapes.items()
        }

    @property
    def feed_forward(self) -> float:
        """Numbers per token that a feed-forward keeps for its backward pass."""
        if not self.experts:
            return 5 * self.ffn
        of_experts = self.routed * (4 * self.expert_ffn + self.hidden) + 2 * self.experts
        return of_experts + 4.2 * self.ffn

    @property
    def values(self) -> int:
        """Width of all value heads."""
        return self.value_heads * self.value_width


def adapted_sizes(headers: Headers, lora: LoRAConfig, train: TrainConfig) -> HybridSizes:
    """Return the sizes of a base with the modules that a run may train.

    Raises a PackError for adapters on the experts of a mixture, and their full fine-tuning.
    """
    sizes = hybrid_sizes(headers.config, headers.tensors)
    if sizes.experts and (train.trains_base or set(lora.target_modules) & _OF_EXPERTS):
        raise PackError("no plan for training the experts of a mixture.", "unsupported")
    if lora.target_modules or train.trains_base:
        return sizes
    # as `targets.without_narrow`
    wide = {p: s for p, s in sizes.modules.items() if min(s) >= lora.rank}
    return replace(sizes, modules=wide)


def hybrid_sizes(config: Mapping, tensors: Tensors) -> HybridSizes:
    """Return the sizes; raise a PackError where a config lacks one."""
    mixture_keys = _MIXTURE_KEYS if config.get("num_experts") else ("intermediate_size",)
    needed = dict.fromkeys((*_KEYS, *mixture_keys), "an integer above 0")
    is_hybrid = config["model_type"] != "qwen3_moe"
    if not is_hybrid:
        config = {**config, **_NOT_HYBRID}
        needed = {key: kind for key, kind in needed.items() if key not in _NOT_HYBRID}

    try:
        check_keys(dict(config), needed)
    except ValueError as error:
        raise PackError(f"no plan: in config.json {error}.", "unsupported") from None

    blocks = config["num_hidden_layers"]
    vocab = config["vocab_size"]
    heads = Heads.of(dict(config))
    mixture = _mixture(config)
    hidden = heads.hidden
    ffn = config["shared_expert_intermediate_size"] if mixture else heads.ffn
    queries = heads.heads * heads.head_dim
    keys = heads.kv_heads * heads.head_dim

    every = config["full_attention_interval"]
    rule_heads = [config[key] for key in _HEAD_KEYS]
    key_heads, value_heads, key_width, value_width = rule_heads
    mixed = 2 * key_heads * key_width
    values = value_heads * value_width

    recurrent = tuple((i + 1) % every != 0 for i in range(blocks))
    attention = {"q_proj": ((1 + is_hybrid) * queries, hidden), "k_proj": (keys, hidden)}
    attention |= {"v_proj": (keys, hidden), "o_proj": (hidden, queries)}
    if config["model_type"] == "qwen3_next":
        widths = {"in_proj_qkvz": mixed + 2 * values, "in_proj_ba": 2 * value_heads}
    else:
        widths = {"in_proj_qkv": mixed + values, "in_proj_z": values}
        widths |= {"in_proj_b": value_heads, "in_proj_a": value_heads}

    rule = {name: (width, hidden) for name, width in widths.items()}
    rule["out_proj"] = (hidden, values)
    mlp = {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
    modules = {"model.embed_tokens": (vocab, hidden)}

    feed_forward = "mlp.shared_expert" if mixture else "mlp"
    for i, is_recurrent in enumerate(recurrent):
        kind, parts = ("linear_attn", rule) if is_recurrent else ("self_attn", attention)
        block = f"model.layers.{i}"
        modules |= {f"{block}.{kind}.{name}": shape for name, shape in parts.items()}
        if ffn:
            modules |= {f"{block}.{feed_forward}.{name}": shape for name, shape in mlp.items()}

    if "lm_head.weight" in tensors and not config.get("tie_word_embeddings"):
        modules["lm_head"] = (vocab, hidden)

    widths = hidden, ffn, blocks, heads.heads, queries, keys, vocab
    return HybridSizes(*widths, True, modules, recurrent, *rule_heads, *mixture)


def _mixture(config: Mapping) -> tuple[int, ...]:
    """Return experts, how many a token uses, and their width; nothing for a dense base."""
    if not config.get("num_experts"):
        return ()
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) > 1:
        raise PackError("no plan for a mixture of experts in only some blocks.", "unsupported")

    return config["num_experts"], config["num_experts_per_tok"], config["moe_intermediate_size"]


class HybridStep(Step):
    sizes: HybridSizes
    trees_at_once = False

    def _block_numbers(self, own: Level, block: int, adapters: Mapping[str, int]) -> float:
        sizes = self.sizes
        kept = 4 * sizes.hidden + sizes.feed_forward + sum(adapters.values())
        if sizes.recurrent[block - len(self.kept)]:
            keys = sizes.key_heads * sizes.key_width
            return kept + 6 * keys + 6 * sizes.values + 6 * sizes.value_heads

        # the attention of a hybrid has a gate
        queries = 4.7 if sizes.is_hybrid else 3
        kept = kept + queries * sizes.queries + 2.3 * sizes.keys
        # probabilities, and some of what makes them; a fused gradient keeps neither
        if runtime.on_cpu():
            kept += 1.2 * sizes.heads * own.keys
        return kept

    def _in_blocks(self, own: Pass, itemsize: int) -> dict[str, tuple[float, float]]:
        sizes = self.sizes
        (level,) = own.levels
        # gradients inside the experts; of a block that is computed again more is there at a time
        in_experts = sizes.routed * 2 * sizes.hidden
        if self.policy.blocks:
            in_experts = sizes.routed * (4.5 * sizes.hidden + 3 * sizes.expert_ffn)

        mlp = own.tokens * (4 * sizes.hidden + sizes.feed_forward + in_experts)
        scores = 2.5 * sizes.heads * level.keys if runtime.on_cpu() else 0
        attention = own.tokens * (scores + 8 * (sizes.queries + sizes.keys))

        moments = {
            "mlp": (itemsize * (mlp + self.dense_slices()), 0),
            "attention": (itemsize * attention, 0),
        }
        if not sizes.is_hybrid:
            return moments

        rule = gated_delta.RecurrenceSizes(
            level.rows,
            int(level.length),
            sizes.key_heads,
            sizes.value_heads,
            sizes.key_width,
            sizes.value_width,
        )
        # of a block that is computed again half of the feed-forward is gone before the recurrence
        gone = 0.6 * sizes.feed_forward if self.policy.blocks else 0
        return {**moments, "recurrence": (gated_delta.working_bytes(rule), gone)}
