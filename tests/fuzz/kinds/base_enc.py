"""The folder of an encoder, as sentence-transformers saves it."""

from pathlib import Path

from mlx_packs import load_base
from tests.fuzz.kind import SUBJECT, Call, Case, Kind, command, library
from tests.helpers.encoders import all_pairs, write_encoder, write_pairs

FILES = {
    "config.json": 5,
    "modules.json": 3,
    "1_Pooling/config.json": 3,
    "sentence_bert_config.json": 2,
    "tokenizer_config.json": 2,
    "config_sentence_transformers.json": 1,
    "vocab.txt": 1,
    "model.safetensors": 4,
}
PROMPTS = (
    b'{"prompts": {"query": "q: "}, "default_prompt_name": null, "similarity_fn_name": "cosine"}'
)


def load() -> None:
    """Load the encoder with its tokenizer."""
    load_base(SUBJECT, lazy=True)


class BaseEnc(Kind):
    """An encoder."""

    name = "base-enc"
    words = (
        "bert",
        "qwen3",
        "mean",
        "cls",
        "max",
        "Pooling",
        "Transformer",
        "Normalize",
        "Dense",
        "pooling_mode",
    )

    def make(self, folder: Path) -> None:
        """Write a small encoder."""
        write_encoder(folder)
        (folder / "config_sentence_transformers.json").write_bytes(PROMPTS)
        write_pairs(folder.with_name("data"), all_pairs()[:30], held_out=10)

    def mutate(self, case: Case) -> None:
        """Change one of its files."""
        name = case.rng.choices(list(FILES), list(FILES.values()))[0]
        if case.rng.random() < 0.03:
            case.replace(name)
        elif name.endswith(".txt"):
            case.edit(name, case.mutator.bytes)
        else:
            case.edit(
                name, case.mutator.json if name.endswith(".json") else case.mutator.safetensors
            )

    def cheap(self) -> list[Call]:
        """Return the plan, and loading it."""
        plan = command("plan", "--model", SUBJECT, "--task", "embedding", "--memory", "1")
        return [plan, library(load, "load_base")]

    def whole(self) -> list[Call]:
        """Return a short training."""
        args = "--task embedding --data data --iters 1 --batch-size 2 --out out/p -q"
        return [command("train", "--model", SUBJECT, *args.split())]
