"""The names that a pack shows in completion and on the page of the Python reference."""

import pytest

from mlx_packs import Base, Pack, PackError


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def test_a_pack_shows_what_users_call_and_nothing_internal():
    calls = {"open", "save", "verify", "load_tensors", "merge", "export", "push"}
    facts = {"name", "short_name", "size_mb", "specs"}
    kinds = {"is_reward_model", "is_classifier"}
    attributes = {"path", "tensors", "parts", "examples"}  # those of them that have defaults
    assert public(Pack) == calls | facts | kinds | attributes


def test_a_base_attaches_and_detaches_packs_and_shows_itself_in_a_line(shared_tiny):
    assert {"attach", "detach", "applied", "generate", "stream"} <= public(Base)
    assert "swap_pack" not in public(Base)
    assert repr(shared_tiny) == "Base('tiny', qwen3, affine 4-bit g64, computes in float32)"


def test_what_is_no_pack_is_rejected_in_a_line(shared_tiny):
    with pytest.raises(PackError, match="pack: must be text, a path, a pack"):
        shared_tiny.attach(None)
