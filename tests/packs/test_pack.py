"""Packs beside the base they were made on: quantization, geometry, manifests, cards."""

import json
import shutil
from pathlib import Path

import pytest

import mlx_packs as mp
from mlx_packs import (
    DataConfig,
    LoRAConfig,
    Pack,
    TrainConfig,
    evaluate,
    load_base,
    train_pack,
)
from mlx_packs.adapters.attach import attach
from mlx_packs.adapters.trainable import round_adapters
from mlx_packs.bases import loading
from mlx_packs.errors import PackError
from mlx_packs.packs.compatibility import find_base, quantize_options
from mlx_packs.packs.facts import model_card
from mlx_packs.packs.making import attach_pack, check_fit
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import write_stored
from tests.helpers.errors import check, raises
from tests.helpers.packs import edit_manifest, random_pack, record_as_is
from tests.helpers.rows import chat, write_rows

EVAL = {
    **{"split": "test", "rows": 2, "targets": 9, "ppl_before": 10.0, "ppl_after": 5.0},
    **{"ppl_before_se": 0.5, "ppl_after_se": 0.25, "accuracy_before": 0.1, "accuracy_after": 0.2},
}


@pytest.fixture(scope="module")
def quantized_folder(tmp_path_factory) -> Path:
    """A folder with a dense checkpoint ``base`` and a pack ``p4`` made on it in 4 bits."""
    folder = tmp_path_factory.mktemp("dense")
    base = load_base(write_stored(folder / "base"), quantize="affine4")
    random_pack(base, facts={"recipe": {"quantize": "affine4"}}).save(folder / "p4")
    return folder


@pytest.fixture(scope="module")
def full_pack(tmp_path_factory) -> Path:
    """A pack on the tiny base with every optional part in its manifest; tests copy it."""
    folder = tmp_path_factory.mktemp("made") / "p"
    recipe = {"quantize": "none", "chat_feature": "talk", "text_feature": "words"}

    random_pack(
        load_base("tiny"),
        facts={
            "objective": {"loss_on": "all"},
            "data": {"source": "d", "rows": {"train": 4, "test": 2}},
            "recipe": {**recipe, "max_seq_length": 16},
            "versions": {"mlx": "0"},
            "eval": EVAL,
            "measured": {"created": "2026-01-01"},
        },
    ).save(folder)
    return folder


@pytest.fixture
def pack(full_pack, here) -> Path:
    return Path(shutil.copytree(full_pack, here / "p"))


def replace_adapters(pack: Path, change) -> None:
    """Change the adapters and the manifest."""
    file = str(pack / "adapters.safetensors")
    tensors = mx.load(file)
    mx.eval(tensors)
    change(tensors)
    mx.save_safetensors(file, tensors)
    record_as_is(pack)


def test_attach_refuses_the_base_in_another_quantization(quantized_folder):
    pack, base = Pack.open(quantized_folder / "p4"), quantized_folder / "base"
    dense, four_bits = load_base(base), load_base(base, quantize="affine4")
    with raises("mismatch", "quantize", "affine 4-bit g64", "is dense", "quantize='affine4'"):
        attach_pack(dense, pack)
    with raises("mismatch", "quantize", "affine 4-bit g64", "is affine 8-bit g64"):
        attach_pack(load_base(base, quantize="affine8"), pack)
    attach_pack(four_bits, pack).detach()
    with raises("mismatch", "quantize", "as dense", "affine 4-bit"):
        attach_pack(four_bits, random_pack(dense))


def test_commands_quantize_the_base_as_the_pack_was_trained(quantized_folder, here, run):
    pack = Path(shutil.copytree(quantized_folder / "p4", here / "p4"))
    rows = write_rows(here / "d", train=[{"text": "one two three"}], test=[{"text": "four five"}])
    model = ("--model", quantized_folder / "base")
    code, out, err = run("eval", pack, *model, "--data", rows, "--json")
    report = json.loads(out)
    assert code == 0 and report["ppl_ratio"] != 1, err
    alone = evaluate(load_base(quantized_folder / "base", quantize="affine4"), None, rows)
    assert alone.base.ppl == pytest.approx(report["base"]["ppl"], rel=1e-5)
    assert run("generate", "--pack", pack, *model, "--prompt", "a", "--max-tokens", 2)[0] == 0
    edit_manifest(pack, lambda m: m["recipe"].update(quantize="none"))  # of a base loaded so
    for dry in (("--dry-run",), ()):
        code, out, err = run("apply", pack, *model, *dry, "--json")
        assert code == 0 and json.loads(out)["fits"], err


@pytest.mark.parametrize(
    ("bits", "finer"), [(None, ()), (3, ()), (4, ("model.layers.1.mlp.down_proj",))]
)
def test_a_pack_fits_its_base_of_any_format(tmp_path, bits, finer):
    folder = write_stored(tmp_path / "base", bits, finer)
    pack = random_pack(load_base(folder)).save(tmp_path / "p")
    assert check_fit(pack, str(folder))["geometry"] == "checked"


def test_apply_dry_run_names_a_module_that_does_not_fit(pack, rejected):
    name, other = "model.layers.0.mlp.down_proj", "model.layers.6.mlp.down_proj"
    (module,) = [x for x in Pack.open(pack).manifest["adapters"]["modules"] if x["path"] == name]

    def change(old: str, **facts):
        def edit(manifest):
            next(x for x in manifest["adapters"]["modules"] if x["path"] == old).update(facts)

        edit_manifest(pack, edit)

    def rename(tensors):
        for x in ("lora_a", "lora_b"):
            tensors[f"{other}.{x}"] = tensors.pop(f"{name}.{x}")

    wide = lambda t: mx.pad(t, ((0, 32), (0, 0)))  # noqa: E731
    change(name, in_features=module["in_features"] + 32)
    replace_adapters(pack, lambda t: t.update({f"{name}.lora_a": wide(t[f"{name}.lora_a"])}))
    check(rejected("apply", "p", "--dry-run"), "mismatch", None, f"{name}: ", "800", "768")
    change(name, path=other)
    replace_adapters(pack, rename)
    check(rejected("apply", "p", "--dry-run"), "mismatch", None, f"p: {other}: ", "tiny")


def _set(path: str, value=None, drop: bool = False):
    def change(manifest):
        *parents, last = (int(key) if key.isdigit() else key for key in path.split("."))
        for key in parents:
            manifest = manifest[key]
        if drop:
            del manifest[last]
        else:
            manifest[last] = value

    return change


SLICE = "adapters.modules.0.slices.0"
DAMAGED = [
    *[(_set(path, drop=True), path) for path in ("base.id", "adapters.groups", "files")],
    (_set("base.quantization", {"bits": "4", "group_size": 64}), "base.quantization.bits"),
    (_set("recipe.max_seq_length", "x"), "recipe.max_seq_length"),
    (_set("objective", {"json_layout": {"keys": [1]}}), "objective.json_layout.keys"),
    (_set("eval.ppl_after", "low"), "eval.ppl_after"),
    (_set("adapters.modules.0.slices", []), "adapters.modules[0].slices"),
    (_set(f"{SLICE}.rank", -1), "adapters.modules[0].slices[0].rank"),
    (_set(f"{SLICE}.alpha", float("nan")), "adapters.modules[0].slices[0].alpha"),
    (_set("files", {"adapters.safetensors": {"bytes": 1}}), "files.adapters.safetensors.sha256"),
    (_set("sum_of", [1]), "sum_of[0]"),
    (_set("adapters.replaced", [{"name": "model", "shape": []}]), "adapters.replaced[0].name"),
]


@pytest.mark.parametrize(("change", "key"), DAMAGED, ids=lambda v: v if isinstance(v, str) else "")
def test_open_names_the_key_of_a_damaged_manifest(pack, change, key):
    edit_manifest(pack, change)
    with raises("unreadable", None, "p/pack.json: ", f"({key} must be "):
        Pack.open("p")


def test_a_pack_of_a_path_is_the_one_that_open_returns(full_pack):
    assert mp.Pack(full_pack) == mp.Pack(str(full_pack)) == Pack.open(full_pack)


def test_save_refuses_what_could_not_be_opened(full_pack, tmp_path):
    pack = Pack.open(full_pack)
    pack.load_tensors()
    _set(f"{SLICE}.alpha", -1.0)(pack.manifest)
    with raises("invalid", None, "slices[0].alpha"):
        pack.save(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_double_quantization_is_as_in_the_manifest_or_single(pack):
    for more, double in (({}, False), ({"double_quant": True}, True)):
        nf4 = {"mode": "nf4", "bits": 4, "group_size": 64, "keep": None, **more}
        edit_manifest(pack, _set("base.quantization", nf4))
        assert quantize_options(Pack.open(pack)) == {"double_quant": double, "keep": ()}


def test_attach_names_a_full_tensor_that_the_base_lacks(pack, shared_tiny):
    edit_manifest(pack, _set("adapters.replaced", [{"name": "model.layers", "shape": [1]}]))
    replace_adapters(pack, lambda t: t.update({"model.layers": mx.ones((1,))}))
    with raises("mismatch", None, "model"):
        attach_pack(shared_tiny, Pack.open(pack))


@pytest.mark.parametrize(
    ("change", "code", "name"),
    [
        ({"dtype": "XX"}, "unreadable", "XX"),
        ({"dtype": "I32"}, "unsupported", "I32"),
        ({"shape": [100_000, 100_000]}, "unreadable", "offset for tensor"),
    ],
)
def test_a_header_that_lies_is_one_clear_line(pack, rejected, change, code, name):
    file = pack / "adapters.safetensors"
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    next(t for name, t in header.items() if name != "__metadata__").update(change)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
    record_as_is(pack)
    check(rejected("diff", "p", "p"), code, None, "p/adapters.safetensors: ", name)


@pytest.mark.parametrize(
    ("command", "shape"),  # of the first tensor; none is without it
    [
        ("export p --to peft --out o", None),
        ("diff p p", None),
        ("diff p p", (3, 5)),
        ("combine p=0.5 q=0.5 --out o --rows 1", (3, 5)),
        ("generate --pack p=0.5 --prompt x", None),
        ("generate --pack p=0.5 --prompt x", (2,)),
    ],
)
def test_tensors_that_are_not_the_manifests_are_rejected(pack, here, rejected, command, shape):
    shutil.copytree(pack, here / "q")
    name = min(mx.load(str(pack / "adapters.safetensors")))
    replace_adapters(pack, lambda t: t.update({name: mx.zeros(shape)}) if shape else t.pop(name))
    check(rejected(*command.split()), "mismatch", None, "p/adapters.safetensors: ", name)
    assert not (here / "o").exists()


def test_a_pack_of_a_newer_format_says_so(pack, rejected):
    (pack / "pack.json").write_text('{"format_version": 2}')
    check(rejected("inspect", "p"), "unsupported", None, "p/pack.json: ", "format 2", "(1)")


@pytest.mark.parametrize("empty", [None, {}])
def test_optional_parts_of_a_manifest_may_be_missing(pack, run, empty):
    edit_manifest(
        pack, lambda m: (m["eval"].pop("ppl_before_se"), m["eval"].update(ppl_after_se=None))
    )
    assert "held-out PPL 10.00 → 5.00 on 2 test examples" in run("inspect", "p")[1]
    for part in "versions objective measured data eval recipe".split():
        edit_manifest(pack, _set(part, empty))
        code, out, err = run("inspect", "p")
        assert code == 0 and "base    tiny" in out, err
    assert run("apply", "p", "--dry-run")[0] == 0


def test_model_card_prints_a_command_that_can_load_the_base(full_pack):
    manifest = Pack.open(full_pack).manifest
    named = {**manifest, "base": {**manifest["base"], "id": "owner/name"}}
    with_images = {**named, "data": {**manifest["data"], "images": 7}}
    of_gguf = {**manifest, "base": {**manifest["base"], "id": "model.Q4_1.gguf"}}
    quantized = {**named, "recipe": {"quantize": "affine4"}}
    for facts, command in (
        (manifest, "packs generate ."),
        (named, "mlx_lm.generate --model owner/name --adapter-path ."),
        (quantized, "packs generate . --model owner/name"),
        (with_images, "packs generate . --model owner/name --image FILE"),
        (of_gguf, "packs generate . --model model.Q4_1.gguf"),  # mlx-lm does not read it
    ):
        card = model_card(facts, "p")
        assert f"\n{command} --prompt ...\n" in card
        assert ("\npipeline_tag: image-text-to-text\n" in card) == (facts is with_images)
    assert "\n- eval: held-out PPL 10.00 ± 0.50 → 5.00 ± 0.25 on " in model_card(manifest, "p")


def test_an_evaluation_takes_columns_and_length_from_the_pack_or_flags(pack, shared_tiny, run):
    rows = write_rows(Path("d"), train=[{"words": "x"}], test=[{"words": "one two three " * 20}])
    assert evaluate(shared_tiny, "p", rows).targets == 15  # 16 tokens, the first is not predicted
    assert evaluate(shared_tiny, "p", rows, max_seq_length=9).targets == 8
    with raises("data", None, "{text}", "['words']"):
        evaluate(shared_tiny, "p", columns=DataConfig(data=str(rows), text_feature="text"))

    rows = write_rows(Path("e"), train=[{"w": "x"}], test=[{"w": "one two three"}])
    assert run("eval", "p", "--data", rows)[0] == 2
    check(run.error, "data", None, "{words}", "['w']")
    code, out, err = run("eval", "p", "--data", rows, "--text-feature", "w", "--json")
    assert code == 0 and json.loads(out)["rows"] == 1, err


@pytest.mark.parametrize(
    "args",
    [("apply", "p"), ("eval", "p", "--data", "d"), ("generate", "--pack", "p", "--prompt", "a")],
)
def test_commands_run_code_of_a_checkpoint_only_when_told_to(here, monkeypatch, run, args):
    base = write_stored(here / "base")
    random_pack(load_base(base)).save(here / "p")
    write_rows(here / "d", train=[{"text": "x y"}], test=[{"text": "one two"}])
    trusted = []

    def load(path, trust_remote_code, pack):
        trusted.append(trust_remote_code)
        raise PackError("stop")

    monkeypatch.setattr(loading, "load_model_of", load)
    run(*args, "--model", "base")
    run(*args, "--model", "base", "--trust-remote-code")
    assert trusted == [False, True]


@pytest.mark.parametrize("place", ["here", "beside"])
def test_the_base_of_a_pack_is_found(quantized_folder, here, run, place):
    """Its folder stands here, or where the run beside the pack says."""
    shutil.copytree(quantized_folder / "p4", here / "p4")
    shutil.copytree(quantized_folder / "base", here / {"here": "base", "beside": "other"}[place])
    generate = ("generate", "--pack", "p4=0.5", "--prompt", "a", "--max-tokens", 2)

    if place == "beside":
        assert run(*generate)[0] == 2
        check(run.error, "not-found", "model", "base", "--model DIR")
        (here / "p4-run").mkdir()
        identity = {"recipe": {"model": str(here / "other")}}
        (here / "p4-run" / "config.json").write_text(json.dumps(identity))

    assert run(*generate)[0] == 0
    assert run("apply", "p4", "--dry-run")[0] == 0
    assert find_base(Pack.open("p4")) == {"here": "base", "beside": str(here / "other")}[place]

    (here / "p4-run").mkdir(exist_ok=True)
    (here / "p4-run" / "config.json").write_text("[]")
    assert run("apply", "p4", "--dry-run")[0] == {"here": 0, "beside": 2}[place]


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_half_precision_halves_a_pack_and_opens_as_it_was_measured(dtype, tmp_path, run):
    base = write_stored(tmp_path / "base")
    rows = [chat(f"Say {word}.", f"Yes, {word}.") for word in "one two six ten red sun".split()]
    data = write_rows(tmp_path / "data", train=rows, valid=rows[:3])

    def trained(pack_dtype: str, **how):
        few = {"iters": 2, "batch_size": 2, "learning_rate": 2e-3}
        train = TrainConfig(pack_dtype=pack_dtype, **few)
        return train_pack(base, data, LoRAConfig(rank=32), train, tmp_path / "p", **how)

    half = trained(dtype)
    file = half.pack.path / "adapters.safetensors"
    size, stored = file.stat().st_size, mx.load(str(file))
    mx.eval(stored)
    assert half.pack.manifest["adapters"]["dtype"] == dtype
    report = evaluate(load_base(base), half.pack.path, data, batch_size=2)
    assert report.pack.ppl == pytest.approx(half.report["ppl_after"], rel=1e-5)
    assert f"parameters ({dtype}) on" in run("inspect", half.pack.path)[1]

    # the run itself stays in float32, so that it can be resumed to any dtype
    full = trained("float32", resume=True)
    assert half.report["ppl_after"] == pytest.approx(full.report["ppl_after"], rel=1e-3)
    assert size < 0.52 * file.stat().st_size
    tensors = full.pack.load_tensors()
    assert tensors.keys() == stored.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == mx.float32 and stored[name].dtype == getattr(mx, dtype), name
        assert mx.array_equal(stored[name], tensor.astype(stored[name].dtype)).item(), name


def test_an_adapter_too_large_for_float16_is_refused(shared_tiny):
    attached = attach(shared_tiny, LoRAConfig(rank=2, target_modules=("q_proj",)))
    attached.load({n: mx.full(t.shape, 1e5) for n, t in attached.tensors().items()}, "large")
    with raises("mismatch", "pack_dtype", "lora_", "float16"):
        round_adapters(attached, "float16")
    round_adapters(attached, "bfloat16")
    attached.detach()
