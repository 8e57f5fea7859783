"""A merged base with a score head, as transformers' ``...ForSequenceClassification`` reads it."""

import re
from dataclasses import replace
from typing import Any

from ..adapters.spec import SCORE_WEIGHT
from ..bases.write_plan import Item, WritePlan, in_shards
from ..errors import PackError
from ..packs.pack import Pack
from ..runtime import mx
from .merge_plan import MergeRequest

# Families of which transformers has such a class, with the names of their modules as mlx-lm has.
FAMILIES = (
    "gemma gemma3_text glm4 gpt2 helium llama mistral mixtral olmo2 phi phi3 qwen2 qwen2_moe qwen3 "
    "qwen3_moe smollm3 stablelm starcoder2"
).split()
_LM_HEAD = re.compile(r"lm_head\..+")
_CLASS = re.compile(r"(ForCausalLM|LMHeadModel|Model)$")


def check_mergeable(request: MergeRequest) -> None:
    """Raise a PackError for a base with a head that transformers would not open."""
    model_type = request.pack.manifest["base"]["model_type"]

    if request.requantize != "none":
        raise PackError(
            f"--requantize {request.requantize}: {request.pack.name} has a score head, and is "
            "written for transformers, which does not read it. Leave it out.",
            "unsupported",
        )

    if model_type not in FAMILIES:
        raise PackError(
            f"{request.pack.name}: has a score head, and transformers has no class for a "
            f"{model_type} with one. Known are {', '.join(FAMILIES)}.",
            "unsupported",
        )


def with_head(plan: WritePlan, pack: Pack, tokenizer: Any, max_shard_gb: float) -> WritePlan:
    """Return a plan with the head of a pack in the place of the LM head."""
    kept = [item for item in plan.items if not _LM_HEAD.fullmatch(item.name)]
    dtype = next(tensor.dtype for name, tensor in plan.tensors.items() if "embed" in name)
    head = pack.load_tensors()[SCORE_WEIGHT].astype(dtype)
    item = Item.of(SCORE_WEIGHT, head, None, plan.options.layout)

    return replace(
        plan,
        tensors={**plan.tensors, SCORE_WEIGHT: head},
        shards=in_shards([*kept, item], max_shard_gb),
        config=_config(plan.config, head, tokenizer),
    )


def _config(config: dict, head: mx.array, tokenizer: Any) -> dict:
    """Return config.json with the class and its labels; the token after the last one is padding."""
    labels = [f"LABEL_{i}" for i in range(head.shape[0])]
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = tokenizer.eos_token_id

    return {
        **config,
        "architectures": [
            _CLASS.sub("ForSequenceClassification", name)
            for name in config.get("architectures") or ()
        ],
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
        "pad_token_id": pad,
    }
