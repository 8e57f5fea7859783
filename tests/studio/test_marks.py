"""The marked texts are the targets of a run, for all chat templates of the tests."""

import json

import pytest

from mlx_packs.config.data import CHAT_TEMPLATES
from mlx_packs.config.schema import DataConfig
from mlx_packs.data.batches import TokenCollate
from mlx_packs.data.encoding import EncodingOptions, encode
from mlx_packs.data.formats import Row
from mlx_packs.data.token_store import readable_text
from tests.bases import test_turns as turns
from tests.bases.changes import set_keys
from tests.helpers.bases import copy_tiny
from tests.helpers.rows import write_rows

pytestmark = pytest.mark.slow

NAMES = ("PLAIN", "OPEN", "EMPTY_THOUGHT", "CALLS", "NO_PROMPT", "INST", "PARTS")
TEMPLATES = {"of the bundled model": None, **CHAT_TEMPLATES}
TEMPLATES |= {name: getattr(turns, name) for name in NAMES} | dict.fromkeys(turns.FAMILIES)
ONE = {"prompt": "Say <b>blue</b>.", "completion": "blue <i>é</i> 🙂"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_marked_tokens_are_the_targets_of_a_batch(tmp_path, run, name):
    folder = copy_tiny(tmp_path / "base")
    if name in turns.FAMILIES:
        tokenizer = turns.of_family(folder, name)
    else:
        tokenizer = turns.loaded(folder, TEMPLATES[name])
    rows = (
        [ONE] * 2 if name == "plain" else [{"messages": turns.TURNS}, {"messages": turns.TURNS[:2]}]
    )
    set_keys(
        folder / "config.json", vocab_size=5000
    )  # of a base that has the marks of all families
    data = write_rows(tmp_path / "data", train=rows, valid=rows[:1])

    code, out, err = run("train", "--model", folder, "--data", data, "--show-mask", "--json")
    assert code == 0, err
    examples = encode(
        [Row("r", row) for row in rows], tokenizer, DataConfig(), EncodingOptions()
    ).items
    for shown, example in zip(json.loads(out)["examples"], examples, strict=True):
        batch = TokenCollate(1, len(example.tokens))([example], [0])
        targets = batch.inputs["targets"][: batch.targets].tolist()
        marked = [span["text"] for span in shown["spans"] if span["learned"]]
        assert shown["learned"] == batch.targets and "blue" in marked[0]
        assert "".join(marked) == readable_text(tokenizer, targets)
    print(f"{name}: {sum(len(e.target) for e in examples)} tokens")
