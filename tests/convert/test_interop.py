"""packs export and import: PEFT's and mlx-lm's folders, to the byte and by numbers."""

import json
import math
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from mlx_packs import LoRAConfig, Pack, load_base
from mlx_packs.adapters.attach import attach
from mlx_packs.convert.external import CONFIG, folded, verify_numerically
from mlx_packs.convert.interop import ORIGINALS, SIDECAR, export_pack, import_adapter
from mlx_packs.convert.merge import merge_pack
from mlx_packs.convert.peft import Peft
from mlx_packs.packs.making import pack_of
from mlx_packs.reading import read_header, read_json, sha256
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import (
    attached_logits,
    logits,
    merged,
    write_checkpoint,
    write_quantized,
)
from tests.helpers.errors import check, raises
from tests.helpers.packs import random_pack

PREFIX = "base_model.model."
WEIGHTS = "adapter_model.safetensors"
LAYER = "model.layers.{}."


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    """Checkpoint folders by family; ``tied`` is a Qwen3 whose head is its embedding."""
    folder = tmp_path_factory.mktemp("bases")
    return {
        "qwen3": write_checkpoint(folder / "qwen3"),
        "llama": write_checkpoint(folder / "llama", "llama"),
        "gpt2": write_checkpoint(folder / "gpt2", "gpt2"),
        "tied": write_checkpoint(folder / "tied", tie_word_embeddings=True),
        # head_dim 16 x 4 heads = hidden 64: q_proj and o_proj are square
        "square": write_checkpoint(folder / "square", head_dim=16, num_key_value_heads=4),
        "moe": write_checkpoint(folder / "moe", "qwen3_moe"),
    }


def pack_with(model: Path, folder: Path, **lora) -> Pack:
    """A pack with random B on all that a LoRAConfig targets."""
    base = load_base(model)
    attached = attach(base, LoRAConfig(**lora))
    try:
        mx.random.seed(1)
        for adapters in {id(place.lora): place.lora for place in attached.places.values()}.values():
            adapters.lora_b[:] = [mx.random.normal(t.shape) * 0.1 for t in adapters.lora_b]
        return pack_of(attached).save(folder)
    finally:
        attached.detach()


def edit_json(file: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def stock_logits(model: Path, adapter: Path) -> np.ndarray:
    """By mlx-lm itself."""
    stock, _ = load_model(model)
    load_adapters(stock, str(adapter)).eval()
    return np.array(stock(mx.arange(1, 33)[None]))


def check_comes_back(pack: Pack, to: str, folder: Path) -> None:
    """An export in a folder is imported as the same pack."""
    export_pack(pack, to, folder)
    back = folder.with_name(f"{folder.name}-back")
    import_adapter(folder, back)
    assert is_the_same(Pack.open(back), pack)


def same_tensors(one: Pack, other: Pack) -> bool:
    return len({sha256(p.path / "adapters.safetensors") for p in (one, other)}) == 1


def is_the_same(one: Pack, other: Pack) -> bool:
    """Tensors to the byte, and the manifest; the card alone has the folder's name."""
    manifests = [{**p.manifest, "files": None} for p in (one, other)]
    return same_tensors(one, other) and manifests[0] == manifests[1]


def write_peft(folder: Path, modules: dict[str, int], sizes: dict, **config) -> Path:
    """A PEFT folder of random factors; ``modules``: path to rank, ``sizes``: path to (in, out)."""
    folder.mkdir()
    extra = config.pop("tensors", {})
    tensors = {}
    for i, (path, rank) in enumerate(modules.items()):
        width, out = sizes[path]
        key = mx.random.key(i)
        tensors[f"{PREFIX}{path}.lora_A.weight"] = 0.2 * mx.random.normal((rank, width), key=key)
        tensors[f"{PREFIX}{path}.lora_B.weight"] = 0.2 * mx.random.normal((out, rank), key=key)
    tensors |= {PREFIX + name: tensor for name, tensor in extra.items()}
    mx.save_safetensors(str(folder / WEIGHTS), tensors)
    stated = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", **config}
    (folder / CONFIG).write_text(json.dumps(stated))
    return folder


Q0, DOWN1 = LAYER.format(0) + "self_attn.q_proj", LAYER.format(1) + "mlp.down_proj"
SIZES = {Q0: (64, 128), DOWN1: (128, 64)}
RAGGED = {
    "rank": 4,
    "target_modules": ("q_proj", "v_proj", "down_proj"),
    "rank_pattern": {"layers.0.self_attn.q_proj": 2, "down_proj": 3},
    "alpha_pattern": {"layers.0.self_attn.v_proj": 1.7},
}
KINDS = {
    "uniform": ("qwen3", {"rank": 4, "target_modules": ("q_proj", "up_proj")}),
    "last block": ("llama", {"rank": 4, "num_layers": 1, "target_modules": ("q_proj", "o_proj")}),
    "ragged": ("qwen3", RAGGED),
    "square": ("square", {"rank": 4, "target_modules": ("q_proj", "o_proj")}),
    "slices": (
        "gpt2",
        {
            "rank": 2,
            "alpha": 3.0,
            "target_modules": ("c_attn", "c_proj"),
            "rank_pattern": {"c_attn.v": 5},
        },
    ),
}


@pytest.fixture(scope="module")
def exported(bases, tmp_path_factory):
    """A pack by its kind, its base, and the folder of its export; tests copy what they change."""
    folder = tmp_path_factory.mktemp("exported")

    @cache
    def pack_of_kind(kind: str) -> tuple[Pack, Path]:
        family, lora = KINDS[kind]
        return pack_with(bases[family], folder / kind, **lora), bases[family]

    @cache
    def get(kind: str, to: str) -> tuple[Pack, Path, Path]:
        pack, base = pack_of_kind(kind)
        export_pack(pack, to, folder / f"{kind}-{to}")
        return pack, base, folder / f"{kind}-{to}"

    return get


@pytest.mark.parametrize("to", ["peft", "mlx-lm"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pack_comes_back_to_the_byte(kind, to, exported, tmp_path):
    pack, _, folder = exported(kind, to)
    report = import_adapter(folder, tmp_path / "back")
    assert report["exported_here"]
    assert is_the_same(Pack.open(tmp_path / "back"), pack)


@pytest.mark.parametrize("to", ["peft", "mlx-lm"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_what_was_noted_the_logits_are_the_same(kind, to, exported, tmp_path):
    pack, base, folder = exported(kind, to)
    noted = shutil.ignore_patterns(SIDECAR, ORIGINALS)
    shutil.copytree(folder, tmp_path / "out", ignore=noted)
    report = import_adapter(tmp_path / "out", tmp_path / "back", base)
    assert not report["exported_here"]
    back = Pack.open(tmp_path / "back")
    expected = attached_logits(pack, base)
    assert np.abs(expected - logits(load_base(base))).max() > 1e-2
    assert np.abs(attached_logits(back, base) - expected).max() < 1e-5
    if kind in ("uniform", "last block", "square"):  # nothing was folded: the bytes too
        assert same_tensors(back, pack)


@pytest.mark.parametrize("kind", KINDS)
def test_stock_mlx_lm_loads_an_export_and_gives_the_same_logits(kind, exported):
    pack, base, folder = exported(kind, "mlx-lm")
    assert np.abs(stock_logits(base, folder) - attached_logits(pack, base)).max() < 1e-4


def test_what_peft_reads_is_what_peft_expects(bases, exported, tmp_path):
    """Also llama.cpp's convert_lora_to_gguf: names, 2 axes, one alpha, ranks by shape."""
    pack = pack_with(bases["qwen3"], tmp_path / "pack", rank=4, alpha=6.0)
    report = export_pack(pack, "peft", tmp_path / "out")
    config = read_json(tmp_path / "out" / CONFIG)
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 6, False)
    assert config["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    assert config["layers_to_transform"] is None and not config["fan_in_fan_out"]
    header, _ = read_header(tmp_path / "out" / WEIGHTS)
    stored = read_header(bases["qwen3"] / "model.safetensors")[0]
    for name, tensor in header.items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", name)
        out, width = stored[f"{match[1]}.weight"]["shape"]
        assert tensor["shape"] == ([4, width] if match[2] == "A" else [out, 4])
    assert not report["notes"] and not list((tmp_path / "out").glob("*.bin"))
    ragged, _, _ = exported("ragged", "peft")
    report = export_pack(ragged, "peft", tmp_path / "several")
    assert "llama.cpp's converter knows one lora_alpha" in report["notes"][0]
    config = read_json(tmp_path / "several" / CONFIG)
    assert config["rank_pattern"][r"^model\.layers\.0\.self_attn\.q_proj"] == 2
    assert config["alpha_pattern"][r"^model\.layers\.0\.self_attn\.v_proj"] == 1.7


def test_last_blocks_are_layers_to_transform_in_peft_but_for_gpt2(exported):
    config = read_json(exported("last block", "peft")[2] / CONFIG)
    assert (config["layers_to_transform"], config["layers_pattern"]) == ([1], "layers")
    folder = exported("slices", "peft")[2]
    config = read_json(folder / CONFIG)
    assert config["fan_in_fan_out"] and config["layers_to_transform"] is None
    header, _ = read_header(folder / WEIGHTS)
    assert f"{PREFIX}transformer.h.0.attn.c_proj.lora_A.weight" in header


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


def peft_delta(folder: Path, path: str, scale: float) -> np.ndarray:
    tensors = mx.load(str(folder / WEIGHTS))
    a, b = (np.array(tensors[f"{PREFIX}{path}.lora_{part}.weight"]) for part in "AB")
    return scale * b @ a


def weight_change(base: Path, out: Path, name: str) -> np.ndarray:
    before, after = (mx.load(str(folder / "model.safetensors"))[name] for folder in (base, out))
    return np.array(after - before)


def test_a_square_projection_keeps_its_direction(bases, tmp_path):
    sizes = {Q0: (64, 64)}
    folder = write_peft(tmp_path / "in", {Q0: 4}, sizes)
    import_adapter(folder, tmp_path / "pack", bases["square"])
    pack = Pack.open(tmp_path / "pack")
    merged(pack, bases["square"], tmp_path / "out")
    delta = peft_delta(folder, Q0, 2.0)
    assert np.abs(delta - delta.T).max() > 0.1
    change = weight_change(bases["square"], tmp_path / "out", f"{Q0}.weight")
    assert np.abs(change - delta).max() < 1e-5


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


def test_gpt2_of_peft_has_one_adapter_over_q_k_and_v(bases, tmp_path):
    path = "transformer.h.0.attn.c_attn"
    folder = write_peft(tmp_path / "in", {path: 4}, {path: (64, 192)}, fan_in_fan_out=True)
    import_adapter(folder, tmp_path / "pack", bases["gpt2"])
    pack = Pack.open(tmp_path / "pack")
    assert list(pack.specs) == ["model.h.0.attn.c_attn"]
    merged(pack, bases["gpt2"], tmp_path / "out")
    change = weight_change(bases["gpt2"], tmp_path / "out", "h.0.attn.c_attn.weight")
    assert np.abs(change - peft_delta(folder, path, 2.0).T).max() < 1e-5
    expected = attached_logits(pack, bases["gpt2"])
    assert np.abs(logits(load_base(tmp_path / "out")) - expected).max() < 1e-4


def write_dora(folder: Path) -> Path:
    magnitudes = {
        f"{path}.lora_magnitude_vector": mx.random.uniform(0.5, 1.5, (out,), key=mx.random.key(9))
        for path, (_, out) in SIZES.items()
    }
    return write_peft(folder, {Q0: 4, DOWN1: 4}, SIZES, use_dora=True, tensors=magnitudes)


@pytest.mark.parametrize("bits", [None, 4])
def test_dora_is_carried_applied_merged_and_is_that_of_mlx_lm(bits, bases, tmp_path):
    model = write_quantized(tmp_path / "q", bases["qwen3"], bits) if bits else bases["qwen3"]
    import_adapter(write_dora(tmp_path / "in"), tmp_path / "pack", model)
    pack = Pack.open(tmp_path / "pack")
    assert {spec.kind for spec in pack.specs.values()} == {"dora"}
    expected = attached_logits(pack, model)
    assert np.abs(expected - logits(load_base(model))).max() > 0.1
    for matmul_path in ("dense", "transient"):
        base = load_base(model)
        with base.applied(pack, matmul_path=matmul_path):
            assert np.abs(logits(base) - expected).max() < 1e-4
    merged(pack, model, tmp_path / "out")
    assert np.abs(logits(load_base(tmp_path / "out")) - expected).max() < 1e-4
    assert np.abs(stock_logits(model, pack.path) - expected).max() < 1e-4
    for to in ("peft", "mlx-lm"):
        check_comes_back(pack, to, tmp_path / to)


def embedding_adapter(vocab: int = 4096, width: int = 64, rank: int = 3) -> dict:
    a, b = (mx.random.normal(s, key=mx.random.key(4)) for s in ((rank, vocab), (width, rank)))
    name = "model.embed_tokens.lora_embedding_"
    return {f"{name}A": 0.2 * a, f"{name}B": 0.2 * b}


def test_an_adapter_on_an_untied_embedding_goes_both_ways(bases, tmp_path):
    folder = write_peft(tmp_path / "in", {Q0: 4}, SIZES, tensors=embedding_adapter())
    import_adapter(folder, tmp_path / "pack", bases["qwen3"])
    pack = Pack.open(tmp_path / "pack")
    assert pack.specs["model.embed_tokens"].kind == "embedding"
    expected = attached_logits(pack, bases["qwen3"])
    merged(pack, bases["qwen3"], tmp_path / "out")
    assert np.abs(logits(load_base(tmp_path / "out")) - expected).max() < 1e-4
    for to in ("peft", "mlx-lm"):
        check_comes_back(pack, to, tmp_path / to)


def test_tied_embedding_is_input_alone_in_peft_and_head_too_in_mlx_lm(bases, tmp_path):
    folder = write_peft(tmp_path / "in", {Q0: 4}, SIZES, tensors=embedding_adapter())
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
    check_comes_back(ours, "peft", tmp_path / "tied")
    (tmp_path / "tied" / SIDECAR).unlink()  # by PEFT's own config
    import_adapter(tmp_path / "tied", tmp_path / "read", bases["tied"])
    assert Pack.open(tmp_path / "read").specs == ours.specs
    expected = attached_logits(ours, bases["tied"])
    assert np.abs(expected - attached_logits(peft, bases["tied"])).max() > 0.1
    merged(ours, bases["tied"], tmp_path / "out")
    assert np.abs(logits(load_base(tmp_path / "out")) - expected).max() < 1e-4
    export_pack(ours, "mlx-lm", tmp_path / "again")
    assert np.abs(stock_logits(bases["tied"], tmp_path / "again") - expected).max() < 1e-4


def test_modules_to_save_are_applied_and_merged_but_not_exported(bases, tmp_path):
    head = 0.1 * mx.random.normal((4096, 64), key=mx.random.key(5))
    whole = {"lm_head.weight": head, "model.norm.weight": mx.full((64,), 1.5)}
    folder = write_peft(
        tmp_path / "in", {Q0: 4}, SIZES, tensors=whole, modules_to_save=["lm_head", "norm"]
    )
    report = import_adapter(folder, tmp_path / "pack", bases["qwen3"])
    assert sorted(report["replaced"]) == sorted(whole)
    pack = Pack.open(tmp_path / "pack")
    expected = attached_logits(pack, bases["qwen3"])
    base = load_base(bases["qwen3"])
    before = logits(base)
    base.model.lm_head.weight, base.model.model.norm.weight = head, whole["model.norm.weight"]
    assert np.abs(logits(base) - expected).max() > 1e-3  # the adapter is there as well
    merged(pack, bases["qwen3"], tmp_path / "out")
    assert np.abs(logits(load_base(tmp_path / "out")) - expected).max() < 1e-4
    base = load_base(bases["qwen3"])
    with base.applied(pack):
        pass
    assert np.array_equal(logits(base), before)
    with raises("unsupported", None, "lm_head.weight", "mlx-lm"):
        export_pack(pack, "mlx-lm", tmp_path / "x")
    assert not (pack.path / CONFIG).exists()
    check_comes_back(pack, "peft", tmp_path / "peft")
    assert read_json(tmp_path / "peft" / CONFIG)["modules_to_save"] == ["lm_head", "model.norm"]


def test_whole_conv1d_weights_of_gpt2_are_turned_both_ways(bases, tmp_path):
    path = "transformer.h.0.attn.c_attn"
    own = mx.load(str(bases["gpt2"] / "model.safetensors"))
    names = ["h.0.attn.c_proj.weight", "h.1.mlp.c_fc.weight"]  # [in, out]; the first is square
    whole = {f"transformer.{n}": own[n] + 0.1 * mx.random.normal(own[n].shape) for n in names}
    arguments = write_peft(tmp_path / "in", {path: 4}, {path: (64, 192)}, tensors=whole)
    import_adapter(arguments, tmp_path / "pack", bases["gpt2"])
    pack = Pack.open(tmp_path / "pack")
    for name in whole:
        ours = pack.load_tensors()[name.replace("transformer.", "model.")]
        assert mx.array_equal(ours, whole[name].T).item()
    merged(pack, bases["gpt2"], tmp_path / "out")
    written = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert all(mx.array_equal(written[n], whole[f"transformer.{n}"]).item() for n in names)
    export_pack(pack, "peft", tmp_path / "peft")
    result = mx.load(str(tmp_path / "peft" / WEIGHTS))
    assert all(mx.array_equal(result[PREFIX + n], whole[n]).item() for n in whole)


def test_nan_proves_nothing(bases, tmp_path):
    pack = pack_with(bases["qwen3"], tmp_path / "pack", rank=2, target_modules=("q_proj",))
    tensors = {name: tensor * math.nan for name, tensor in pack.load_tensors().items()}
    theirs = dict.fromkeys(pack.specs, lambda x: np.zeros((4, 128)))
    with raises("mismatch", None, Q0):
        verify_numerically(pack.specs, tensors, theirs, tmp_path)


def test_whole_tables_of_a_tied_base_must_be_one(bases, tmp_path):
    table = mx.random.normal((4096, 64), key=mx.random.key(5))
    both = {"lm_head.weight": table, "model.embed_tokens.weight": table}
    folder = write_peft(tmp_path / "both", {Q0: 4}, SIZES, tensors=both)
    report = import_adapter(folder, tmp_path / "pack", bases["tied"])
    assert report["replaced"] == ["model.embed_tokens.weight"]
    merged(Pack.open(tmp_path / "pack"), bases["tied"], tmp_path / "out")
    for name, some in (
        ("one", {"lm_head.weight": table}),
        ("two", {**both, "lm_head.weight": table + 1}),
    ):
        folder = write_peft(tmp_path / name, {Q0: 4}, SIZES, tensors=some)
        with raises("mismatch", None, str(bases["tied"])):
            import_adapter(folder, tmp_path / "x", bases["tied"])


def test_experts_go_to_mlx_lm_and_not_to_peft(bases, tmp_path):
    base = load_base(bases["moe"])
    pack = random_pack(base, targets=("switch_mlp.down_proj",)).save(tmp_path / "p")
    with raises("unsupported", None, "switch_mlp.down_proj", "target_parameters"):
        export_pack(pack, "peft", tmp_path / "x")
    check_comes_back(pack, "mlx-lm", tmp_path / "out")
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


def check_rejected(folder: Path, out: Path, model: Path | None, code: str, *names: str) -> None:
    """The adapter is not imported, by an error of one line with these names."""
    with raises(code, None, *names) as error:
        import_adapter(folder, out, model)
    assert "\n" not in error.value.message and not out.exists()


@pytest.mark.parametrize(
    "config, code, names",
    [
        ({"peft_type": "IA3"}, "unsupported", ("peft_type", "'IA3'")),
        ({"bias": "all"}, "unsupported", ("bias", "'all'")),
        ({"lora_bias": True}, "unsupported", ("lora_bias",)),
        ({"trainable_token_indices": [1]}, "unsupported", ("trainable_token_indices",)),
        ({"layer_replication": [[0, 1]]}, "unsupported", ("layer_replication",)),
        ({"target_parameters": ["mlp.experts.w"]}, "unsupported", ("target_parameters",)),
        ({"alora_invocation_tokens": [3]}, "unsupported", ("alora_invocation_tokens",)),
        ({"init_lora_weights": "pissa_niter_4"}, "unsupported", ("'pissa_niter_4'",)),
        ({"lora_alpha": None}, "unreadable", ("lora_alpha", "None")),
        ({"alpha_pattern": {"q_proj": 0}}, "unreadable", ("alpha_pattern: 'q_proj'", "is 0")),
        ({"alpha_pattern": {"q_proj": -8}}, "unreadable", ("alpha_pattern: 'q_proj'", "is -8")),
        ({"alpha_pattern": {"q_proj": math.nan}}, "unreadable", ("'q_proj'", "is nan")),
        ({"rank_pattern": {"q_proj": "8"}}, "unreadable", ("rank_pattern: 'q_proj'", "is '8'")),
        ({"alpha_pattern": {"[": 8}}, "unreadable", ("alpha_pattern: '['",)),
        ({"alpha_pattern": ["q_proj"]}, "unreadable", ("alpha_pattern", "['q_proj']")),
        ({"use_dora": True}, "unreadable", (Q0, "DoRA", "adapter_config.json")),
    ],
)
def test_configs_that_cannot_be_converted_are_named(config, code, names, bases, tmp_path):
    folder = write_peft(tmp_path / "in", {Q0: 4}, SIZES, **config)
    check_rejected(folder, tmp_path / "pack", bases["qwen3"], code, *names)


@pytest.mark.parametrize(
    "name, shape, code",
    [
        (f"{Q0}.lora_B.bias", (128,), "unsupported"),
        ("model.embed_tokens.token_adapter.trainable_tokens_delta", (1, 64), "unsupported"),
        ("model.layers.0.mlp.experts.1.up_proj.lora_A.weight", (4, 64), "unsupported"),
        ("model.layers.9.self_attn.q_proj.lora_A.weight", (4, 64), "unreadable"),
        ("model.layers.0.self_attn.q_norm.lora_A.weight", (4, 64), "unreadable"),
        (f"{Q0}.hada_w1_a", (4, 4), "unsupported"),
        ("model.layers.7.norm.weight", (64,), "mismatch"),
    ],
)
def test_tensors_that_have_no_place_are_named(name, shape, code, bases, tmp_path):
    folder = write_peft(tmp_path / "in", {Q0: 4}, SIZES, tensors={name: mx.ones(shape)})
    module = re.sub(r"\.(lora_A\.)?weight$", "", name)
    check_rejected(folder, tmp_path / "pack", bases["qwen3"], code, module)


def test_dora_on_an_embedding_is_refused(bases, tmp_path):
    magnitudes = {"model.embed_tokens": mx.ones((64,)), Q0: mx.ones((128,))}
    extra = embedding_adapter()
    extra |= {f"{path}.lora_magnitude_vector": m for path, m in magnitudes.items()}
    folder = write_peft(tmp_path / "in", {Q0: 4}, SIZES, tensors=extra, use_dora=True)
    check_rejected(
        folder, tmp_path / "pack", bases["qwen3"], "unsupported", "model.embed_tokens", "DoRA"
    )


def test_a_pickle_is_refused_and_never_opened(bases, tmp_path, monkeypatch):
    folder = write_peft(tmp_path / "in", {Q0: 4}, SIZES)
    (folder / WEIGHTS).unlink()
    pickle = folder / "adapter_model.bin"
    pickle.write_bytes(b"\x80\x04cos\nsystem\n")
    real = Path.open

    def watched(self, *args, **kwargs):
        assert self != pickle, "it was opened"
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", watched)
    for arguments in (folder, pickle):
        check_rejected(arguments, tmp_path / "pack", bases["qwen3"], "unsupported", str(pickle))


def shorten(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-9])


def poison(folder: Path) -> None:
    tensors = mx.load(str(folder / WEIGHTS))
    poisoned = {n: t * math.nan if "q_proj.lora_A" in n else t for n, t in tensors.items()}
    mx.save_safetensors(str(folder / WEIGHTS), poisoned)


def link(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder.parent / "elsewhere")
    (folder / WEIGHTS).symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize(
    ("damage", "code", "named"),
    [
        (shorten, "unreadable", WEIGHTS),
        (poison, "unreadable", f"{Q0}.lora_A"),
        (link, "unreadable", WEIGHTS),
        (lambda f: (f / CONFIG).write_text('{"rank": 3}'), "unsupported", CONFIG),
        (lambda f: (f / CONFIG).write_text("{"), "unreadable", "JSON"),
        (shutil.rmtree, "not-found", "in"),
    ],
)
def test_damaged_poisoned_and_misplaced_files_are_named(bases, tmp_path, damage, code, named):
    folder = write_peft(tmp_path / "in", {Q0: 4}, SIZES)
    damage(folder)
    check_rejected(folder, tmp_path / "pack", bases["qwen3"], code, named)


def test_a_base_is_not_looked_for_outside(tmp_path):
    folder = write_peft(tmp_path / "in", {Q0: 4}, SIZES, base_model_name_or_path="../qwen3")
    check_rejected(folder, tmp_path / "pack", None, "not-found", "../qwen3")


def test_import_of_a_changed_export_reads_its_own_config(exported, tmp_path):
    _, base, folder = exported("ragged", "peft")
    changed = shutil.copytree(folder, tmp_path / "changed")
    edit_json(changed / CONFIG, lambda config: config.update(lora_alpha=2 * config["lora_alpha"]))
    assert not import_adapter(changed, tmp_path / "two", base)["exported_here"]


def test_a_note_that_contradicts_its_adapter_is_rejected(exported, tmp_path):
    folder = shutil.copytree(exported("ragged", "peft")[2], tmp_path / "in")
    note = read_json(folder / SIDECAR)
    note["pack"]["adapters"]["modules"][0]["slices"][0]["alpha"] *= 2
    (folder / SIDECAR).write_text(json.dumps(note))
    check_rejected(folder, tmp_path / "x", None, "mismatch")
    edit_json(folder / SIDECAR, lambda note: note.update(format_version=99))
    check_rejected(folder, tmp_path / "x", None, "unsupported", SIDECAR, "99")


def test_an_adapter_of_mlx_lm_that_names_no_type_is_lora(exported, tmp_path):
    pack, base, folder = exported("uniform", "mlx-lm")
    shutil.copytree(folder, tmp_path / "e", ignore=shutil.ignore_patterns(SIDECAR))
    edit_json(tmp_path / "e" / CONFIG, lambda config: config.pop("fine_tune_type"))
    import_adapter(tmp_path / "e", tmp_path / "q", base)
    assert same_tensors(pack, Pack.open(tmp_path / "q"))


@pytest.mark.parametrize(
    ("file", "change"),
    [
        (CONFIG, lambda c: c.update(fine_tune_type=[])),
        (CONFIG, lambda c: c.update(fine_tune_type=None)),
        (CONFIG, lambda c: c.update(lora_parameters=[])),
        (CONFIG, lambda c: c["lora_parameters"].update(scale=True)),
        (CONFIG, lambda c: c["lora_parameters"].update(scale="2")),
        (CONFIG, lambda c: c["lora_parameters"].update(scale=10**50)),
        (CONFIG, lambda c: c.update(model="half of \udc9b")),
        (SIDECAR, lambda s: s.update(format_version="1")),
        (SIDECAR, lambda s: s.update(sha256=[])),
        (SIDECAR, lambda s: s["sha256"].update({"../x": "0"})),
        (SIDECAR, lambda s: s["pack"].update(license="half of \ud800")),
        (SIDECAR, lambda s: s["pack"].update(base=3)),
        (SIDECAR, lambda s: s["pack"]["adapters"].update(modules=[])),
        (SIDECAR, lambda s: s["pack"]["adapters"]["modules"][0].update(in_features=3)),
        (SIDECAR, lambda s: s["pack"]["adapters"]["modules"].pop()),
    ],
)
def test_values_of_a_wrong_kind_are_rejected(exported, tmp_path, rejected, file, change):
    _, base, folder = exported("uniform", "mlx-lm")
    shutil.copytree(folder, tmp_path / "e")
    edit_json(tmp_path / "e" / file, change)
    error = rejected("import", tmp_path / "e", "--out", tmp_path / "q", "--model", base)
    assert str(tmp_path / "e") in error.message and not (tmp_path / "q").exists()


FACTORS = {f"{Q0}.lora_a": mx.ones((64, 2)), f"{Q0}.lora_b": mx.ones((2, 128))}


@pytest.mark.parametrize(
    ("changes", "tensors", "code", "names"),
    [
        ({"fine_tune_type": "full"}, FACTORS, "unsupported", ["'full'"]),
        ({"fine_tune_type": "dora"}, FACTORS, "unreadable", [Q0, "DoRA"]),
        ({"lora_parameters": {"alpha": 3}}, FACTORS, "unreadable", ["lora_parameters.scale"]),
        ({}, {f"{Q0}.weight": mx.ones((2, 2))}, "unsupported", [f"{Q0}.weight"]),
        ({}, {name: mx.ones(64) for name in FACTORS}, "mismatch", [Q0, "[64]"]),
    ],
)
def test_import_names_what_of_mlx_lm_has_no_place(bases, tmp_path, changes, tensors, code, names):
    folder = tmp_path / "in"
    folder.mkdir()
    config = {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": {"scale": 2.0}}
    (folder / CONFIG).write_text(json.dumps({**config, **changes}))
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    check_rejected(folder, tmp_path / "x", bases["qwen3"], code, *names)


def test_export_to_peft_rejects_an_unknown_family(bases, tmp_path):
    pack = pack_with(bases["qwen3"], tmp_path / "pack", rank=2)
    pack.manifest["base"]["model_type"] = "mamba2"
    with raises("unsupported", None, "mamba2"):
        export_pack(pack, "peft", tmp_path / "x")


def test_commands_print_what_was_done(bases, tmp_path, run):
    pack = pack_with(bases["qwen3"], tmp_path / "pack", rank=2)
    code, out, _ = run("export", pack.path, "--to", "peft", "--out", tmp_path / "out", "--json")
    assert code == 0 and json.loads(out)["modules"] == 14
    assert run("export", pack.path, "--to", "peft", "--out", tmp_path / "out")[0] == 2
    code, out, _ = run("import", tmp_path / "out", "--out", tmp_path / "back")
    assert code == 0 and "lora of rank 2 on 14 modules of qwen3" in out
    assert run("import", pack.path, "--out", tmp_path / "x")[0] == 2
    check(run.error, "conflict", None, str(pack.path))
    assert run("inspect", tmp_path / "out")[0] == 2
    check(run.error, "not-found", None, f"`packs import {tmp_path / 'out'} --out PACK`")


def test_a_fold_that_cannot_be_undone_is_kept_beside_it(exported, tmp_path):
    pack, base, folder = exported("ragged", "mlx-lm")
    odd = [s for s in pack.specs.values() if s.slices[0].scale not in (0.5, 1.0, 2.0)]
    header, _ = read_header(folder / ORIGINALS)
    assert set(header) == {f"{s.path}.lora_b" for s in odd}
    b = pack.load_tensors()[f"{odd[0].path}.lora_b"]
    assert folded(odd[0], b, odd[0].slices[0].scale) is b
    shutil.copytree(folder, tmp_path / "in", ignore=shutil.ignore_patterns(ORIGINALS))
    for out in ("one", "two"):
        assert not import_adapter(tmp_path / "in", tmp_path / out, base)["exported_here"]
        edit_json(tmp_path / "in" / SIDECAR, lambda note: note.update(sha256={}))


def test_tables_that_peft_saved_but_left_alone_are_not_carried(bases, tmp_path):
    own = mx.load(str(bases["qwen3"] / "model.safetensors"))
    same = {n: own[n] for n in ("model.embed_tokens.weight", "lm_head.weight")}
    folder = write_peft(tmp_path / "in", {Q0: 4}, SIZES, tensors=same)
    assert import_adapter(folder, tmp_path / "pack", bases["qwen3"])["replaced"] == []
