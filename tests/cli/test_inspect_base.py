"""`packs inspect` of base models: folders, GGUF files, names."""

import json
import shutil

from mlx_packs.bases.files import tiny_checkpoint
from tests.helpers.errors import check
from tests.helpers.gguf_base import write_gguf


def test_a_checkpoint_is_described(run):
    code, out, _ = run("inspect", "tiny")
    assert code == 0
    assert "tiny · qwen3 · 6 blocks · affine 4-bit g64 · 4.1 MB" in out
    assert "4,096 tokens · with a chat template · an answer ends with <|im_end|>" in out

    code, out, _ = run("inspect", "tiny", "--json")
    facts = json.loads(out)
    assert (code, facts["model_type"], facts["vocab_size"]) == (0, "qwen3", 4096)
    assert facts["has_chat_template"] and facts["answer_end"] == "<|im_end|>"


def test_a_gguf_file_is_described_with_its_own_fingerprint(run, here):
    file = write_gguf(tiny_checkpoint(), here / "model.gguf")
    code, out, _ = run("inspect", file, "--json")
    facts = json.loads(out)
    assert (code, facts["base"], facts["model_type"]) == (0, "model.gguf", "qwen3")
    assert facts["fingerprint"] != json.loads(run("inspect", "tiny", "--json")[1])["fingerprint"]


def test_an_encoder_has_no_chat_template(run, encoder):
    code, out, _ = run("inspect", encoder)
    assert code == 0 and "bert" in out and "template" not in out


def test_a_base_without_a_chat_template_says_so(run, here):
    folder = shutil.copytree(tiny_checkpoint(), here / "base")
    (folder / "chat_template.jinja").unlink()
    assert "no chat template" in run("inspect", folder)[1]


def test_what_is_neither_pack_nor_base_is_named(run, here):
    assert run("inspect", "nowhere")[:2] == (2, "")
    check(run.error, "not-found", None, "nowhere")
    assert run("inspect", "ollama:absent:1b")[:2] == (2, "")
    check(run.error, "not-found", None, "Ollama has no such model")
