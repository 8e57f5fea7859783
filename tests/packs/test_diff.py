"""`packs diff`: distances and cosines against what the dense deltas say."""

import json

import numpy as np

import mlx_packs as mp
from mlx_packs import Pack
from mlx_packs.packs.diff import lines
from mlx_packs.runtime import mx
from tests.helpers.errors import raises
from tests.helpers.packs import BASE

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.10.mlp.down_proj"


def make(folder, modules: dict, tensors: dict, base: dict = BASE, **facts) -> Pack:
    """A pack of given slices (name, width, rank, alpha) and in_features by path."""
    names = ("name", "width", "rank", "alpha")
    entries = [
        {
            "path": path,
            "in_features": width,
            **more,
            "slices": [dict(zip(names, s, strict=True)) for s in slices],
        }
        for path, (width, slices, more) in modules.items()
    ]
    adapters = {"parameters": 1, "groups": [[path] for path in modules], "modules": entries}
    manifest = {"format_version": 1, "kind": "lora", "base": base, "adapters": adapters, **facts}
    return Pack(manifest, {name: mx.array(t) for name, t in tensors.items()}).save(folder)


def factors(path: str, width: int, rank: int, out: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((width, rank)), rng.standard_normal((rank, out))
    return {f"{path}.lora_a": a.astype(np.float32), f"{path}.lora_b": b.astype(np.float32)}


def of_q(folder, tensors: dict, alpha: float = 6.0, **facts) -> Pack:
    """A pack with one adapter, whose factors are [24, rank] and [rank, 40]."""
    rank = tensors[f"{Q}.lora_a"].shape[1]
    return make(folder, {Q: (24, [("q_proj", 40, rank, alpha)], {})}, tensors, **facts)


def lone(folder, rank: int, seed: int, alpha: float = 6.0, **facts) -> Pack:
    return of_q(folder, factors(Q, 24, rank, 40, seed), alpha, **facts)


def delta(pack: Pack, path: str) -> np.ndarray:
    """scale * A @ B in float64, [in, out]."""
    a, b = (np.array(pack.load_tensors()[f"{path}.lora_{x}"]).astype(np.float64) for x in "ab")
    return a @ b * pack.specs[path].slices[0].scale


def close(found, wanted) -> bool:
    return abs(found - wanted) < 1e-9 * max(1.0, abs(wanted))


def test_diff_equals_what_the_dense_deltas_say(tmp_path):
    a, b = lone(tmp_path / "a", 3, 1), lone(tmp_path / "b", 5, 2, alpha=1.0)
    da, db = delta(a, Q), delta(b, Q)
    report = mp.diff(tmp_path / "a", tmp_path / "b")
    (module,) = report["modules"]

    norm = np.linalg.norm
    assert close(module["norm_a"], norm(da)) and close(module["norm_b"], norm(db))
    assert close(module["distance"], norm(da - db))
    assert close(module["relative"], norm(da - db) / norm(da))
    assert close(module["cosine"], np.sum(da * db) / norm(da) / norm(db))

    assert (module["rank_a"], module["rank_b"]) == (3, 5)


def test_diff_of_a_pack_and_itself_its_negative_or_nothing(tmp_path):
    a = lone(tmp_path / "a", 3, 1)
    same = mp.diff(a, a)["total"]
    assert same["relative"] < 1e-12 and close(same["cosine"], 1)
    negative = {n: -t if n.endswith("_b") else t for n, t in factors(Q, 24, 3, 40, 1).items()}
    b = of_q(tmp_path / "b", negative)
    other = mp.diff(a, b)["total"]
    assert close(other["relative"], 2) and close(other["cosine"], -1)
    zero = {n: 0 * t if n.endswith("_b") else t for n, t in factors(Q, 24, 3, 40, 1).items()}
    none = mp.diff(a, of_q(tmp_path / "c", zero))["total"]
    assert close(none["relative"], 1) and none["cosine"] is None


def test_close_packs_keep_their_small_distance(tmp_path):
    """By traces alone, ||a||^2 + ||b||^2 - 2<a, b> would be lost in rounding."""
    near = factors(Q, 24, 3, 40, 1)
    near[f"{Q}.lora_b"][0, 0] *= np.float32(1 + 2**-22)
    a = lone(tmp_path / "a", 3, 1)
    b = of_q(tmp_path / "b", near)
    wanted = np.linalg.norm(delta(a, Q) - delta(b, Q))
    assert 0 < wanted < 1e-5
    assert abs(mp.diff(a, b)["total"]["distance"] - wanted) < 1e-6 * wanted


def test_other_targets_count_whole_and_layers_come_in_order(tmp_path):
    a = lone(tmp_path / "a", 3, 1)
    both = factors(Q, 24, 2, 40, 2) | factors(DOWN, 16, 2, 8, 3)
    slices = {Q: (24, [("q_proj", 40, 2, 2.0)], {}), DOWN: (16, [("down_proj", 8, 2, 2.0)], {})}
    b = make(tmp_path / "b", slices, both)
    report = mp.diff(a, b)
    assert report["only_in_b"] == [DOWN] and report["only_in_a"] == []
    assert [layer["layer"] for layer in report["layers"]] == ["model.layers.0", "model.layers.10"]
    alone = report["layers"][1]
    assert close(alone["distance"], np.linalg.norm(delta(b, DOWN))) and alone["norm_a"] == 0
    assert alone["relative"] is None and alone["cosine"] is None
    squares = [np.sum((delta(a, Q) - delta(b, Q)) ** 2), np.sum(delta(b, DOWN) ** 2)]
    assert close(report["total"]["distance"], np.sqrt(sum(squares)))
    assert not report["shared"]["targets"]["same"]


def test_slices_have_scales_of_their_own(tmp_path):
    """A fused projection, [in, 2 + 1] and [2 + 1, 10 + 6], block-diagonal."""
    path = "transformer.h.0.attn.c_attn"
    tensors = factors(path, 12, 3, 16, 1)
    b = tensors[f"{path}.lora_b"]
    b[:2, 10:], b[2:, :10] = 0, 0
    slices = [("q", 10, 2, 4.0), ("k", 6, 1, 5.0)]
    pack = make(tmp_path / "a", {path: (12, slices, {})}, tensors)
    wanted = tensors[f"{path}.lora_a"] * np.array([2.0, 2.0, 5.0]) @ b.astype(np.float64)
    assert close(mp.diff(pack, pack)["total"]["norm_b"], np.linalg.norm(wanted))


def test_experts_are_compared_one_by_one(tmp_path):
    path = "model.layers.0.mlp.switch_mlp.up_proj"
    deltas = []
    for name, seed in (("a", 1), ("b", 2)):
        rng = np.random.default_rng(seed)
        a, b = rng.standard_normal((3, 2, 8)), rng.standard_normal((3, 10, 2))
        tensors = {f"{path}.lora_a": a.astype(np.float32), f"{path}.lora_b": b.astype(np.float32)}
        make(tmp_path / name, {path: (8, [("up_proj", 10, 2, 2.0)], {"experts": 3})}, tensors)
        a, b = (t.astype(np.float64) for t in tensors.values())
        deltas.append(np.einsum("erd,eor->edo", a, b))
    report = mp.diff(tmp_path / "a", tmp_path / "b")
    assert close(report["total"]["distance"], np.linalg.norm(deltas[0] - deltas[1]))
    assert close(report["total"]["norm_a"], np.linalg.norm(deltas[0]))


def test_other_bases_are_said_and_compared_where_they_can_be(tmp_path, run):
    a = lone(tmp_path / "a", 3, 1)
    b = lone(tmp_path / "b", 3, 2, base=BASE | {"id": "other", "fingerprint": "e" * 64})
    report = mp.diff(a, b)
    assert not report["same_base"] and report["shared"]["base"]["b"] == "e" * 64
    code, out, _ = run("diff", tmp_path / "a", tmp_path / "b")
    assert code == 0 and "note    other bases" in out and "ffffffffffff | eeeeeeeeeeee" in out
    tensors = factors(Q, 16, 3, 40, 1) | factors(DOWN, 24, 3, 40, 1)
    slices = [("q_proj", 40, 3, 6.0)]
    mixed = make(tmp_path / "c", {Q: (16, slices, {}), DOWN: (24, slices, {})}, tensors)
    assert mp.diff(a, mixed)["not_comparable"] == {Q: "24 -> 40 in A, 16 -> 40 in B"}
    wide = make(tmp_path / "d", {Q: (16, slices, {})}, factors(Q, 16, 3, 40, 1))
    with raises("mismatch", None, "q_proj: 24 -> 40 in A, 16 -> 40 in B"):
        mp.diff(a, wide)


def test_shared_facts_say_what_differs(tmp_path, run):
    facts = {"data": {"fingerprint": {"train": "x"}}, "versions": {"mlx": "1"}}
    a = lone(tmp_path / "a", 3, 1, recipe={"iters": 5, "seed": 0}, **facts)
    b = lone(tmp_path / "b", 3, 2, recipe={"iters": 9, "seed": 0}, **facts)
    shared = mp.diff(a, b)["shared"]
    assert shared["data"]["same"] and shared["versions"]["same"] and shared["base"]["same"]
    assert shared["recipe"] == {"same": False, "a": {"iters": 5}, "b": {"iters": 9}}
    out = run("diff", tmp_path / "a", tmp_path / "b")[1]
    assert "recipe    iters 5 | 9" in out and "data      same" in out and "\nlayers.0 " in out
    assert json.loads(run("diff", tmp_path / "a", tmp_path / "b", "--json")[1])["shared"] == shared


def test_what_is_no_plain_delta_is_in_no_figure(tmp_path):
    """DoRA and LoRA of the same factors are not the same, whatever A @ B says."""
    slices = [("q_proj", 40, 3, 6.0)]
    norm = {"model.norm.weight": np.ones(24, np.float32)}
    plain = factors(Q, 24, 3, 40, 1) | factors(DOWN, 24, 3, 40, 2)
    a = make(tmp_path / "a", {Q: (24, slices, {}), DOWN: (24, slices, {})}, plain)
    dora = plain | norm | {f"{Q}.m": np.ones(40, np.float32)}
    modules = {Q: (24, slices, {"kind": "dora"}), DOWN: (24, slices, {})}
    b = make(tmp_path / "b", modules, dora)
    b.manifest["adapters"]["replaced"] = [{"name": "model.norm.weight", "shape": [24]}]

    report = mp.diff(a, b)
    assert [m["path"] for m in report["modules"]] == [DOWN]
    assert report["not_comparable"] == {
        Q: "lora in A, dora in B: its delta is of the base too",
        "model.norm.weight": "is stored in full",
    }
    assert "unlike  2 in all, which are in no figure above" in lines(report)
