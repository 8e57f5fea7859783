"""packs import and export: folders that cannot be converted, and the error that names the reason."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest

from mlx_packs.convert.external import CONFIG
from mlx_packs.convert.interop import SIDECAR, import_adapter
from mlx_packs.runtime import mx
from tests.convert.conftest import (
    Q0,
    SIZES,
    WEIGHTS,
    edit_json,
    write_peft,
)
from tests.helpers.errors import raises


def check_rejected(folder: Path, out: Path, model: Path | None, code: str, *names: str) -> None:
    """The adapter is not imported, by an error of one line with these names."""
    with raises(code, None, *names) as error:
        import_adapter(folder, out, model)
    assert "\n" not in error.value.message and not out.exists()


EXPERTS = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    "config, code, names",
    [
        ({"peft_type": "IA3"}, "unsupported", ("peft_type", "'IA3'")),
        ({"bias": "all"}, "unsupported", ("bias", "'all'")),
        ({"target_parameters": ["mlp.experts.w"]}, "unsupported", ("target_parameters",)),
        ({"init_lora_weights": "pissa_niter_4"}, "unsupported", ("'pissa_niter_4'",)),
        ({"lora_alpha": None}, "unreadable", ("lora_alpha", "None")),
        ({"alpha_pattern": {"q_proj": 0}}, "unreadable", ("alpha_pattern: 'q_proj'", "is 0")),
        ({"rank_pattern": {"q_proj": "8"}}, "unreadable", ("rank_pattern: 'q_proj'", "is '8'")),
        ({"alpha_pattern": {"[": 8}}, "unreadable", ("alpha_pattern: '['",)),
        ({"alpha_pattern": ["q_proj"]}, "unreadable", ("alpha_pattern", "['q_proj']")),
        ({"use_dora": True}, "unreadable", (Q0, "DoRA", "adapter_config.json")),
        *[
            (
                {"tensors": {name: mx.ones(shape)}},
                code,
                (re.sub(r"\.(lora_A\.)?weight$", "", name),),
            )
            for name, shape, code in (
                (f"{Q0}.lora_B.bias", (128,), "unsupported"),
                (f"{EXPERTS}.1.up_proj.lora_A.weight", (4, 64), "unsupported"),
                ("model.layers.9.self_attn.q_proj.lora_A.weight", (4, 64), "unreadable"),
                (f"{Q0}.hada_w1_a", (4, 4), "unsupported"),
                ("model.layers.7.norm.weight", (64,), "mismatch"),
            )
        ],
    ],
)
def test_configs_and_tensors_that_cannot_be_converted_are_named(
    config, code, names, bases, tmp_path
):
    folder = write_peft(tmp_path / "in", {Q0: 4}, SIZES, **config)
    check_rejected(folder, tmp_path / "pack", bases["qwen3"], code, *names)


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


def test_a_manifest_of_a_newer_format_is_rejected(exported, tmp_path):
    _, base, source = exported("ragged", "peft")
    folder = shutil.copytree(source, tmp_path / "in")
    edit_json(folder / SIDECAR, lambda note: note.update(format_version=99))
    check_rejected(folder, tmp_path / "x", base, "unsupported", SIDECAR, "99")


@pytest.mark.parametrize(
    ("file", "change"),
    [
        (CONFIG, lambda c: c.update(fine_tune_type=[])),
        (CONFIG, lambda c: c["lora_parameters"].update(scale=10**50)),
        (CONFIG, lambda c: c.update(model="half of \udc9b")),
        (SIDECAR, lambda s: s["pack"].update(base=3)),
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
