"""packs export and import: PEFT's and mlx-lm's folders, by numbers."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from mlx_packs import Pack, load_base
from mlx_packs.convert.external import CONFIG, verify_numerically
from mlx_packs.convert.interop import SIDECAR, export_pack, import_adapter
from mlx_packs.convert.merge import merge_pack
from mlx_packs.convert.peft import Peft
from mlx_packs.reading import sha256
from mlx_packs.runtime import mx
from tests.convert.conftest import (
    DOWN1,
    KINDS,
    Q0,
    SIZES,
    edit_json,
    pack_with,
    write_peft,
)
from tests.helpers.checkpoints import (
    TOKENIZER_FILES,
    attached_logits,
    logits,
    merged,
    write_quantized,
)
from tests.helpers.errors import check, raises
from tests.helpers.packs import random_pack
from tests.helpers.variants import slow_except


def stock_logits(model: Path, adapter: Path) -> np.ndarray:
    """By mlx-lm itself."""
    stock, _ = load_model(model)
    load_adapters(stock, str(adapter)).eval()
    return np.array(stock(mx.arange(1, 33)[None]))


def same_tensors(one: Pack, other: Pack) -> bool:
    return len({sha256(p.path / "adapters.safetensors") for p in (one, other)}) == 1


@pytest.mark.parametrize("to", ["peft", "mlx-lm"])
@pytest.mark.parametrize("kind", slow_except(KINDS, "ragged", "square"))
def test_an_export_comes_back_with_the_same_logits(kind, to, exported, tmp_path):
    """Also without the manifest beside it."""
    pack, base, folder = exported(kind, to)
    assert import_adapter(folder, tmp_path / "same", base)["exported_here"]
    shutil.copytree(folder, tmp_path / "out", ignore=shutil.ignore_patterns(SIDECAR))
    assert not import_adapter(tmp_path / "out", tmp_path / "back", base)["exported_here"]
    assert same_tensors(*(Pack.open(tmp_path / name) for name in ("same", "back")))
    back = Pack.open(tmp_path / "back")
    expected = attached_logits(pack, base)
    assert np.abs(expected - logits(load_base(base))).max() > 1e-2
    assert np.abs(attached_logits(back, base) - expected).max() < 1e-5
    if kind in ("uniform", "last block", "square"):  # nothing was folded: the bytes too
        assert same_tensors(back, pack)


@pytest.mark.parametrize("kind", slow_except(KINDS, "ragged", "slices"))
def test_stock_mlx_lm_loads_an_export_and_gives_the_same_logits(kind, exported):
    pack, base, folder = exported(kind, "mlx-lm")
    assert np.abs(stock_logits(base, folder) - attached_logits(pack, base)).max() < 1e-4


@pytest.mark.parametrize("rslora", [False, True])
def test_import_of_peft_reads_ranks_and_alphas_by_module(rslora, bases, tmp_path):
    alphas = {"down_proj": 7, "mlp.down_proj": 9}
    ranks = {Q0: 3, DOWN1: 5}
    folder = write_peft(tmp_path / "in", ranks, SIZES, use_rslora=rslora, alpha_pattern=alphas)
    import_adapter(folder, tmp_path / "pack", bases["qwen3"])
    specs = Pack.open(tmp_path / "pack").specs
    result = {path: (spec.rank, spec.slices[0].scale) for path, spec in specs.items()}
    by = (3**0.5, 5**0.5) if rslora else (3, 5)
    assert result == {Q0: (3, pytest.approx(8 / by[0])), DOWN1: (5, pytest.approx(7 / by[1]))}


def test_a_conversion_the_wrong_way_round_is_caught_by_numbers(bases, tmp_path, monkeypatch):
    folder = write_peft(tmp_path / "in", {Q0: 64}, {Q0: (64, 64)})  # no shape can tell
    read = Peft.read

    def transposed(*args):
        adapter = read(*args)
        adapter.tensors = {name: mx.contiguous(t.T) for name, t in adapter.tensors.items()}
        return adapter

    monkeypatch.setattr(Peft, "read", transposed)
    with raises("mismatch", None, Q0):
        import_adapter(folder, tmp_path / "pack", bases["square"])
    assert not (tmp_path / "pack").exists()


@pytest.mark.parametrize("bits", slow_except([None, 4], None))
def test_dora_is_carried_applied_merged_and_is_that_of_mlx_lm(bits, bases, tmp_path):
    model = bases["qwen3"]
    if bits:
        model = write_quantized(tmp_path / "q", model, bits)
    magnitudes = {
        f"{path}.lora_magnitude_vector": mx.random.uniform(0.5, 1.5, (out,), key=mx.random.key(9))
        for path, (_, out) in SIZES.items()
    }
    ranks = {Q0: 4, DOWN1: 4}
    write_peft(tmp_path / "in", ranks, SIZES, use_dora=True, tensors=magnitudes)
    import_adapter(tmp_path / "in", tmp_path / "pack", model)
    pack = Pack.open(tmp_path / "pack")
    assert {spec.kind for spec in pack.specs.values()} == {"dora"}
    expected = attached_logits(pack, model)
    assert np.abs(expected - logits(load_base(model))).max() > 0.1

    merged(pack, model, tmp_path / "out")
    assert np.abs(logits(load_base(tmp_path / "out")) - expected).max() < 1e-4
    assert np.abs(stock_logits(model, pack.path) - expected).max() < 1e-4

    for to in ("peft", "mlx-lm"):
        export_pack(pack, to, tmp_path / to)
        import_adapter(tmp_path / to, tmp_path / f"{to}-back", model)
        back = Pack.open(tmp_path / f"{to}-back")
        assert np.abs(attached_logits(back, model) - expected).max() < 1e-5


@pytest.mark.slow
def test_tied_embedding_is_input_alone_in_peft_and_head_too_in_mlx_lm(bases, tmp_path):
    name = "model.embed_tokens.lora_embedding_"
    table = {f"{name}A": mx.random.normal((3, 4096)), f"{name}B": mx.random.normal((64, 3))}
    table = {name: 0.2 * factor for name, factor in table.items()}
    folder = write_peft(tmp_path / "in", {Q0: 4}, SIZES, tensors=table)
    import_adapter(folder, tmp_path / "peft", bases["tied"])
    peft = Pack.open(tmp_path / "peft")
    assert peft.specs["model.embed_tokens"].head is False

    with raises("unsupported", None, "model.embed_tokens", "mlx-lm"):
        export_pack(peft, "mlx-lm", tmp_path / "x")
    with raises("unsupported", None, "model.embed_tokens"):
        merge_pack(peft, bases["tied"], tmp_path / "x")
    assert not (peft.path / CONFIG).exists()  # stock mlx-lm would get it wrong

    theirs = tmp_path / "theirs"
    theirs.mkdir()
    tensors = dict(peft.load_tensors())
    mx.save_safetensors(str(theirs / "adapters.safetensors"), tensors)
    keys = ["model.embed_tokens", Q0]
    parameters = {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": keys}
    config = {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters}
    (theirs / CONFIG).write_text(json.dumps(config))

    import_adapter(theirs, tmp_path / "mlx", bases["tied"])
    ours = Pack.open(tmp_path / "mlx")
    assert ours.specs["model.embed_tokens"].head is True
    with raises("unsupported", None, "also the head"):
        export_pack(ours, "peft", tmp_path / "x")

    expected = attached_logits(ours, bases["tied"])
    assert np.abs(expected - attached_logits(peft, bases["tied"])).max() > 0.1
    export_pack(ours, "mlx-lm", tmp_path / "again")
    assert np.abs(stock_logits(bases["tied"], tmp_path / "again") - expected).max() < 1e-4


def test_whole_tables_of_a_tied_base_are_rejected_and_equal_ones_not_carried(bases, tmp_path):
    names = ("lm_head.weight", "model.embed_tokens.weight")
    table = mx.random.normal((4096, 64), key=mx.random.key(5))
    for some in (names, names[:1]):
        out = tmp_path / str(len(some))
        folder = write_peft(out, {Q0: 4}, SIZES, tensors=dict.fromkeys(some, table))
        with raises("unsupported", None, str(bases["tied"])):
            import_adapter(folder, tmp_path / "x", bases["tied"])

    own = mx.load(str(bases["qwen3"] / "model.safetensors"))
    folder = write_peft(tmp_path / "in", {Q0: 4}, SIZES, tensors={n: own[n] for n in names})
    assert import_adapter(folder, tmp_path / "pack", bases["qwen3"])["replaced"] == []


def test_experts_go_to_mlx_lm_and_not_to_peft(bases, tmp_path):
    base = load_base(bases["moe"])
    pack = random_pack(base, targets=("switch_mlp.down_proj",)).save(tmp_path / "p")

    with raises("unsupported", None, "switch_mlp.down_proj", "target_parameters"):
        export_pack(pack, "peft", tmp_path / "x")

    export_pack(pack, "mlx-lm", tmp_path / "out")
    (tmp_path / "out" / SIDECAR).unlink()
    import_adapter(tmp_path / "out", tmp_path / "again", bases["moe"])
    again = Pack.open(tmp_path / "again")
    result, expected = (attached_logits(p, bases["moe"]) for p in (again, pack))
    assert np.abs(result - expected).max() < 1e-5

    attention = random_pack(base, targets=("q_proj",)).save(tmp_path / "a")
    assert export_pack(attention, "peft", tmp_path / "attention")["modules"] == 2

    router = random_pack(base, targets=("mlp.gate",)).save(tmp_path / "r")
    with raises("unsupported", None, "mlp.gate", "transformers"):
        export_pack(router, "peft", tmp_path / "x")


def test_an_adapter_of_mlx_lm_that_names_no_type_is_lora(exported, tmp_path):
    pack, base, folder = exported("uniform", "mlx-lm")
    shutil.copytree(folder, tmp_path / "e", ignore=shutil.ignore_patterns(SIDECAR))
    edit_json(tmp_path / "e" / CONFIG, lambda config: config.pop("fine_tune_type"))
    import_adapter(tmp_path / "e", tmp_path / "q", base)
    assert same_tensors(pack, Pack.open(tmp_path / "q"))


def test_commands_print_what_was_done(bases, tmp_path, run):
    pack = pack_with(bases["qwen3"], tmp_path / "pack", rank=2)
    code, out, _ = run("export", pack.path, "--to", "peft", "--out", tmp_path / "out", "--json")
    assert code == 0 and json.loads(out)["modules"] == 14
    assert run("export", pack.path, "--to", "peft", "--out", tmp_path / "out")[0] == 2
    code, out, _ = run(
        "import", tmp_path / "out", "--model", bases["qwen3"], "--out", tmp_path / "back"
    )
    assert code == 0 and "lora of rank 2 on 14 modules of qwen3" in out
    assert run("import", pack.path, "--out", tmp_path / "x")[0] == 2
    check(run.error, "conflict", None, str(pack.path))
    assert run("inspect", tmp_path / "out")[0] == 2
    check(run.error, "not-found", None, f"`packs import {tmp_path / 'out'} --out PACK`")


def test_texts_beside_an_adapter_that_its_base_does_not_have_are_named(exported, tmp_path):
    _, base, folder = exported("uniform", "peft")
    adapter = shutil.copytree(folder, tmp_path / "in", ignore=shutil.ignore_patterns(SIDECAR))

    def notes() -> list[str]:
        return import_adapter(adapter, tmp_path / "pack", base, overwrite=True)["notes"]

    assert notes() == []
    for file in TOKENIZER_FILES:
        shutil.copy(base / file, adapter)
    assert notes() == []
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    (note,) = notes()
    assert "the adapter was trained with another chat template: the pack answers" in note
    (adapter / "chat_template.jinja").unlink()
    edit_json(adapter / "tokenizer_config.json", lambda c: c.update(chat_template="{{ messages }}"))
    assert notes() == [note]


def test_whole_conv1d_weights_of_gpt2_are_turned_when_merged(bases, tmp_path):
    path = "transformer.h.0.attn.c_attn"
    own = mx.load(str(bases["gpt2"] / "model.safetensors"))
    names = ["h.0.attn.c_proj.weight", "h.1.mlp.c_fc.weight"]  # [in, out]; the first is square
    whole = {f"transformer.{n}": own[n] + 0.1 * mx.random.normal(own[n].shape) for n in names}
    folder = write_peft(tmp_path / "in", {path: 4}, {path: (64, 192)}, tensors=whole)
    import_adapter(folder, tmp_path / "pack", bases["gpt2"])
    merged(Pack.open(tmp_path / "pack"), bases["gpt2"], tmp_path / "out")
    written = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert all(mx.array_equal(written[n], whole[f"transformer.{n}"]).item() for n in names)


def test_nan_proves_nothing(bases, tmp_path):
    pack = pack_with(bases["qwen3"], tmp_path / "pack", rank=2, target_modules=("q_proj",))
    tensors = {name: tensor * math.nan for name, tensor in pack.load_tensors().items()}
    theirs = dict.fromkeys(pack.specs, lambda x: np.zeros((4, 128)))
    with raises("mismatch", None, Q0):
        verify_numerically(pack.specs, tensors, theirs, tmp_path)
