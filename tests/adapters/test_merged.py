"""A pack of --for-merge is applied without the code that trains it."""

import sys

from mlx_packs import LoRAConfig, Pack, load_base, merge_pack
from mlx_packs.adapters.attach import attach
from mlx_packs.packs.making import pack_of
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import write_dense
from tests.helpers.packs import edit_manifest

TOKENS = mx.array([[5, 9, 3, 77, 12, 40], [1, 2, 3, 4, 5, 6]])


def test_a_pack_is_applied_as_its_merge_without_extras(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx_packs.extras.for_merge", None)
    folder = write_dense(tmp_path / "dense", vocab_size=4096)
    base = load_base(folder)
    before = base.model(TOKENS)
    attached = attach(base, LoRAConfig(rank=4))
    mx.random.seed(1)
    attached.load(
        {name: 0.1 * mx.random.normal(t.shape) for name, t in attached.tensors().items()}, "test"
    )
    pack_of(attached).save(tmp_path / "p")
    attached.detach()
    edit_manifest(tmp_path / "p", lambda manifest: manifest["adapters"].update(for_merge="affine4"))

    pack = Pack.open(tmp_path / "p")
    with base.applied(pack):
        applied = base.model(TOKENS)
    assert mx.array_equal(base.model(TOKENS), before).item()
    assert merge_pack(pack, folder, tmp_path / "m", "affine4", rows=2)["kl_mean"] <= 1e-5
    merged = load_base(tmp_path / "m").model(TOKENS)
    assert mx.allclose(merged, applied, atol=2e-3).item()
    assert not mx.allclose(merged, before, atol=0.1).item()
