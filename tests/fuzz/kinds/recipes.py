"""Configuration files: ours, mlx-lm's, PEFT's, QLoRA's and bitsandbytes'."""

import json

import yaml

from mlx_packs.cli.recipe import read_recipes, recipe_of
from tests.fuzz.kind import SUBJECT, Kind, command, library
from tests.fuzz.subjects import write_base, write_chats

OURS = {
    **{"model": "base", "data": "data", "num_layers": 1, "batch_size": 1, "iters": 1},
    **{"rank": 4, "alpha": 8.0, "dropout": 0.1, "target_modules": ["q_proj", "v_proj"]},
    **{"rank_pattern": {"q_proj": 2}, "learning_rate": 1e-4, "optimizer": "adamw", "seed": 3},
    **{"max_seq_length": 32, "max_grad_norm": 1.0, "packing": False, "recompute": "none"},
    "lr_schedule": {"name": "cosine_decay", "warmup": 2, "arguments": [1e-4, 10]},
    "optimizer_config": {"adamw": {"weight_decay": 0.1, "betas": [0.9, 0.99]}},
    "loss_on": "completion",
}
MLX_LM = {
    **{"fine_tune_type": "lora", "num_layers": 1, "iters": 1, "batch_size": 1, "train": True},
    "lora_parameters": {"keys": ["self_attn.q_proj"], "rank": 4, "scale": 2.0, "dropout": 0.0},
    "grad_checkpoint": False,
    "hf_dataset": {"path": "x/y", "prompt_feature": "a"},
}
PEFT = {
    **{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "bias": "none"},
    **{"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"},
}
PHASES = {
    "batch_size": 1,
    "phases": [
        {"name": "a", "data": "data", "iters": 1},
        {"name": "b", "data": "data", "iters": 1, "learning_rate": 1e-5, "replay": 0.5},
    ],
}
TRICKS = (
    "a: &a [1, 1]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b, *b, *b, *b, *b]\nd: &d [*c, *c, *c, *c, *c, *c]\nrank_pattern: [*d, *d, *d, *d, *d, *d, *d, *d, *d]",
    "rank: !!python/object/apply:os.system ['touch outside/evil']",
    "rank: &x [*x]",
    "rank: 0x7fffffffffffffffffff",
    "rank: 2026-01-01",
    "--- {rank: 2}\n--- {rank: 3}",
    "rank: !!binary aGk=",
    "!!set {rank}",
    "rank: .inf",
    "%YAML 9.9\n---\nrank: 1",
    'rank: "\\e]0;owned\\a"',
    '"\\e[31m": 1',
)


class YamlKind(Kind):
    """A configuration file of a run."""

    name = "yaml"
    words = (*OURS, *MLX_LM, *"phases quantize nf4 matmul_path cache_frozen task embedding".split())
    file = f"{SUBJECT}/ours.yaml"

    def make(self, folder):
        folder.mkdir()
        (folder / "ours.yaml").write_text(yaml.safe_dump(OURS))
        write_base(folder.with_name("base"))
        write_chats(folder.with_name("data"))

    def mutate(self, case):
        rng = case.rng
        tree = rng.choices((OURS, MLX_LM, PEFT, PHASES), (5, 3, 2, 2))[0]
        name = rng.choice(("ours.yaml", "ours.yaml", "ours.json"))
        self.file = f"{SUBJECT}/{name}"
        if rng.random() < 0.1:
            trick = rng.choice(TRICKS)
            case.mutator.note(trick)
            return case.write(name, trick.encode())
        if rng.random() < 0.2:
            return case.write(name, case.mutator.bytes(yaml.safe_dump(tree).encode()))
        return case.write(name, case.mutator.json(json.dumps(tree).encode()))

    def cheap(self):
        return [library(lambda: recipe_of({}, read_recipes([self.file])), f"recipe of {self.file}")]

    def whole(self):
        flags = ("-c", self.file, "--model", "base", "--data", "data")
        short = "--iters 1 --batch-size 1 --out out/p -q"
        return [
            command("plan", "-c", self.file, "--model", "base", "--memory", "1"),
            command("train", *flags, "--show-mask"),
            command("train", *flags, *short.split()),
        ]
