"""Every architecture of the installed mlx-lm, small enough to train in a test.

A config is filled in by the names of the architecture's own fields; `SPECIAL` has what a family
needs besides. `python -m tests.helpers.families` writes the tables of docs/families.md, and prints
what its sentences lack.
"""

import contextlib
import copy
import dataclasses
import importlib
import io
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType

import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from mlx_packs.adapters.attach import attach
from mlx_packs.adapters.lora import Attached
from mlx_packs.bases.families import FAMILIES, UNTRAINABLE, VISION_FAMILIES, facts_of
from mlx_packs.bases.geometry import linears
from mlx_packs.bases.model_classes import classes_of
from mlx_packs.config.schema import LoRAConfig
from mlx_packs.nn.lora import is_switch_linear
from mlx_packs.packs.base import Base
from mlx_packs.runtime import mx

DOCS = Path(__file__).parents[2] / "docs" / "families.md"
ONE_BY_ONE = {name for name, facts in FAMILIES.items() if facts.one_by_one}
LARGEST = 64e6  # bytes; a field of an unknown name has its default, which may be a whole model's

# By field name; sizes are multiples of 32, so that most weights can be packed in groups of 32.
_NAMES = {
    64: "hidden_size hidden_dim n_embd d_model model_dim block_dim dim_model_base",
    2: (
        "num_hidden_layers num_layers n_layer n_layers num_key_value_heads num_kv_heads "
        "n_kv_heads num_attention_groups num_experts_per_tok num_experts_per_token moe_topk "
        "moe_top_k moe_k top_k_experts linear_num_value_heads linear_num_key_heads "
        "mamba_num_heads conv1d_width conv_window mamba_expand layer_group_size "
        "sliding_window_pattern full_attention_interval"
    ),
    4: (
        "num_attention_heads num_heads n_head n_heads num_experts n_routed_experts "
        "num_local_experts moe_num_experts mamba_n_heads sliding_window sliding_window_size "
        "window_size attention_window_size"
    ),
    16: (
        "head_dim hidden_size_per_head kv_channels global_head_dim qk_rope_head_dim "
        "qk_nope_head_dim v_head_dim rotary_dim index_head_dim index_n_heads index_topk "
        "mamba_d_head mamba_d_state ssm_state_size state_size"
    ),
    96: (
        "intermediate_size intermediate_size_mlp ffn_hidden_size n_inner ff_intermediate_size "
        "block_ff_dim dense_intermediate_size"
    ),
    32: (
        "moe_intermediate_size expert_ffn_hidden_size moe_hidden_size "
        "shared_expert_intermediate_size shared_intermediate_size "
        "moe_shared_expert_intermediate_size share_expert_dim kv_lora_rank q_lora_rank "
        "o_lora_rank attention_value_rank linear_key_head_dim linear_value_head_dim "
        "mamba_head_dim"
    ),
    1: (
        "n_shared_experts num_shared_experts num_shared_expert n_group topk_group "
        "num_expert_group decoder_sparse_step first_k_dense_replace moe_layer_freq "
        "num_dense_layers mamba_n_groups n_groups group_norm_size zero_expert_num"
    ),
    8: "a_low_rank_dim v_low_rank_dim gate_low_rank_dim decay_low_rank_dim time_step_rank",
    3: "linear_conv_kernel_dim mamba_d_conv conv_kernel conv_L_cache",
    128: (
        "max_position_embeddings n_positions n_ctx block_size model_max_length vocab_size "
        "vocab_size_per_layer_input"
    ),
    1e-05: (
        "rms_norm_eps layer_norm_epsilon layer_norm_eps norm_eps layernorm_epsilon post_norm_eps"
    ),
    10000.0: "rope_theta rotary_emb_base swa_rope_theta",
    0.5: "partial_rotary_factor rotary_pct",
}
SIZES = {
    **{name: value for value, names in _NAMES.items() for name in names.split()},
    **dict.fromkeys("routed_scaling_factor logits_scaling attention_multiplier".split(), 1.0),
    **dict.fromkeys("embedding_multiplier residual_multiplier scale_depth scale_emb".split(), 1.0),
    **dict.fromkeys("norm_topk_prob use_qk_norm qk_norm post_norm".split(), True),
    **dict.fromkeys("attention_bias mlp_bias use_bias conv_bias use_conv_bias".split(), False),
    **dict.fromkeys("tie_word_embeddings mamba_proj_bias use_qkv_bias".split(), False),
    "use_expert_bias": False,
    "mlp_only_layers": [],
    "layer_types": ["sliding_attention", "full_attention"],
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "logits_soft_cap": 30.0,
    "final_logit_softcapping": 30.0,
    "time_step_limit": [0.001, 10.0],
}

_ROPES = {
    kind: {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}
    for kind in ("full_attention", "sliding_attention")
}
_YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 2.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

_SLIDING = {
    **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2},
    **dict.fromkeys(("swa_head_dim", "swa_v_head_dim"), 16),
}

# What a family needs besides; `text` names the family of its text_config.
SPECIAL = {
    "afm7": {"num_kv_reuse_layers": 1},
    "baichuan_m1": {"sliding_window_layers": [0]},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": _YARN},
    "exaone4": {"sliding_window_pattern": "LG", "rope_scaling": None},
    "exaone_moe": {"is_moe_layer": [False, True]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gear": {"layer_types": ["conv", "full_attention"]},
    "gemma3": {"text": "gemma3_text"},
    "gemma3n": {
        "num_hidden_layers": 3,
        "num_kv_shared_layers": 1,
        "rope_local_base_freq": 10000.0,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "activation_sparsity_pattern": [0.5, 0.0, 0.0],
        "hidden_size_per_layer_input": 32,
        "altup_num_inputs": 2,
        "altup_coef_clip": 1.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 32,
    },
    "gemma4": {"text": "gemma4_text"},
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 32,
        "enable_moe_block": True,
    },
    "glm4_moe": {"rope_scaling": None},
    "glm_moe_dsa": {"rope_parameters": {"rope_theta": 10000.0}},
    "gpt_neox": {"num_key_value_heads": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan": {
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k25": {"text": "deepseek_v3"},
    "kimi_k3": {
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 32,
            "kda_layers": [1],
            "short_conv_kernel_size": 3,
        },
        "activation_situ_beta": 1.0,
        "routed_expert_hidden_size": 32,
    },
    "kimi_vl": {"text": "deepseek_v3"},
    "kimi_linear": {"linear_attn_config": {"num_heads": 4, "head_dim": 32, "kda_layers": [1]}},
    "lfm2-vl": {"text": "lfm2"},
    "lfm2": {
        "layer_types": ["conv", "full_attention"],
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4": {
        "num_hidden_layers": 4,
        "num_experts_per_tok": 1,
        "rope_scaling": None,
        "attention_chunk_size": 4,
        "interleave_moe_layer_step": 2,
    },
    "llama4_text": {"no_rope_layers": [1, 0]},
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "longcat_flash_ngram": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    "mellum": {"rope_parameters": _ROPES},
    "minicpm3": {
        "rope_scaling": {
            "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
        }
    },
    "minimax_m3_vl": {"mlp_layer_types": ["dense", "sparse"], "moe_layer_freq": None},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        **_SLIDING,
    },
    "ministral3": {"rope_parameters": _YARN},
    "mistral3": {"text": "ministral3"},
    "mistral4": {"rope_parameters": _YARN},
    "muse_spark": {
        "rope_parameters": {"rope_theta": 10000.0},
        "layer_rope_theta": [10000.0, 0.0],
        "output_multiplier": 1.0,
        "num_shared_experts": 0,
    },
    "nemotron": {"hidden_act": "relu2"},
    "nemotron_h": {"hybrid_override_pattern": ["*", "M", "-", "E"], "num_hidden_layers": 4},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"replace_with_linear": True}, "ffn": {"replace_with_linear": True}},
        ]
    },
    "olmo_hybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_allow_neg_eigval": True,
    },
    "openelm": {
        "num_transformer_layers": 2,
        "ffn_dim_divisor": 32,
        "num_query_heads": [4, 4],
        "num_kv_heads": [2, 2],
        "ffn_multipliers": [1.0, 1.5],
    },
    "phi3small": {"dense_attention_every_n_layers": 2, "gegelu_limit": 20.0, "vocab_size": 100352},
    "pixtral": {"text": "llama"},
    "plamo": {"n_shared_head": 2},
    "prism_hadamard_qwen35": {
        "text": "qwen3_5",
        "hidden_size": 128,
        "head_dim": 32,
        "intermediate_size": 128,
        "linear_value_head_dim": 64,
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": f"model.layers.{block}", "embedding": False, "dtype": "float16", "block": 0}
            for block in (
                *(f"0.linear_attn.in_proj_{part}" for part in ("qkv", "z", "a", "b")),
                "0.linear_attn.out_proj",
                *(f"1.self_attn.{part}_proj" for part in "qkvo"),
                *(f"{i}.mlp.{part}_proj" for i in (0, 1) for part in ("gate", "up", "down")),
            )
        ],
    },
    "qwen": {"intermediate_size": 192},
    "qwen2_vl": {"text": "qwen2"},
    "qwen3_5": {"num_experts": 0},
    "qwen3_5_moe": {"text": "qwen3_5", "num_experts": 4},
    "qwen3_vl": {"text": "qwen3"},
    "qwen3_vl_moe": {"text": "qwen3_moe"},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "spark2_5": {"rope_parameters": _ROPES},
}


# Language models that only mlx-vlm has, and what they need besides `SIZES`.
OF_MLX_VLM: dict[str, dict] = {
    "cohere2_moe": {},
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "o_groups": 2,
        "compress_ratios": [0, 4],
        "num_hash_layers": 1,
        "index_n_heads": 4,
    },
    "glm5_next": {
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 0,
        "layer_types": ["linear_attention", "deepseek_sparse_attention"],
        "linear_head_dim": 32,
        "linear_num_heads": 2,
    },
    "hy_v4": {},
    "k2_horizon": {},
    "kolibri1": {},
    "mimo_v2": {
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        **_SLIDING,
    },
    "minimax_m3": {"moe_layer_freq": [0, 1]},
    "mistral_large3": {},
    "qwen4_exp": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
        "rope_parameters": {
            "type": "default",
            "mrope_section": [2, 1, 1],
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "step3p7": {"moe_layers_enum": [1]},
    "xing4_0": {},
    "z1t": {},
}


# Families whose blocks have several caches each, so that no prefix is shared.
SEVERAL_CACHES = (
    "baichuan_m1 deepseek_v32 falcon_h1 glm_moe_dsa longcat_flash longcat_flash_ngram minimax_m3_vl"
).split()
# Families of which a common prefix that is computed once gives something else, and why.
NOT_SHARED = {
    "gear": "its attention gets the cache of a convolution, in mlx-lm too",
    "gemma3n": "with a cache its last blocks use keys of earlier ones, without one their own",
    "phi3small": "its mask is right only if the keys are whole blocks",
}
NOT_SHARED_RECOMPUTED = {"afm7": "its last blocks read the keys of one that is recomputed"}


@cache
def architectures() -> dict[str, ModuleType | None]:
    """The modules of mlx-lm's models that are architectures, by name; None if not importable."""
    from mlx_lm import models

    result = {}
    for info in sorted(pkgutil.iter_modules(models.__path__), key=lambda info: info.name):
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # olmo prints what it misses
                module = importlib.import_module(f"mlx_lm.models.{info.name}")
        except SystemExit:  # olmo ends the program where ai2-olmo is missing
            result[info.name] = None
            continue
        if hasattr(module, "Model") and hasattr(module, "ModelArgs"):
            result[info.name] = module
    return result


def _fields(module) -> set[str]:
    """The fields of every dataclass in a module that describes a language model."""
    kinds = [
        v
        for k, v in vars(module).items()
        if k.endswith(("Args", "TextConfig")) and "Vision" not in k
    ]
    return {
        f.name for kind in kinds if dataclasses.is_dataclass(kind) for f in dataclasses.fields(kind)
    }


def config_of(family: str) -> dict:
    """A small config of a family, as its config.json would have it."""
    if family in OF_MLX_VLM:
        return _config_of_mlx_vlm(family)

    special = dict(SPECIAL.get(family, {}))
    text = special.pop("text", family)
    inside = {key: value for key, value in SPECIAL.get(text, {}).items() if key != "text"}
    fields = _fields(architectures()[text])
    filled = {key: value for key, value in SIZES.items() if key in fields}
    filled |= {"model_type": text} | inside | special
    own = _fields(architectures()[family])
    if "text_config" not in own:
        return filled
    outside = {key: value for key, value in special.items() if key in own and text != family}
    return {"model_type": family, "vocab_size": 128, "text_config": filled} | outside


def _config_of_mlx_vlm(family: str) -> dict:
    module = importlib.import_module(f"mlx_vlm.models.{family}")
    special = OF_MLX_VLM[family]

    def filled(kind: type) -> dict:
        names = {field.name for field in dataclasses.fields(kind)}
        return {key: value for key, value in (SIZES | special).items() if key in names}

    own = filled(module.ModelConfig)
    if hasattr(module, "TextConfig"):
        own["text_config"] = filled(module.TextConfig) | {"model_type": family}
    return {**own, "model_type": family}


def _not_zero(array: mx.array) -> mx.array:
    """A part that starts at zero would keep gradients from reaching what is before it."""
    zero = mx.issubdtype(array.dtype, mx.floating) and array.size and not mx.any(array).item()
    return 0.3 * mx.random.normal(array.shape) if zero else array


def build(family: str, config: dict | None = None):
    """A small random model of a family, frozen, in float32, and its config.

    Raises: whatever mlx-lm or mlx-vlm raises, or ValueError if a size was not filled in.
    """
    config = config or config_of(family)
    make, arguments = classes_of(config)
    mx.random.seed(3)
    model = make(arguments.from_dict(copy.deepcopy(config)))
    if (size := sum(a.nbytes for _, a in tree_flatten(model.parameters()))) > LARGEST:
        raise ValueError(f"{family}: {size / 1e6:.0f} MB: fill in the field that makes it large.")
    model.update(tree_map(_not_zero, model.parameters()))
    model.freeze()
    model.eval()
    mx.eval(model.parameters())
    return model, config


def family_base(family: str, bits: int | None = None) -> Base:
    """A base without tokenizer around a small model; packed weights where their width allows."""
    model, config = build(family)
    if bits:
        nn.quantize(model, 32, bits, class_predicate=_can_be_packed)
        model.freeze()
    return Base(family, Path("nowhere"), model, None, config, "0" * 64)


def _can_be_packed(path: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def expert_paths(model: nn.Module) -> list[str]:
    """Paths of the switch linears."""
    return [path for path, module in linears(model) if is_switch_linear(module)]


def randomized(attached: Attached) -> dict[str, mx.array]:
    """Give every adapter values that matter, B included; as they lie on disk."""
    for place in attached.places.values():
        for arrays in (place.lora.lora_a, place.lora.lora_b):
            arrays[:] = [mx.random.normal(t.shape) * 0.1 for t in arrays]
    return attached.tensors()


def targets_of(base: Base, rank: int) -> tuple[str, ...]:
    """The default projections and the experts."""
    attached = attach(base, LoRAConfig(rank=rank))
    paths = (*attached.specs, *expert_paths(base.model))
    attached.detach()
    return paths


def _row(family: str) -> str:
    """The line of a family in the table."""
    if reason := UNTRAINABLE.get(family):
        return f"| {family} | not supported | {reason} | |"
    base = family_base(family)
    attached: Attached = attach(base, LoRAConfig(rank=2))
    grouped = any(group.block for group in attached.groups)
    attached.detach()
    leaves = dict.fromkeys(path.rpartition(".")[2] for path in attached.specs)
    experts = dict.fromkeys(path.rpartition(".")[2] for path in expert_paths(base.model))
    how = "grouped" if grouped else "per projection"
    how += ", MoE" if experts else ""
    how += " (not on Metal)" if facts_of(family).untrainable_on_metal else ""
    return f"| {family} | {how} | {', '.join(leaves)} | {', '.join(experts)} |"


# Models by the names of the Hub, and the `model_type` of their config.json.
KNOWN = {
    "Qwen3 (0.6B to 32B), DeepSeek-R1-0528-Qwen3-8B": "qwen3",
    "Qwen3-30B-A3B and other mixtures of Qwen3": "qwen3_moe",
    "Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen": "qwen2",
    "Llama 2, 3, 3.1, 3.2, 3.3 (text), DeepSeek-R1-Distill-Llama, SmolLM2, Yi": "llama",
    "Gemma 3 270M and 1B": "gemma3_text",
    "Gemma 3 4B, 12B and 27B": "gemma3",
    "Gemma 2": "gemma2",
    "Mistral 7B, Mistral Nemo, Mistral Small 24B (text)": "mistral",
    "Mistral Small 3.1 and later": "mistral3",
    "Mixtral": "mixtral",
    "Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini": "phi3",
    "SmolLM3": "smollm3",
    "gpt-oss": "gpt_oss",
    "Granite 3": "granite",
    "OLMo 2": "olmo2",
    "DeepSeek V3 and R1 (671B)": "deepseek_v3",
}


def known() -> list[str]:
    """The lines of the models that people ask for; each is an architecture that trains."""
    from mlx_lm.utils import MODEL_REMAPPING

    lines = []
    for names, model_type in KNOWN.items():
        family = MODEL_REMAPPING.get(model_type, model_type)
        assert family in architectures() and family not in UNTRAINABLE, model_type
        lines.append(f"| {names} | `{model_type}` | yes |")
    return lines


def tables() -> dict[str, list[str]]:
    """The rows of the tables in docs/families.md for the installed mlx-lm, by the line of headings."""
    return {
        "| model | `model_type` | trains |": known(),
        "| family | kind | adapters by default, or the reason | experts, if named |": [
            _row(family) for family in architectures()
        ],
        "| family | language model, of mlx-lm | tokens of an image see each other |": [
            _image_row(family) for family in VISION_FAMILIES
        ],
    }


def facts() -> Iterator[str]:
    """Parts of the page's sentences that follow from the installed mlx-lm and from lists here."""
    from mlx_lm.utils import MODEL_REMAPPING

    count, refused = len(architectures()), len(UNTRAINABLE.keys() & architectures().keys())
    yield f"The {count} architectures of mlx-lm {metadata.version('mlx-lm')}: `packs train` works on "
    yield f" works on {count - refused}, {refused} cannot be trained."

    others = {name: reason for name, reason in UNTRAINABLE.items() if name not in architectures()}
    for reasons in (NOT_SHARED, NOT_SHARED_RECOMPUTED, others):
        yield "; ".join(f"{family} ({reason})" for family, reason in reasons.items())
    for names in (sorted(ONE_BY_ONE), SEVERAL_CACHES, OF_MLX_VLM):
        yield ", ".join(names)
    for family, each in FAMILIES.items():
        if reason := each.untrainable_on_metal:
            yield f"- Not on Metal: `{family}`: {reason}. A CPU or CUDA trains it."
    yield ", ".join(f"`{name}` as `{of}`" for name, of in sorted(MODEL_REMAPPING.items()))


def page(text: str) -> str:
    """docs/families.md with the rows of its tables made anew."""
    for headings, rows in tables().items():
        lines = re.escape(headings) + r"\n(\|[-|]+\|\n)(?:\|.*\n)*"
        text = re.sub(
            lines, lambda m, h=headings, r=rows: "\n".join([h, m[1] + r[0], *r[1:], ""]), text
        )
    return text


def _image_row(family: str) -> str:
    """The line of a family that takes images."""
    from mlx_lm.utils import MODEL_REMAPPING

    text = FAMILIES[family].text_model or MODEL_REMAPPING.get(family, family)
    sees = {"none": "no", "all": "yes", "config": "if `use_bidirectional_attention` is `vision`"}
    return f"| {family} | {text} | {sees[VISION_FAMILIES[family].sees]} |"


if __name__ == "__main__":
    written = page(DOCS.read_text())
    DOCS.write_text(written)
    print(*(f"missing: {fact}" for fact in facts() if fact not in written), sep="\n")
