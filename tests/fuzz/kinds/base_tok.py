"""The tokenizer and the chat template of a base."""

import json
from pathlib import Path

from mlx_packs.bases import chat_template
from mlx_packs.bases.files import check_files
from mlx_packs.bases.tokenizer import load_tokenizer
from tests.fuzz.checkpoints import GENERATE
from tests.fuzz.kind import SUBJECT, Call, Case, Kind, command, library
from tests.fuzz.subjects import ORDINARY, write_base, write_chats

TEMPLATES = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 600000000 }}",
    "{{ 'a' * 20000000000 }}",
    "{{ 9 ** 99999999 }}",
    "{{ 1 / 0 }}",
    "{% if %}",
    "{{ nothing.there }}",
    "{{ raise_exception('no \x1b]0;owned\x07') }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages[99].content }}",
    "{{ messages | map(attribute='role') | list | tojson }}",
    "{{ '\x1b[31m' }}{{ messages[0].content }}\u202e",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% include 'x' %}",
    "{{ cycler }}{{ lipsum() }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ 'x' | center(3000000000) }}",
    "{{ messages }}" * 3,
    "{{ [1] * 99999999999 }}",
    "{{ range(10**12) | list }}",
    "{{ ('a,' * 9999999).split(',') | join('b' * 9999) }}",
    "",
)
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
SPECIAL = '{"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>", "lstrip": false}}'
MORE = {
    "auto_map": {"AutoTokenizer": ["x.T", None]},
    "chat_template": "{{ messages }}",
    "chat_template_type": "x",
    "tool_parser_type": "json_tools",
    "tokenizer_file": "../elsewhere/file",
    "vocab_file": "/dev/zero",
    "added_tokens_decoder": {"300": {"content": "x", "special": True}},
    "bos_token": "<s>",
    "extra_special_tokens": {"image_token": "<i>"},
    "fix_mistral_regex": True,
}
CLASSES = "Qwen2Tokenizer LlamaTokenizer GPT2TokenizerFast BertTokenizer T5Tokenizer None TokenizersBackend"


def load_it() -> None:
    """Load the tokenizer."""
    config = {"eos_token_id": ORDINARY + 2, "model_type": "qwen3"}
    check_files(Path(SUBJECT))
    load_tokenizer(Path(SUBJECT), config, False)


class BaseTok(Kind):
    """A base whose tokenizer files are mutated."""

    name = "base-tok"
    words = (
        "BPE",
        "WordPiece",
        "Unigram",
        "WordLevel",
        "Replace",
        "Prepend",
        "Metaspace",
        "Fuse",
        *MORE,
    )

    def make(self, folder: Path) -> None:
        """Write a base."""
        write_base(folder)
        (folder / "generation_config.json").write_text(f'{{"eos_token_id": [{ORDINARY + 2}]}}')
        write_chats(folder.with_name("data"))
        self.seconds, chat_template.SECONDS = chat_template.SECONDS, 0.5

    def close(self) -> None:
        """Give templates their time again."""
        chat_template.SECONDS = self.seconds

    def mutate(self, case: Case) -> None:
        """Change one of the files."""
        name = case.rng.choices((*FILES, "special_tokens_map.json"), (6, 4, 3, 0.5, 0.5))[0]
        if case.rng.random() < 0.02:
            case.replace(name)
        elif name == "chat_template.jinja":
            template = case.rng.choice(TEMPLATES)
            case.mutator.note(template)
            if case.rng.random() < 0.5:
                return case.edit(name, case.mutator.bytes)
            case.write(name, template.encode())
        elif name == "special_tokens_map.json":
            case.write(name, case.mutator.json(SPECIAL.encode()))
        elif name == "tokenizer_config.json":
            config = json.loads(case.files[name])
            key = case.rng.choice(list(MORE))
            config |= {key: MORE[key], "tokenizer_class": case.rng.choice(CLASSES.split())}
            case.write(name, case.mutator.json(json.dumps(config).encode()))
        else:
            case.edit(name, case.mutator.json)
        return None

    def cheap(self) -> list[Call]:
        """Return loading it, and showing which tokens are trained on."""
        mask = command("train", "--model", SUBJECT, "--data", "data", "--show-mask")
        return [library(load_it, "load_tokenizer"), mask]

    def whole(self) -> list[Call]:
        """Return generating from a conversation."""
        return [command(*(arg for arg in GENERATE if arg != "--raw"))]
