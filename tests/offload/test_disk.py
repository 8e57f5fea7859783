"""The disk's rate is measured, remembered, and used for the lines about a base on disk."""

from dataclasses import replace
from pathlib import Path

import pytest

from mlx_packs.measurements import remember
from mlx_packs.offload import disk
from mlx_packs.offload.sizes import BlocksOnDisk

BLOCKS = BlocksOnDisk(36, 36, 120_000_000, 100_000_000)  # a step reads 7.2 GB


def test_the_rate_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path))
    monkeypatch.setattr(disk, "_BYTES", disk._BLOCK)
    assert disk.examine_disk() == disk.disk_rate() > 0


def test_a_plan_says_what_a_step_reads_and_whether_micro_batches_read_together():
    line = "36 of 36 blocks stay on disk; a step reads 7.20 GB, 2.88 s at 2.50 GB/s"
    assert disk.plan_line(BLOCKS) == line
    several = replace(BLOCKS, micro_batches=4, together_bytes=50_000_000)
    line = disk.plan_line(several)
    assert "a step reads 28.8 GB, " in line
    assert "4 micro-batches reads the blocks, as to pass them together uses 50.0 MB" in line
    line = disk.plan_line(replace(several, together=True))
    assert "a step reads 7.20 GB, " in line
    assert line.endswith("; its 4 micro-batches pass each block together")


def test_a_slow_disk_is_named_with_what_a_step_waits(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path))
    remember("disk-rate", {}, {"bytes_per_s": 50e6})
    assert disk.plan_line(BLOCKS).endswith(
        "144 s at 50.0 MB/s; the disk is slow: each step may wait 144 s for it"
    )


LINUX = "/dev/sda on / type ext4 (rw)\nnas:/models on /mnt/nas type nfs4 (rw,relatime)\n"
MAC = "/dev/disk3s1 on / (apfs, local)\n//me@nas/models on /Volumes/My Models (smbfs, nodev)\n"


@pytest.mark.parametrize(
    ("mounts", "file", "place"),
    [
        (LINUX, "/mnt/nas/base/model.safetensors", "on a network volume"),
        (LINUX, "/mnt/other/model.safetensors", None),
        (MAC, "/Volumes/My Models/base/model.safetensors", "on a network volume"),
        (MAC, "/Volumes/Other/model.safetensors", None),
        (MAC, "/Users/me/Library/Mobile Documents/x/model.safetensors", "in iCloud Drive"),
    ],
)
def test_files_that_are_not_on_this_machine_are_named(mounts, file, place, monkeypatch):
    monkeypatch.setattr(disk, "output", lambda _: mounts)
    note = disk.remote_note(Path(file))
    assert note is None if place is None else f": is {place}" in note
