"""The tokenizer and the chat template of a base."""

from pathlib import Path

from mlx_packs.bases.files import check_files
from mlx_packs.bases.tokenizer import load_tokenizer
from mlx_packs.sandbox import process
from tests.fuzz.kind import SUBJECT, Kind, command, library
from tests.fuzz.kinds.checkpoints import GENERATE
from tests.fuzz.subjects import ORDINARY, write_base, write_chats

TEMPLATES = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 600000000 }}",
    "{{ 9 ** 99999999 }}",
    "{% if %}",
    "{{ nothing.there }}",
    "{{ raise_exception('no \x1b]0;owned\x07') }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages[99].content }}",
    "{{ '\x1b[31m' }}{{ messages[0].content }}\u202e",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ range(10**12) | list }}",
    "{{ ('a,' * 9999999).split(',') | join('b' * 9999) }}",
    "",
)
CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
SPECIAL = "special_tokens_map.json"
TOKENS = b'{"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>", "lstrip": false}}'
MORE = {
    "auto_map": {"AutoTokenizer": ["x.T", None]},
    "chat_template": "{{ messages }}",
    "chat_template_type": "x",
    "tool_parser_type": "json_tools",
    "vocab_file": "/dev/zero",
    "added_tokens_decoder": {"300": {"content": "x", "special": True}},
    "fix_mistral_regex": True,
}
CLASSES = "Qwen2Tokenizer LlamaTokenizer GPT2TokenizerFast BertTokenizer T5Tokenizer None"
CLASSES = [*CLASSES.split(), "TokenizersBackend"]


def load_it() -> None:
    config = {"eos_token_id": ORDINARY + 2, "model_type": "qwen3"}
    check_files(Path(SUBJECT))
    load_tokenizer(Path(SUBJECT), config, False)


class BaseTok(Kind):
    """A base whose tokenizer files are mutated."""

    name = "base-tok"
    words = (*"BPE WordPiece Unigram WordLevel Replace Prepend Metaspace Fuse".split(), *MORE)
    parts = {"tokenizer.json": 12, CONFIG: 8, TEMPLATE: 6, SPECIAL: 1, "generation_config.json": 1}

    def make(self, folder):
        write_base(folder)
        (folder / "generation_config.json").write_text(f'{{"eos_token_id": [{ORDINARY + 2}]}}')
        write_chats(folder.with_name("data"))
        self.seconds, process.CPU_S = process.CPU_S, 0.5

    def close(self):
        process.CPU_S = self.seconds

    def change(self, case, name):
        if name == CONFIG:
            one = case.rng.choice(list(MORE))
            return case.edit(name, **{one: MORE[one], "tokenizer_class": case.rng.choice(CLASSES)})
        if name == SPECIAL:
            return case.write(name, case.mutator.json(TOKENS))
        if name != TEMPLATE or case.rng.random() < 0.5:
            return case.edit(name)
        template = case.rng.choice(TEMPLATES)
        case.mutator.note(template)
        return case.write(name, template.encode())

    def cheap(self):
        mask = command("train", "--model", SUBJECT, "--data", "data", "--show-mask")
        return [library(load_it, "load_tokenizer"), mask]

    def whole(self):
        return [command(*(arg for arg in GENERATE if arg != "--raw"))]
