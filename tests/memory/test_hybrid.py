"""The plan of hybrid models and mixtures against measured peaks, and against the parameters that mlx-lm makes."""

import math

import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_packs import LoRAConfig, TrainConfig
from mlx_packs.adapters.attach import attach
from mlx_packs.data.encoding import Example
from mlx_packs.memory.decoder import describe
from mlx_packs.memory.decoder_sizes import language_model
from mlx_packs.memory.estimate import estimate
from mlx_packs.memory.headers import Headers
from mlx_packs.memory.plan import ERROR
from mlx_packs.memory.recommend import recommend
from tests.helpers import families
from tests.helpers.errors import raises
from tests.helpers.families import family_base
from tests.helpers.models import base_of_config
from tests.helpers.steps import make_batch
from tests.helpers.variants import slow_except
from tests.memory.measured import peak_of_step

# hidden and FFN (in a mixture the shared expert's), value heads, blocks
SHAPES = {"narrow": (128, 256, 4, 4), "wide": (192, 512, 8, 4), "mixture": (128, 64, 4, 4)}
VOCAB = 256


def config_of(family: str, hidden: int, ffn: int, value_heads: int, blocks: int) -> dict:
    config = families.config_of(family) | {"vocab_size": VOCAB}
    text = config.get("text_config", config)

    sizes = {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "shared_expert_intermediate_size": ffn,
        "moe_intermediate_size": 96,
        "num_hidden_layers": blocks,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": VOCAB,
        "linear_num_value_heads": value_heads,
        "full_attention_interval": 4,
        "layer_types": ["full_attention"] * blocks,  # of families without linear attention
    }

    text |= {name: size for name, size in sizes.items() if name in text}
    return config


MEASURED = [
    ("qwen3_5", "narrow", None, 1, 256, "none"),
    ("qwen3_5", "wide", None, 1, 128, "block"),
    ("qwen3_5_moe", "mixture", None, 1, 256, "none"),
    ("qwen3_moe", "mixture", 2, 1, 128, "none"),
]
MEASURED_SLOWLY = [
    ("qwen3_5", "wide", None, 1, 1024, "none"),
    ("qwen3_moe", "mixture", 8, 4, 128, "block"),
    ("qwen3_5_moe", "mixture", 8, 1, 256, "block"),
]


@pytest.mark.parametrize(
    ("family", "shape", "routed", "rows", "length", "recompute"),
    [*MEASURED, *slow_except(MEASURED_SLOWLY)],
)
def test_the_plan_is_within_its_error_of_the_measured_peak(
    family, shape, routed, rows, length, recompute
):
    """Of LoRA; a mixture computes the experts that a token is routed to, of 16."""
    config = config_of(family, *SHAPES[shape])
    if routed:
        experts = {"num_experts": 16, "num_experts_per_tok": routed}
        config.get("text_config", config).update(experts)
    base = base_of_config(config)
    lora = LoRAConfig(rank=4)
    train = TrainConfig(batch_size=rows, recompute=recompute, matmul_path="dense")
    planned = estimate(Headers.of(base), lora, train, [(length, rows * length)]).peak_bytes
    tokens = np.random.default_rng(0).integers(0, VOCAB, length + 1).astype(np.int32)
    examples = [Example(tokens, np.arange(length + 1) > 0, "row")] * rows
    batch = make_batch(examples, list(range(rows)), rows, length)
    assert planned == pytest.approx(peak_of_step(base, lora, train, batch), rel=ERROR)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe", "qwen3_next"])
def test_experts_that_loading_quantizes_count_so_whatever_their_names(family):
    config = config_of(family, 128, 64, 4, 2)
    dense = describe(config)
    stacked = {n: t for n, t in dense.items() if "switch_mlp" in n}
    assert len(stacked) == 6
    one_by_one = {n: t for n, t in dense.items() if n not in stacked} | {
        n.replace("switch_mlp", f"experts.{e}"): {**t, "shape": t["shape"][1:]}
        for n, t in stacked.items()
        for e in range(t["shape"][0])
    }
    plans = [
        estimate(Headers("base", config, tensors), LoRAConfig(rank=4), TrainConfig(quantize=form))
        for form in ("none", "affine4", "nf4")
        for tensors in (dense, one_by_one)
    ]
    assert plans[::2] == plans[1::2]

    none, affine, nf4 = (plan.base for plan in plans[::2])
    of_experts = sum(4 * math.prod(t["shape"]) for t in stacked.values())
    assert none > of_experts > affine and nf4 > of_experts


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_moe"])
def test_described_headers_are_those_of_the_model(family):
    config = config_of(family, *SHAPES["narrow"])
    base = base_of_config(config)
    own = {name: a.shape for name, a in tree_flatten(base.model.parameters())}
    assert {n: tuple(t["shape"]) for n, t in describe(config).items()} == own
    described = Headers("described", config, describe(config))
    names = language_model(Headers.of(base)).tensors.keys()
    assert names == language_model(described).tensors.keys()
    attached = attach(base, LoRAConfig(rank=8))
    plan = estimate(described, LoRAConfig(rank=8), TrainConfig(matmul_path="dense"))
    assert plan.adapter_weights == attached.parameter_count()


def test_parts_that_are_not_loaded_do_not_count():
    config = config_of("qwen3_5", *SHAPES["narrow"])
    tensors = describe(config)
    on_disk = {
        n.replace("language_model.model.", "model.language_model."): t for n, t in tensors.items()
    }
    extra = {"dtype": "BF16", "shape": [1 << 20]}
    on_disk |= {"model.visual.blocks.0.weight": extra, "mtp.layers.0.weight": extra}
    plans = [
        estimate(Headers("base", config, t), LoRAConfig(rank=4), TrainConfig())
        for t in (tensors, on_disk)
    ]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_moe"])
def test_training_experts_has_no_plan(family):
    config = config_of(family, *SHAPES["mixture"])
    options = recommend(Headers("base", config, describe(config)), int(1e9))
    assert options and all(option.method != "full" for option in options)
    headers = Headers.of(family_base(family))
    with raises("unsupported", None, "experts"):
        estimate(headers, LoRAConfig(rank=2, target_modules=("down_proj",)), TrainConfig())
    with raises("unsupported", None, "experts"):
        estimate(headers, LoRAConfig(), TrainConfig(method="full", matmul_path="dense"))
    dense = {**headers.config, "decoder_sparse_step": 2}
    with raises("unsupported", None, "some blocks"):
        estimate(Headers("base", dense, headers.tensors), LoRAConfig(rank=2), TrainConfig())
