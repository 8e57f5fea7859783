"""`--hosts FILE`: a run on several machines, here on this one twice."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlx_packs.cli.train import launch
from mlx_packs.distributed.link import GONE
from tests.helpers.errors import check, raises
from tests.helpers.ranks import ROOT
from tests.helpers.rows import CHATS, write_rows

HERE = {"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}


def host_file(folder: Path, hosts: object) -> Path:
    file = folder / "hosts.json"
    file.write_text(hosts if isinstance(hosts, str) else json.dumps(hosts))
    return file


def test_bad_host_files_are_rejected(tmp_path):
    with raises("not-found", "hosts", "none.json"):
        launch(tmp_path / "none.json", ["train"])
    for hosts, code, names in (
        ("{", "unreadable", ("hosts.json",)),
        ([], "invalid", ("two machines",)),
        ([HERE], "invalid", ("two machines",)),
        ([HERE, {"ssh": "mac-2"}], "invalid", ("machine 1", '"ips"')),
        ([HERE, HERE | {"ssh": "mac.invalid"}], "network", ("mac.invalid", "ssh")),
    ):
        with raises(code, "hosts", *names):
            launch(host_file(tmp_path, hosts), ["train"])


def test_a_run_on_several_machines_names_its_pack_and_has_one_seed(run):
    assert run("train", "--hosts", "hosts.json")[0] == 2
    check(run.error, "conflict", "out", "--hosts", "--out DIR")
    assert run("train", "--hosts", "hosts.json", "--out", "p", "--seeds", 3)[0] == 2
    check(run.error, "conflict", "seeds", "--hosts")


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", "mlx_packs", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
    )


def rank_of(number: int, out: str) -> int:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command, variables = ((entry / f).read_bytes() for f in ("cmdline", "environ"))
            except OSError:
                continue
            is_rank = f"MLX_RANK={number}\0".encode() in variables
            if is_rank and out.encode() in command and b"mlx_packs" in command:
                return int(entry.name)
    raise AssertionError("there is no such rank")


@pytest.mark.nightly(seconds=30)  # three launches of two machines, the second after one was killed
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds a rank in /proc")
def test_a_run_on_two_machines_resumes_after_one_has_gone(tmp_path):
    file = host_file(tmp_path, [HERE, HERE])
    data = write_rows(tmp_path / "data", train=CHATS, valid=CHATS)
    settings = "--iters 8 --batch-size 2 --save-every 2 --matmul-path dense --val-batches 0"
    args = ("--hosts", str(file), "--model", "tiny", "--data", str(data), "--out", "several")
    args += tuple(settings.split())
    run = start(tmp_path, "train", *args)

    deadline = time.monotonic() + 120
    while not (tmp_path / "several-run" / "step-000002").exists():
        assert time.monotonic() < deadline and run.poll() is None
        time.sleep(0.1)
    os.kill(rank_of(1, "several"), signal.SIGKILL)

    out, messages = run.communicate(timeout=300)
    assert run.returncode == GONE, messages
    assert "rank 1 of 2 has ended" in messages

    run = start(tmp_path, "train", *args, "--resume")
    out, messages = run.communicate(timeout=300)
    assert run.returncode == 0, messages
    assert "[ring]" not in messages and "[WARN]" not in messages
    assert sum(line.startswith("done") for line in out.splitlines()) == 1
