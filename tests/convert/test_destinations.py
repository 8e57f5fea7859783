"""packs export --to gguf, ollama, lmstudio, swift: files, numbers read back, what is rejected."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlx_packs import Pack, load_base
from mlx_packs.adapters.lora import delta_of
from mlx_packs.bases.families import FAMILIES
from mlx_packs.cli.main import packs
from mlx_packs.convert import formats
from mlx_packs.convert.external import low_rank_delta, verify_numerically
from mlx_packs.convert.gguf import family_of, gguf_tensors, verify_gguf
from mlx_packs.convert.interop import export_pack, import_adapter
from mlx_packs.nn.frozen_weight import frozen_weight
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import attached_logits, logits, write_checkpoint
from tests.helpers.errors import raises
from tests.helpers.families import family_base
from tests.helpers.gguf_file import HEADS, KV_HEADS, write_tiny
from tests.helpers.packs import random_pack
from tests.helpers.swift import load_into
from tests.helpers.variants import slow_except

EXPERTS = ("switch_mlp.gate_proj",)
UNEVEN = {"rank": 4, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q_proj": 3.0}}


def pack_of(base, folder: Path, target_modules=(), **lora) -> Pack:
    return random_pack(base, targets=target_modules, **lora).save(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base") / "llama", "llama")


@pytest.fixture
def pack(llama, tmp_path) -> Pack:
    return pack_of(load_base(llama), tmp_path / "p", rank=4)


def deltas_in(file: Path) -> dict[str, np.ndarray]:
    """What llama.cpp adds to each weight [out, in]: alpha / ne[1] of lora_b, times B A."""
    tensors, metadata = mx.load(str(file), return_metadata=True)
    assert metadata["general.type"] == "adapter" and metadata["adapter.type"] == "lora"
    alpha = float(np.array(metadata["adapter.lora.alpha"]))
    arrays = {name: np.array(tensor, dtype=np.float64) for name, tensor in tensors.items()}
    names = [name.removesuffix(".lora_a") for name in arrays if name.endswith(".lora_a")]
    factors = {name: (arrays[f"{name}.lora_a"], arrays[f"{name}.lora_b"]) for name in names}
    return {name: alpha / a.shape[0] * b @ a for name, (a, b) in factors.items()}


def delta_in(pack: Pack, path: str) -> np.ndarray:
    return np.array(delta_of(pack.specs[path], pack.load_tensors()), dtype=np.float64)


def converted_by_llama_cpp(weights: np.ndarray, heads: int) -> np.ndarray:
    """The order of rows that llama.cpp's converter writes (`LlamaModel.permute`)."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


@pytest.mark.parametrize(
    "family",
    slow_except("qwen3 qwen2 gemma2 gemma3_text phi3 gpt2".split(), "qwen3", "phi3", "gpt2"),
)
def test_a_gguf_adds_what_the_pack_adds(family, tmp_path):
    pack = pack_of(family_base(family), tmp_path / "p", rank=4, alpha=3.0)
    report = export_pack(pack, "gguf", tmp_path / "out")
    deltas = deltas_in(tmp_path / "out" / "out.gguf")
    assert len(deltas) == len(pack.specs) == report["modules"] == report["tensors"] // 2
    names = FAMILIES[family].gguf_names
    for path in pack.specs:
        block, rest = re.search(r"\b(?:layers|h)\.(\d+)\.(.+)", path).groups()
        delta = deltas[f"blk.{block}.{names[rest]}.weight"]
        assert np.abs(delta - delta_in(pack, path)).max() < 1e-5


def test_llamas_queries_and_keys_are_in_the_order_of_gguf(llama, tmp_path):
    pack = pack_of(load_base(llama), tmp_path / "p", **UNEVEN)
    export_pack(pack, "gguf", tmp_path / "out")
    deltas = deltas_in(tmp_path / "out" / "out.gguf")
    for name, heads in (("q", 4), ("k", 2), ("v", 0)):
        expected = delta = delta_in(pack, f"model.layers.1.self_attn.{name}_proj")
        if heads:
            expected = converted_by_llama_cpp(delta, heads)
            assert np.abs(expected - delta).max() > 0.1
        assert np.abs(deltas[f"blk.1.attn_{name}.weight"] - expected).max() < 1e-5


def test_a_pack_of_a_gguf_adds_to_its_rows_in_the_order_of_that_file(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path / "cache"))
    stored = write_tiny(tmp_path / "m.gguf")
    base = load_base(tmp_path / "m.gguf")
    pack = pack_of(base, tmp_path / "p", rank=4)

    export_pack(pack, "gguf", tmp_path / "out")
    deltas = deltas_in(tmp_path / "out" / "out.gguf")
    modules = dict(base.model.named_modules())

    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        path = f"model.layers.1.self_attn.{name}_proj"
        adapted = np.array(frozen_weight(modules[path]).dense()) + delta_in(pack, path)
        in_file = stored[f"blk.1.attn_{name}"] + deltas[f"blk.1.attn_{name}.weight"]
        assert np.abs(in_file - converted_by_llama_cpp(adapted, heads)).max() < 1e-4
        assert np.abs(in_file - adapted).max() > 0.1


def test_a_wrong_number_in_the_file_is_noticed(pack, tmp_path):
    family = family_of(pack)
    tensors, alpha = gguf_tensors(pack, family)
    tensors["blk.0.attn_q.weight.lora_b"] = tensors["blk.0.attn_q.weight.lora_b"][::-1]
    metadata = {"adapter.lora.alpha": mx.array(alpha)}
    mx.save_gguf(str(tmp_path / "bad.gguf"), tensors, metadata)
    with raises("mismatch", None, "bad.gguf", "model.layers.0.self_attn.q_proj"):
        verify_gguf(pack, tmp_path / "bad.gguf", family)


@pytest.mark.parametrize("to", ["peft", "mlx-lm", "gguf", "swift"])
def test_the_report_has_what_was_verified(to, tmp_path):
    pack = pack_of(family_base("qwen3"), tmp_path / "p", **UNEVEN)  # whose scales are folded
    report = export_pack(pack, to, tmp_path / "out")
    verified = report["verified"]
    count = len(pack.specs)
    expected = {"tensors": 2 * count, "modules": count, "against": "the pack"}
    assert {name: verified[name] for name in expected} == expected
    assert 0 <= verified["largest_difference"] <= 1e-5

    path, spec = next(iter(pack.specs.items()))
    near = mx.array(delta_in(pack, path).T * (1 + 1e-6))
    theirs = {path: low_rank_delta(near, mx.eye(near.shape[1]), 1.0)}
    measured = verify_numerically({path: spec}, pack.load_tensors(), theirs, tmp_path)
    assert measured["largest_difference"] == pytest.approx(1e-6, rel=0.5)


@pytest.mark.parametrize("to", ["peft", "swift"])
def test_a_file_that_reads_back_other_numbers_is_not_kept(to, pack, tmp_path, monkeypatch):
    save = formats.save_folder

    def save_others(stored, folder, convention) -> None:
        name, tensor = next(iter(stored.tensors.items()))
        others = {**stored.tensors, name: tensor + 1}
        save(replace(stored, tensors=others), folder, convention)

    monkeypatch.setattr(formats, "save_folder", save_others)
    with raises("unwritable", None, str(tmp_path / "out"), "reads back"):
        export_pack(pack, to, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


@pytest.mark.parametrize(
    ("to", "family", "targets", "named"),
    [
        ("gguf", "qwen3_moe", EXPERTS, "mixture"),
        ("gguf", "cohere", (), "cohere"),
        ("gguf", "mamba2", (), "mamba2"),
        ("peft", "mamba2", (), "mamba2"),
        ("swift", "qwen3_moe", EXPERTS, "switch_mlp.gate_proj"),
    ],
)
def test_what_a_format_has_no_place_for_is_rejected(to, family, targets, named, tmp_path):
    pack = pack_of(family_base(family), tmp_path / "p", rank=2, target_modules=targets)
    with raises("unsupported", None, named):
        export_pack(pack, to, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def modelfile(folder: Path) -> list[str]:
    return (folder / "Modelfile").read_text().splitlines()


def test_a_modelfile_names_base_and_adapter(pack, tmp_path):
    with raises("invalid", "from", "llama"):
        export_pack(pack, "ollama", tmp_path / "o")
    out = tmp_path / "My Notes"
    (hint, *_) = export_pack(pack, "ollama", out, "llama3.2:1b")["notes"]
    assert "FROM llama3.2:1b" in modelfile(out)
    assert "ollama create my-notes" in hint and shlex.quote(str(out))[:-1] in hint

    pack.manifest["base"]["id"] = 'me/it\nFROM http://x\nTEMPLATE y")\\(exit())'
    out = tmp_path / "a b"
    assert shlex.quote(str(out))[:-1] in export_pack(pack, "gguf", out)["notes"][0]
    lines = modelfile(out)
    assert lines[-2:] == ["FROM ./base.gguf", "ADAPTER ./a b.gguf"]
    assert not [line for line in lines if line.startswith(("FROM h", "TEMPLATE"))]


def test_swift_opens_an_export_of_uneven_ranks(tmp_path):
    base = family_base("qwen3")
    pack = pack_of(base, tmp_path / "p", **UNEVEN)
    assert not (tmp_path / "p" / "adapter_config.json").exists()
    export_pack(pack, "swift", tmp_path / "out")
    with base.applied(pack):
        expected = np.array(base.model(mx.arange(1, 9)[None]))
    model = load_into(family_base("qwen3").model, tmp_path / "out")
    model.eval()
    assert np.abs(np.array(model(mx.arange(1, 9)[None])) - expected).max() < 1e-4


@pytest.fixture
def pack_of_gguf(tmp_path) -> Pack:
    write_tiny(tmp_path / "llama.gguf")
    return pack_of(load_base(tmp_path / "llama.gguf"), tmp_path / "p", rank=2)


def test_a_pack_of_a_gguf_file_or_a_model_of_ollama_names_it(pack_of_gguf, tmp_path):
    (command,) = export_pack(pack_of_gguf, "gguf", tmp_path / "out")["notes"]
    assert command == f"llama-server -m llama.gguf --lora {tmp_path / 'out' / 'out.gguf'}"
    (note,) = export_pack(pack_of_gguf, "peft", tmp_path / "peft")["notes"]
    assert "gguf_file" in note

    pack_of_gguf.manifest["base"]["id"] = "ollama:llama3.2:1b"
    export_pack(pack_of_gguf, "ollama", tmp_path / "o")
    assert "FROM llama3.2:1b" in modelfile(tmp_path / "o")
    pack_of_gguf.manifest["base"]["id"] = "ollama:it\nFROM http://x"
    with raises("invalid", "from"):
        export_pack(pack_of_gguf, "ollama", tmp_path / "other")


def test_a_peft_folder_has_the_chat_template_of_the_pack(pack, llama, tmp_path):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    pack.manifest["recipe"] = {"chat_template": template}
    export_pack(pack, "peft", tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == template
    import_adapter(tmp_path / "out", tmp_path / "again", llama)
    assert Pack.open(tmp_path / "again").manifest["recipe"]["chat_template"] == template


def test_from_is_a_path_that_ollama_finds(pack_of_gguf, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for to, hint in (
        ("gguf", f"llama-server -m {tmp_path / 'llama.gguf'} --lora gguf/gguf.gguf"),
        ("ollama", "(cd ollama && ollama create ollama) && ollama run ollama"),
    ):
        assert export_pack(pack_of_gguf, to, Path(to), "./llama.gguf")["notes"][0] == hint
        assert {f"FROM {tmp_path / 'llama.gguf'}", f"ADAPTER ./{to}.gguf"} <= {*modelfile(Path(to))}


def test_from_must_be_the_model_of_the_pack(pack_of_gguf, llama, tmp_path, monkeypatch):
    pack = pack_of(load_base(llama), tmp_path / "q", rank=2)
    out = tmp_path / "out"
    write_tiny(tmp_path / "other.gguf", kind="Q8_0")
    write_tiny(tmp_path / "qwen.gguf", "qwen3")
    for start, code in (("./absent.gguf", "not-found"), ("a\nTEMPLATE b", "invalid")):
        with raises(code, "from", "--from"):
            export_pack(pack_of_gguf, "ollama", out, start)
    with raises("mismatch", "from", "other.gguf", "fingerprint"):
        export_pack(pack_of_gguf, "ollama", out, str(tmp_path / "other.gguf"))
    with raises("mismatch", "from", "another model"):  # of a pack of safetensors: its family
        export_pack(pack, "ollama", out, str(tmp_path / "qwen.gguf"))

    digest = "1" * 64
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"}
    manifest = tmp_path / "manifests/registry.ollama.ai/library/it/latest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": [layer]}))
    (tmp_path / "blobs").mkdir()
    (tmp_path / "other.gguf").rename(tmp_path / "blobs" / f"sha256-{digest}")
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    with raises("mismatch", "from", "fingerprint"):
        export_pack(pack_of_gguf, "ollama", out, "it")
    assert not out.exists()
    assert "not compared" in export_pack(pack_of_gguf, "ollama", out, "that")["notes"][1]


@pytest.mark.slow
def test_lm_studio_gets_a_merged_model_and_needs_no_out(pack, llama, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(pack.path)
    command = ["export", ".", "--to", "lmstudio", "--from", str(llama), "--json"]
    packs(command, standalone_mode=False)
    verified = json.loads(capsys.readouterr().out)["verified"]
    assert 0 <= verified["drift"] <= verified["max_drift"] and "KL" in verified["measure"]
    model = tmp_path / ".lmstudio" / "models" / "mlx-packs" / "p"
    assert np.abs(logits(load_base(model)) - attached_logits(pack, llama)).max() < 1e-4
    with raises("invalid", "out"):
        packs(["export", str(pack.path), "--to", "gguf"], standalone_mode=False)


def test_variables_of_the_chat_template_are_named(pack, tmp_path, capsys):
    assert export_pack(pack, "gguf", tmp_path / "plain")["template_kwargs"] == {}

    pack.manifest["recipe"] = {"template_kwargs": {"enable_thinking": False}}
    saved = pack.save(tmp_path / "saved")
    command = ["export", str(saved.path), "--to", "ollama", "--from", "qwen3:4b"]
    packs([*command, "--out", str(tmp_path / "o")], standalone_mode=False)
    printed = " ".join(capsys.readouterr().out.split())
    assert "(enable_thinking=False): set them in the other program" in printed
    assert "ollama run o --think=false" in printed


@pytest.mark.interop
@pytest.mark.parametrize("family", ["qwen3", "phi3"])
def test_the_gguf_package_reads_an_adapter(family, tmp_path):
    import gguf

    pack = pack_of(family_base(family), tmp_path / "p", rank=4)
    export_pack(pack, "gguf", tmp_path / "out")
    reader = gguf.GGUFReader(tmp_path / "out" / "out.gguf")
    architecture = reader.fields["general.architecture"].contents()
    assert architecture == family
    assert reader.fields["adapter.lora.alpha"].types == [gguf.GGUFValueType.FLOAT32]

    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    known = gguf.get_tensor_name_map(arch, 8)
    for tensor in reader.tensors:
        assert known.get_name(tensor.name.rpartition(".weight.")[0]) is not None
        assert tensor.data.dtype == np.float32

    pairs = deltas_in(tmp_path / "out" / "out.gguf")
    by_name = {tensor.name: np.array(tensor.data, np.float64) for tensor in reader.tensors}
    alpha = reader.fields["adapter.lora.alpha"].contents()
    for name, delta in pairs.items():
        a, b = by_name[f"{name}.lora_a"], by_name[f"{name}.lora_b"]
        assert np.abs(alpha / a.shape[0] * b @ a - delta).max() < 1e-6


def test_a_manifest_without_heads_is_not_exported_in_a_wrong_order(pack, tmp_path):
    pack.manifest["base"]["num_heads"] = None
    with raises("unsupported", None, "num_heads"):
        export_pack(pack, "gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
