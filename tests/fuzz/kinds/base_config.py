"""The config.json of a base."""

import json
from pathlib import Path

from mlx_packs.config.choices import ARCHITECTURES
from tests.fuzz.checkpoints import CheckpointKind
from tests.fuzz.kind import Case
from tests.fuzz.subjects import write_base

MORE = {
    "quantization": {"group_size": 32, "bits": 4, "mode": "affine"},
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "text_config": {"vocab_size": 307, "model_type": "qwen3"},
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "torch_dtype": "bfloat16",
    "dtype": "float32",
    "model_file": "model.py",
    "auto_map": {"AutoModelForCausalLM": "model.Model", "AutoTokenizer": "model.Tokenizer"},
    "architectures": ["Qwen3ForCausalLM"],
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 16,
}
FAMILIES = (
    "llama gemma2 gemma3_text phi3 gpt2 qwen2 qwen3_moe mixtral mamba qwen3_next olmo2 deepseek_v3"
)


class BaseConfig(CheckpointKind):
    """A checkpoint whose config.json is mutated."""

    name = "base-config"
    words = (*MORE, *FAMILIES.split(), *ARCHITECTURES, "num_hidden_layers", "hidden_size", "bert")

    def make(self, folder: Path) -> None:
        """Write a dense base."""
        write_base(folder)

    def mutate(self, case: Case) -> None:
        """Change values of config.json, of those that are there or of those that may be."""
        file, rng = "config.json", case.rng
        if rng.random() < 0.03:
            return case.replace(file)
        config = json.loads(case.files[file])
        for key in rng.sample(list(MORE), rng.choice((0, 0, 1, 2))):
            config[key] = MORE[key]
        if rng.random() < 0.15:
            config["model_type"] = rng.choice(FAMILIES.split())
        case.mutator.note(file)
        return case.write(file, case.mutator.json(json.dumps(config).encode()))
