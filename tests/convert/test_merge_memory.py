"""packs merge of a base that is large for the memory: its blocks pass one after another."""

import pytest

from mlx_packs import load_base
from mlx_packs.convert import fidelity
from mlx_packs.convert.merge import merge_pack
from tests.helpers.checkpoints import write_stored
from tests.helpers.interpreter import run_python
from tests.helpers.packs import random_pack
from tests.helpers.variants import slow_except

BLOCKS = {
    "num_hidden_layers": 24,
    "hidden_size": 256,
    "intermediate_size": 1536,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FIXED_BYTES = 16 << 20  # of activations and logits, which do not grow with the base
MERGE = """
from mlx_packs.convert import fidelity
from mlx_packs.convert.merge import merge_pack
from mlx_packs.runtime import mx

fidelity._LARGE_SHARE = 0.0
options = {{"requantize": "{requantize}", "rows": 2, "max_drift": 10.0, "progress": False}}
assert merge_pack("{pack}", "{base}", "{out}", **options)["passed"]
print(mx.get_peak_memory())
"""


@pytest.mark.slow
@pytest.mark.parametrize("requantize", ["none", "nf4"])
def test_a_merge_needs_a_few_blocks_of_memory(requantize, tmp_path):
    base = write_stored(tmp_path / "base", **BLOCKS)
    pack = random_pack(load_base(base, lazy=True), targets=TARGETS).save(tmp_path / "pack")
    out = tmp_path / "out"
    # A process of its own: arrays of other tests, freed in the merge, would hide its peak.
    code = MERGE.format(requantize=requantize, pack=pack.path, base=base, out=out)
    peak = int(run_python(code, MLX_PACKS_CACHE=str(tmp_path / "cache")))
    nbytes = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    assert peak < nbytes / 3 + FIXED_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "requantize"), slow_except([(4, "none"), (None, "affine8")], (4, "none"))
)
def test_the_drift_does_not_depend_on_where_the_base_is(bits, requantize, tmp_path, monkeypatch):
    base = write_stored(tmp_path / "base", bits=bits)
    pack = random_pack(load_base(base)).save(tmp_path / "pack")
    options = {"requantize": requantize, "rows": 2, "max_drift": 10.0, "progress": False}
    in_memory = merge_pack(pack, base, tmp_path / "in_memory", **options)
    monkeypatch.setattr(fidelity, "_LARGE_SHARE", 0.0)
    on_disk = merge_pack(pack, base, tmp_path / "on_disk", **options)

    assert on_disk["same_token"] == in_memory["same_token"]
    # some processors round by the alignment of weights: 1e-3 of a KL of 3e-5 nats
    tolerances = {"kl_mean": 5e-3, "kl_of_pack": 5e-3, "ppl_before": 1e-6, "ppl_after": 1e-6}
    for name, most in tolerances.items():
        assert on_disk[name] == pytest.approx(in_memory[name], rel=most)
