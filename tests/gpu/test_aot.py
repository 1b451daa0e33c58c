"""Every kernel compiles for sm_90 within its bounds, and the engine compiles none after start-up. No GPU needed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.aot import loop_waits
from tests.cpu_limit import limited

pytestmark = pytest.mark.timeout(1800)  # a backstop: `limited` counts processor time

ROOT = Path(__file__).resolve().parents[2]


def compiled(module: str, *flags: str, **variables: str) -> Any:
    """The JSON in the last line of the module's output."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    command = limited([sys.executable, "-m", module, *flags], cpu_s=180)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.deep
def test_a_worker_compiles_all_kernels_in_processes_and_its_next_start_none(tmp_path):
    (first,) = compiled("bench.gpu.dry_run", "--short", TRITON_CACHE_DIR=str(tmp_path))
    assert first["graphs"] > 0
    assert first["in_processes"] == first["kernels"] > 0
    (second,) = compiled("bench.gpu.dry_run", "--short", TRITON_CACHE_DIR=str(tmp_path))
    assert second == first | {"in_processes": 0}
    assert first["by_launches"] == first["while_recording"] == first["by_requests"] == []


@pytest.mark.deep
def test_workers_of_other_decoders_compile_all_kernels_at_start_up():
    for worker in compiled("tests.gpu.dry_architectures"):
        assert worker["graphs"] > 0
        assert worker["by_launches"] == worker["while_recording"] == worker["by_requests"] == []


PRODUCTS = (
    "attention", "fp8 linear", "int8 linear", "int4 linear", "experts exact", "experts few", "experts fp8",
    "adapters shrink",
)  # fmt: skip


def test_kernels_compile_within_bounds():
    kernels = {kernel["name"]: kernel for kernel in compiled("bench.gpu.aot")["kernels"]}
    assert kernels["attention 0.6b prefill page 256"]["mma"]["HGMMA"] > 0
    assert kernels["attention 0.6b exact page 256"]["mma"]["HGMMA"] > 0
    assert kernels["attention 0.6b decode page 256"]["mma"]["LDGSTS"] > 0  # asynchronous loads through the block table
    waits = {name: kernel["waits"] for name, kernel in kernels.items() if name.startswith(PRODUCTS)}
    assert all(any(name.startswith(start) for name in waits) for start in PRODUCTS)
    assert all(waits.values())
    assert all(min(each) > 0 for each in waits.values())  # no loop waits for the loads that it has just issued
    check_merges(kernels)
    check_early_reads(kernels)


def check_merges(kernels: dict[str, Any]) -> None:
    """Loads of several splits overlap where they are merged. Units are taken without a fence; the one that is left is
    that of the program that announces a split."""
    divided = [kernel for name, kernel in kernels.items() if re.match(r"attention .* (decode|exact) ", name)]
    assert len(divided) > 2
    for kernel in divided:
        asynchronous, others = kernel["merge_loads"]
        assert asynchronous > 0
        assert others == 0
        assert kernel["fences"] == 1
        assert kernel["loop_spills"] == 0
    prefills = [kernel for name, kernel in kernels.items() if re.match(r"attention .* prefill ", name)]
    assert prefills
    assert {kernel["fences"] for kernel in prefills} == {0}


def check_early_reads(kernels: dict[str, Any]) -> None:
    """Kernels wait for their predecessor before they read anything but weights."""
    early = {name: kernel["early"] for name, kernel in kernels.items() if kernel["early"] is not None}
    norms = {name for name in early if name.startswith("rope_store") and "norm=True" in name}
    assert len(norms) > 1
    assert all(early[name] == ["k_norm_ptr", "q_norm_ptr"] for name in norms)
    rounding = {name for name in early if name.startswith("fp8 norm")}
    assert rounding
    assert all(early[name] == ["weight_ptr"] for name in {"norm", *rounding})
    assert early["norm layer"] == ["bias_ptr", "weight_ptr"]
    linears = {name for name in early if name.startswith(("linear", "fp8 linear", "int8 linear"))}
    assert "linear bias=False" in linears
    assert all(early[name] == ["weight_ptr"] for name in linears)
    others = early.keys() - norms - linears - rounding - {"norm", "norm layer"}
    assert sum(name.startswith("attention") for name in others) > 1
    assert not any(early[name] for name in others)


LOOP = """
        /*0000*/                   LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64] ;
        /*0010*/                   DEPBAR.LE SB0, 0x7 ;
        /*0020*/                   DEPBAR.LE SB0, {wait} ;
        /*0030*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0040*/                   LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64] ;
        /*0050*/                   DEPBAR.LE SB0, 0x5 ;
        /*0060*/              @!P0 BRA 0x20 ;
        /*0070*/                   BRA 0x0 ;
"""


@pytest.mark.parametrize(("wait", "expected"), [("0x0", 0), ("0x3", 3)])
def test_the_first_wait_of_the_innermost_loop_is_found(wait, expected):
    assert loop_waits(LOOP.format(wait=wait)) == (expected,)
