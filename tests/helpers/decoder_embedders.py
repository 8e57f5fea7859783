"""A small random Qwen3 in the folder layout of Qwen3-Embedding, as sentence-transformers reads it."""

import json
import shutil
from pathlib import Path

from mlx.utils import tree_flatten
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from mlx_packs.bases.files import TINY, resolve_checkpoint
from mlx_packs.data.rankings import INSTRUCTION
from mlx_packs.runtime import mx
from tests.helpers.encoders import write_modules
from tests.helpers.models import model_of

PROMPT = "Instruct: Find the same question\nQuery:"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "eos_token_id": 4091,
    "pad_token_id": 4089,
    "dtype": "float32",
}


def write_decoder(folder: Path, **changes: object) -> Path:
    """A dense Qwen3 of random weights with the tokenizer of the bundled base."""
    folder.mkdir(parents=True, exist_ok=True)
    model, config = model_of("qwen3", **(CONFIG | changes))
    tensors = {
        name: tensor * 4 if name.endswith("proj.weight") else tensor
        for name, tensor in tree_flatten(model.parameters())
    }
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    tiny = resolve_checkpoint(TINY)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny / name, folder / name)
    return folder


def write_embedder(
    folder: Path, pooling: str = "lasttoken", is_bare: bool = True, **changes: object
) -> Path:
    """A decoder with the module files of Qwen3-Embedding, whose tokenizer adds an end token.

    ``is_bare`` names its tensors as transformers saves a model without a head.
    """
    write_decoder(folder, **changes)
    if is_bare:
        tensors = mx.load(str(folder / "model.safetensors"))
        bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        mx.save_safetensors(str(folder / "model.safetensors"), bare, {"format": "pt"})

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = "<|endoftext|>"
    tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}",
        pair=f"$A $B:1 {end}:1",
        special_tokens=[(end, tokenizer.token_to_id(end))],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"padding_side": "left"}))

    write_modules(folder, pooling, 64)
    prompts = {"prompts": {"query": PROMPT, "document": ""}, "default_prompt_name": None}
    prompts["similarity_fn_name"] = "cosine"
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


_PAIR = """{%- if messages | selectattr("role", "equalto", "query") | list %}
{%- set query = (messages | selectattr("role", "equalto", "query") | first).content %}
{%- set document = (messages | selectattr("role", "equalto", "document") | first).content %}
{{- "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and " }}
{{- "the Instruct provided. Note that the answer can only be \\"yes\\" or \\"no\\".<|im_end|>\n" }}
{{- "<|im_start|>user\n<Instruct>: INSTRUCTION\n<Query>: " + query + "\n<Document>: " + document }}
{{- "<|im_end|>\n<|im_start|>assistant\n" }}
{%- else %}
"""


def write_reranker(folder: Path, **changes: object) -> Path:
    """A decoder whose tokenizer has yes and no, and whose template knows the roles of a pair.

    sentence-transformers renders a query and a document by these roles, as for Qwen3-Reranker.
    """
    write_decoder(folder, **({"vocab_size": 4160} | changes))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(folder / "tokenizer.json"))

    file = folder / "chat_template.jinja"
    pair = _PAIR.replace("INSTRUCTION", INSTRUCTION)
    file.write_text(pair + file.read_text().rstrip() + "\n{%- endif %}\n")
    return folder
