"""The store of states: what it returns is what was put, or nothing."""

import numpy as np

from mlx_packs.objectives.state_store import StateStore


def test_what_a_store_forgot_is_not_in_its_file(tmp_path):
    arguments = np.full(3, 2), 0, tmp_path / "a.states", "ab" * 32
    store = StateStore(*arguments)
    for row in range(3):
        store.put(row, np.full(2, row + 1, np.uint8))
    store.forget()
    store.put(0, np.full(2, 1, np.uint8))
    store.close()
    again = StateStore(*arguments)
    assert again.stored().tolist() == [0]
    again.close()


def test_a_store_gives_back_what_was_put_or_nothing(tmp_path):
    sizes = np.array([3, 0, 5])
    rows = [np.frombuffer(b, np.uint8) for b in (b"abc", b"", b"12345")]
    store = StateStore(sizes, 4, tmp_path / "a.states", "ab" * 32)

    for i in (2, 0):
        store.put(i, rows[i])
    assert store.memory_bytes == 3
    assert [bytes(store.get(i)) for i in (0, 2)] == [b"abc", b"12345"]
    assert store.get(1) is None
    store.close()

    other_key = StateStore(sizes, 4, tmp_path / "a.states", "cd" * 32)
    assert [other_key.get(i) for i in range(3)] == [None] * 3
    other_key.close()

    again = StateStore(sizes, 0, tmp_path / "a.states", "ab" * 32)
    assert bytes(again.get(2)) == b"12345"
    again.close()
