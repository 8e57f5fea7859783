"""Which profile computes."""

import pytest

from mlx_packs import runtime
from mlx_packs.cpu.profile import CPU
from mlx_packs.ops.profile import GPU, profile


@pytest.mark.parametrize(("device", "expected"), [("cpu", CPU), ("gpu", GPU)])
def test_the_profile_is_that_of_the_device(device, expected):
    with runtime.assumed_device(device):
        assert profile() is expected
