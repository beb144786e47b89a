"""The kernels with roles, simulated on a CPU: in any order that the hardware allows, each result is right."""

import json
import os
import subprocess
import sys

import pytest

from lib.fast.gluon import KNOWN
from lib.fast.launch import VERSION

pytestmark = [
    pytest.mark.skipif(VERSION not in KNOWN, reason="Gluon's names change: these kernels are for Triton 3.6 to 3.9"),
    pytest.mark.time_limit(240),
]


@pytest.fixture(scope="module")
def simulated():
    command = [sys.executable, "-m", "tests.house.fast.simulated_kernels"]
    environment = os.environ | {"TRITON_INTERPRET": "0"}  # Gluon is not there in Triton's interpreter
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kernels", ["attention", "stored", "wide", "products", "around a GELU", "loss"])
def test_each_result_is_right_to_the_rounding_of_16_bits(simulated, kernels):
    results = {name: seeds for name, seeds in simulated["found"].items() if name.startswith(kernels)}
    assert len(results) >= 4
    for name, seeds in results.items():
        for seed, result in enumerate(seeds):
            assert "fault" not in result, (name, seed, result)
            assert all(error <= 2 for error in result.values()), (name, seed, result)  # NaN fails too


def test_a_broken_kernel_is_seen(simulated):
    assert len(simulated["broken"]) == 9
    for name, seeds in simulated["broken"].items():
        seen = ["fault" in result or not all(error <= 2 for error in result.values()) for result in seeds]
        assert sum(seen) >= 2, (name, seeds)  # of three; in some orders of events a fault does no harm
