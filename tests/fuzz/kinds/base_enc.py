"""The folder of an encoder, as sentence-transformers saves it."""

from mlx_packs import load_base
from tests.fuzz.kind import SUBJECT, Kind, command, library
from tests.helpers.encoders import all_pairs, write_encoder, write_pairs

SENTENCES = "config_sentence_transformers.json"
PROMPTS = (
    b'{"prompts": {"query": "q: "}, "default_prompt_name": null, "similarity_fn_name": "cosine"}'
)


class BaseEnc(Kind):
    """An encoder."""

    name = "base-enc"
    words = "bert qwen3 mean cls max Pooling Transformer Normalize Dense pooling_mode".split()
    parts = {"config.json": 5, "modules.json": 3, "1_Pooling/config.json": 3, "vocab.txt": 1}
    parts |= {"sentence_bert_config.json": 2, "tokenizer_config.json": 2, SENTENCES: 1}
    parts |= {"model.safetensors": 4}

    def make(self, folder):
        write_encoder(folder)
        (folder / SENTENCES).write_bytes(PROMPTS)
        write_pairs(folder.with_name("data"), all_pairs()[:30], held_out=10)

    def cheap(self):
        plan = command("plan", "--model", SUBJECT, "--task", "embedding", "--memory", "1")
        return [plan, library(lambda: load_base(SUBJECT, lazy=True), "load_base")]

    def whole(self):
        args = "--task embedding --data data --iters 1 --batch-size 2 --out out/p -q"
        return [command("train", "--model", SUBJECT, *args.split())]
