"""What ranks exchange; ranks of one process are a stand-in for MLX's, several are in test_ranks.py."""

import json
import socket
import threading

import numpy as np
import pytest

from mlx_packs.data.batches import TokenCollate
from mlx_packs.data.encoding import Example
from mlx_packs.distributed import link
from mlx_packs.distributed.link import Launched, launched
from mlx_packs.errors import PackError
from tests.helpers.errors import raises
from tests.helpers.ranks import free_ports
from tests.helpers.steps import make_batch


def example(length: int) -> Example:
    target = np.zeros(length, bool)
    target[length // 2 :] = True
    return Example(np.arange(length, dtype=np.int32), target, "here")


@pytest.mark.parametrize(("size", "count"), [(1, 4), (2, 3), (4, 1)])
def test_shares_of_a_batch_are_the_batch(size, count):
    examples = [example(length) for length in (9, 5, 7, 3)]
    batch = make_batch(examples, range(count), 4, 32)
    shares = TokenCollate(4, 32).split(batch, size)

    assert len(shares) == size
    assert sum(share.targets for share in shares) == batch.targets
    targets = [sorted(s.inputs["targets"][: s.targets].tolist()) for s in (batch, *shares)]
    assert sorted(sum(targets[1:], [])) == targets[0]
    assert sum((share.examples for share in shares), ()) == batch.examples

    for share in shares:
        width = batch.inputs["tokens"].shape[1]
        assert share.inputs["tokens"].shape == (4 // size, width)
        tokens = share.inputs["tokens"].reshape(-1)[share.inputs["positions"][: share.targets]]
        # each position is of the token before its target
        assert (tokens + 1 == share.inputs["targets"][: share.targets]).all()


def test_a_launcher_names_the_place_of_a_rank(monkeypatch, tmp_path):
    monkeypatch.delenv("MLX_RANK", raising=False)
    assert launched() is None
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps([["10.0.0.1:4000"], ["10.0.0.2:4001"]]))
    monkeypatch.setenv("MLX_RANK", "1")
    monkeypatch.setenv("MLX_HOSTFILE", str(file))
    assert launched() == Launched(1, 2, "10.0.0.1", 3999, 4001)
    file.write_text("no list")
    with raises("unreadable", None, str(file)):
        launched()
    file.write_text("")
    assert launched() is None


def connected(versions: list[dict], size: int = 3) -> list:
    port = free_ports(1)
    results: list = [None] * size

    def call(rank: int) -> None:
        try:
            results[rank] = link.connect(Launched(rank, size, "127.0.0.1", port), versions[rank])
        except PackError as error:
            results[rank] = error

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(len(versions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_ranks_find_each_other_and_have_the_same_versions():
    for each in connected([{"mlx": "1"}] * 3):
        assert isinstance(each, link.Link)
        each.close()

    errors = connected([{"mlx": "1"}, {"mlx": "1"}, {"mlx": "2"}])
    assert all(isinstance(error, PackError) for error in errors)
    for word in ("rank 2", "mlx 2", "rank 0 1"):
        assert word in errors[0].message
    assert errors[0].code == "mismatch"


def test_a_rank_that_does_not_call_is_named(monkeypatch):
    monkeypatch.setattr(link, "WAIT_S", 0.5)
    first, second, _ = connected([{}, {}])
    assert "rank 2 of 3" in first.message and first.code == "network"
    assert "rank 2 of 3" in second.message


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with raises("busy", "hosts", str(port)):
            link.connect(Launched(0, 2, "127.0.0.1", port), {})
        own = Launched(1, 2, "127.0.0.1", port + 1, port)
        assert str(port) in link._port_fault(own)


def test_ranks_of_different_versions_do_not_train_together():
    errors = connected([{"mlx": "1"}, {"mlx": "1"}, {"mlx": "2"}])
    assert all(isinstance(error, PackError) for error in errors)
    for word in ("rank 2", "mlx 2", "rank 0 1"):
        assert word in errors[0].message
    assert errors[0].code == "mismatch"
