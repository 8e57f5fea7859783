"""Formats of other backends are rejected in one line that names an alternative."""

from pathlib import Path

import pytest

from mlx_packs import load_base
from mlx_packs.inference.generate import complete, complete_batch
from tests.bases.changes import set_keys
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.errors import check, raises
from tests.helpers.rows import chat, write_rows

DENSE = "--quantize nf4 (or affine4), or one in MLX's 4 bits"
SAFE = "Use the safetensors of the same model"


@pytest.fixture
def llama_folder(tmp_path) -> Path:
    return write_checkpoint(tmp_path / "base", "llama")


def check_unsupported(code: str, names: tuple[str, ...], load, *args) -> None:
    """Assert that loading fails in one line with this code, which names these."""
    with raises(code, None, *names) as error:
        load(*args)
    assert "\n" not in error.value.message and len(error.value.message) < 700


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("model-q4_k_m.gguf", ("GGUF", "--model")),
        ("pytorch_model.bin", ("PyTorch", SAFE)),
        ("consolidated.safetensors", ("Mistral", "model*.safetensors")),
        ("weights.npz", ("an old MLX", "mlx_lm.convert")),
        ("model.onnx", ("ONNX", DENSE)),
        ("adapter_config.json", ("`packs import",)),
        ("pack.json", ("as PACK",)),
    ],
)
def test_a_folder_of_other_weights(llama_folder, file, names):
    (llama_folder / "model.safetensors").rename(llama_folder / file)
    if file == "model.onnx":  # a file by itself
        check_unsupported("unsupported", names, load_base, llama_folder / file)
    names = (str(llama_folder), "model*.safetensors", *names)
    check_unsupported("unsupported", names, load_base, llama_folder)
    (llama_folder / "config.json").unlink()
    names = (str(llama_folder), "config.json", *names[2:])
    check_unsupported("not-found", names, load_base, llama_folder)


def test_weights_quantized_for_another_backend_and_another_architecture(llama_folder):
    config = {"quant_method": "gptq", "group_size": 128}
    set_keys(llama_folder / "config.json", quantization_config=config)
    check_unsupported("unsupported", (str(llama_folder), "gptq", DENSE), load_base, llama_folder)
    set_keys(llama_folder / "config.json", quantization_config=None, model_type="made_up")
    check_unsupported("unsupported", ("made_up", "docs/families.md"), load_base, llama_folder)


def test_a_sentencepiece_file_alone_names_what_is_read(llama_folder, capfd):
    (llama_folder / "tokenizer.json").unlink()
    (llama_folder / "tokenizer.model").write_bytes(b"no sentencepiece")
    set_keys(llama_folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    check_unsupported("unsupported", ("tokenizer.model", "tokenizer.json"), load_base, llama_folder)
    assert capfd.readouterr().err == ""


def test_tokenizer_of_a_larger_vocabulary_is_rejected_first(tmp_path):
    base = load_base(write_checkpoint(tmp_path / "base", "llama", vocab_size=500))
    beyond = max(
        base.tokenizer.encode("Of whom the world was not worthy", add_special_tokens=False)
    )
    assert beyond >= 500
    for generate in (lambda: complete(base, [3, beyond]), lambda: complete_batch(base, [[beyond]])):
        with raises("mismatch", None, base.name, str(beyond), "500"):
            generate()


def test_rows_of_a_larger_vocabulary_and_chats_without_template(llama_folder, tmp_path, run):
    data = write_rows(tmp_path / "d", train=[chat("Say hi.", "Hi.")] * 4, valid=[chat("A", "B")])
    small = write_checkpoint(tmp_path / "small", "llama", vocab_size=500)
    train = ("train", "--data", data, "--iters", 1, "--out", tmp_path / "o", "--model")
    assert run(*train, small)[0] == 2
    check(run.error, "mismatch", None, "500")
    (llama_folder / "chat_template.jinja").unlink()
    code, _, _ = run(*train, llama_folder)
    assert code == 2 and "chat template" in run.error.message and "'text'" in run.error.message
    assert not (tmp_path / "o").exists()
