"""docs/gpu.md: its commands parse, its flags and figures match the code, its links resolve."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from quire_cli import arguments
from quire_cli.stack import plan
from safetensors.torch import save_file

from bench.gpu.parts import chosen_sections
from bench.gpu.run import make_parser as make_bench_parser
from svc_common import config
from tests.unit.engine.published import ROWS
from worker_svc.engine.gpu.ranks import parallel_runner as ranks
from worker_svc.engine.kernels.numerics import device_numerics
from worker_svc.engine.step_runner import MAX_OUT_OF_MEMORY_STEPS
from worker_svc.flags import check_node_flags, engine_config, make_parser

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/gpu.md").read_text()
FENCES = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.M | re.S)
COMMANDS = [line for language, block in FENCES if not language for line in block.splitlines()]
(QWEN3,) = (row for row in ROWS if row.model == "Qwen/Qwen3-8B")
# docker build, quire-scheduler, bench/gpu/pack
FOREIGN_FLAGS = {"--target", "--step-timeout-s", "--compiler", "--kernels", "--peers"}


def of(*words: str) -> list[str]:
    return [line for line in COMMANDS if line.startswith(words)]


def long_flags(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))


def test_the_page_has_commands() -> None:
    words = ("quire-worker ", "quire up ", "bench/gpu/start ", "bench/gpu/pack ")
    assert [len(of(word)) for word in words] == [2, 2, 7, 1]


@pytest.mark.parametrize("line", of("quire-worker "))
def test_workers_accept_the_commands(line: str) -> None:
    args = config.parse(make_parser(), shlex.split(line)[1:])
    assert args.backend == "cuda"


def test_the_commands_of_several_hosts_make_one_worker() -> None:
    texts = re.findall(r"^host-\d\$ quire-worker ((?:.*\\\n)*.*)$", PAGE, re.M)
    hosts = [config.parse(make_parser(), shlex.split(text.replace("\\\n", " "))) for text in texts]
    assert [args.node_rank for args in hosts] == list(range(hosts[0].nnodes)) == [0, 1]
    for args in hosts:
        check_node_flags(args)
    settings = [replace(engine_config(args), node_rank=0) for args in hosts]
    assert settings[0] == settings[1]
    assert hosts[0].node_listen.partition(":")[2] == hosts[1].leader_address.partition(":")[2]


@pytest.mark.parametrize("line", of("quire up "))
def test_quire_up_accepts_the_commands(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    words = shlex.split(line)[1:]
    folder = tmp_path / words[words.index("--model") + 1]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3.config))
    save_file({"model.norm.weight": torch.ones(1)}, folder / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    made = plan.make_plan(arguments.make_parser().parse_args([*words, "--port", "0", "--log-dir", str(tmp_path)]))
    devices = [dict(spec.environment)["CUDA_VISIBLE_DEVICES"].split(",") for spec in made.specs if spec.environment]
    assert len(devices) == 2
    assert not {*devices[0]} & {*devices[1]}


def test_flags_exist() -> None:
    benchmark = (ROOT / "bench/gpu/run.py").read_text()
    known = long_flags(make_parser().format_help()) | long_flags(benchmark) | FOREIGN_FLAGS
    known |= {"--workers"}
    assert long_flags(PAGE) <= known


def test_sections_of_the_benchmark_exist() -> None:
    (chosen,) = re.findall(r"--only ([\w,]+)", PAGE)
    assert [section.name for section in chosen_sections(None, chosen)] == chosen.split(",")
    subprocess.run(["bash", "-n", ROOT / "bench/gpu/pack"], check=True)


@pytest.mark.parametrize("line", of("bench/gpu/start "))
def test_the_benchmark_accepts_the_commands(line: str) -> None:
    args = make_bench_parser().parse_args(shlex.split(line)[1:])
    assert f"{args.budget:.0f} seconds" in PAGE


def test_figures_and_words_match_the_code() -> None:
    assert f"does not finish within {ranks.STUCK_AFTER_S:g} s, because NCCL" in PAGE
    assert f"exit code {ranks.EXIT_RANK_LOST}" in PAGE
    assert MAX_OUT_OF_MEMORY_STEPS == 3
    assert "the third such step" in PAGE
    assert "has numerics 'cuda/triton, sm_90, triton 3.7.1 ptxas 12.8.93 kernels" in PAGE
    assert device_numerics("cuda/triton", ranks.torch.device("cpu"), 1) == "cuda/triton, interpreted, 1 rank"
    extras = (ROOT / "pyproject.toml").read_text()
    assert all(f"\n{name} = [" in extras for name in re.findall(r"'\.\[(\w+)\]'", PAGE))
    defaults = yaml.safe_load((ROOT / "deploy/k8s/quire/values.yaml").read_text())["workerDefaults"]
    assert {"gpuCount", "shmSize"} <= set(defaults)
