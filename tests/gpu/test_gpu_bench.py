"""The GPU benchmark keeps to its time budget, continues where it stopped, and survives failing sections."""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import triton

from bench.gpu import exact_bits, kernel_times, model, peers, self_checks, toolchain
from bench.gpu.extras import blocks, extras
from bench.gpu.libraries import libraries
from bench.gpu.parts import PARTS, chosen_sections
from bench.gpu.report import Report
from bench.gpu.run import END_S, make_parser, show, unpack_kernels
from bench.gpu.sections import Section, run_all
from tests.cpu_limit import limited
from tests.gpu import fake_flash3, fake_flash_attn

ROOT = Path(__file__).resolve().parents[2]


def fine(report):
    report.figures["found"] = 7
    report.row("fine", "a row", ok=True, ms=1.0)


def fails(report):
    raise RuntimeError(f"no device, but {report.figures['found']}")


def hangs(report):
    report.row("hangs", "before")
    signal.pause()


def dies(report):
    os._exit(3)


def takes_long(report):
    report.ends_at = 0.0
    report.row("takes_long", "first")
    report.row("takes_long", "second")


def section(function, limit_s: float = 60.0, name: str = "") -> Section:
    return Section(name or function.__name__, limit_s, f"{__name__}:{function.__name__}")


def run(report: Report, sections: list[Section], budget_s: float = 100.0) -> list[tuple]:
    run_all(sections, report, budget_s, lambda: None)
    return [(row["section"], row["name"], row["ok"]) for row in report.rows]


def test_a_failing_section_does_not_affect_the_others(tmp_path):
    report = Report(is_smoke=True)
    sections = [section(f) for f in (fine, fails, dies, takes_long)]
    sections += [section(hangs, 1.0), section(fine, 9000.0, "late"), section(fine, name="again")]
    assert run(report, sections) == [
        ("fine", "a row", True), ("fails", "failed", False), ("dies", "died", False), ("takes_long", "first", None),
        ("takes_long", "remaining rows", None), ("hangs", "before", None), ("hangs", "killed", False),
        ("late", "skipped", None), ("fine", "a row", True),
    ]  # fmt: skip
    assert report.rows[1]["note"] == "RuntimeError: no device, but 7"
    assert report.done == ["fine", "fails", "dies", "again"]
    assert report.cuts == ["takes_long", "hangs"]


def test_a_later_command_continues(tmp_path):
    first = Report(is_smoke=True)
    run(first, [section(fine, 2.0), section(hangs, 5.0)], budget_s=3.0)
    first.write(tmp_path, "gpu")
    second = Report(is_smoke=True)
    second.restore(tmp_path / "gpu.json")
    assert second.done == ["fine"]
    assert second.figures["found"] == 7
    assert second.cuts == ["hangs"]
    assert [row["name"] for row in second.rows] == ["a row", "before", "killed"]
    assert run(second, [section(fine, name="hangs")])[-1] == ("fine", "a row", True)
    assert len(second.rows) == 2  # the rows of the earlier attempt are gone


@pytest.mark.parametrize("part", PARTS)
def test_the_sections_of_a_part_fit_its_budget(part):
    starting = 10.0  # imports
    budget = make_parser().get_default("budget")
    for left_out in ("wrong", "right"):
        limits = [section.limit_s for section in PARTS[part] if section.when != left_out]
        assert sum(limits) + starting + END_S <= budget <= 600 - 30


@pytest.mark.deep
def test_embeddings_and_beams_pass_their_checks(tmp_path):
    report = Report(is_smoke=True, scratch=tmp_path)
    extras(report)
    assert [row["ok"] for row in report.rows] == [True] * 6


def test_moved_blocks_pass_their_checks(tmp_path, monkeypatch):
    monkeypatch.setattr(model, "SMOKE_SETTINGS", model.SMOKE_SETTINGS | {"kernels": "torch"})
    report = Report(is_smoke=True, scratch=tmp_path)
    blocks(report)
    verdicts = {row["name"]: row["ok"] for row in report.rows if row["ok"] is not None}
    names = ("row from moved blocks = computed, bits", "8 tokens, copies = blocks, bits")
    assert verdicts == dict.fromkeys(names, True)


def compiles(report):
    report.row("compiles", "a row")
    for name, is_hit in (("cached_kernel", True), ("late_kernel", False), ("late_kernel", False)):
        triton.knobs.compilation.listener(src=SimpleNamespace(name=name), cache_hit=is_hit, metadata={})


def test_kernels_that_a_section_compiles_are_reported():
    report = Report(is_smoke=True)
    run(report, [section(compiles)])
    assert [(row["name"], row["note"]) for row in report.rows] == [("a row", ""), ("compiled late", "2 x late_kernel")]


def names(*arguments, **fields) -> list[str]:
    return [found.name for found in chosen_sections(*arguments, **fields)]


def test_every_part_compiles_and_measures_the_limits_first():
    assert names(2, "")[:3] == ["compile", "ceilings", "decode_steps"]
    done = ["compile", "ceilings", "decode_steps", "in_process"]
    assert names(2, "", done=done)[:1] == ["through_grpc"]
    assert names(None, "", done=done)[:1] == ["environment"]


def test_a_section_that_was_cut_runs_again_behind_the_others_but_not_a_third_time():
    done = ["compile", "ceilings"]
    assert names(2, "", done=done, cuts=["in_process"])[-1] == "in_process"
    assert "in_process" not in names(2, "", done=done, cuts=["in_process"] * 2)
    assert "in_process" in names(2, "in_process", done=done, cuts=["in_process"] * 2)


def finds_a_wrong_kernel(report):
    report.figures["wrong_kernels"] = ["linear"]
    report.row("finds", "linear", ok=False)


def test_no_speed_is_measured_with_wrong_kernels():
    sections = [
        Section("reason", 60.0, f"{__name__}:fine", "wrong"), section(finds_a_wrong_kernel),
        Section("speed", 60.0, f"{__name__}:fine", "right"), section(fine, name="other"),
        Section("why", 60.0, f"{__name__}:fine", "wrong"),
    ]  # fmt: skip
    report = Report(is_smoke=True)
    report.figures["found"] = 0
    run(report, sections)
    assert [(row["by"], row["name"]) for row in report.rows] == [
        ("finds_a_wrong_kernel", "linear"), ("speed", "skipped"), ("other", "a row"), ("why", "a row"),
    ]  # fmt: skip
    assert report.rows[1]["note"] == "linear failed the self_checks"
    assert report.done == ["finds_a_wrong_kernel", "other", "why"]


def test_a_check_that_fails_names_its_kernel(monkeypatch):
    def checks_of(setup):
        def wrong():
            raise RuntimeError("a wrong result")
            yield

        yield from (("attention", iter(())), ("linear", wrong()), ("norm", wrong()))

    monkeypatch.setattr(self_checks, "checks_of", checks_of)
    monkeypatch.setattr(self_checks, "SMOKE_SETTINGS", self_checks.SMOKE_SETTINGS[:1])
    report = Report(is_smoke=True)
    self_checks.self_checks(report)
    assert report.figures["wrong_kernels"] == ["linear"]
    assert len(report.failed) == 2


def test_bits_are_compared(tmp_path, monkeypatch):
    """All rows with a verdict hold, in torch; a runner that samples other tokens without graphs is found."""
    monkeypatch.setattr(model, "SMOKE_SETTINGS", model.SMOKE_SETTINGS | {"kernels": "torch"})
    report = Report(is_smoke=True, scratch=tmp_path)
    exact_bits.exact_bits(report)
    verdicts = {row["name"]: row["ok"] for row in report.rows if row["ok"] is not None}
    assert verdicts == dict.fromkeys(
        ["linear: a row at every line", "attention: a query at every line", "graph = eager",
         "early starts = without", "prompt = decode at 40 tokens"], True,
    )  # fmt: skip
    exact_bits._compare(report, "other", ([1, 2], [np.ones(2), np.ones(2)]), ([1, 2], [np.ones(2), np.zeros(2)]))
    assert (report.rows[-1]["ok"], report.rows[-1]["note"]) == (False, "tokens whose log probabilities differ: [1]")


def pack_source(folder: Path, name: str, files: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as file:
        for path, text in files.items():
            info = tarfile.TarInfo(f"{name}/{path}")
            info.size = len(text)
            file.addfile(info, io.BytesIO(text.encode()))


SLOW_SETUP = """
import pathlib, time
first = pathlib.Path("first.o")
if not first.exists():
    first.touch()
    time.sleep(600)
pathlib.Path("built_peer.py").write_text("DONE = True")
"""


def test_peers_are_built_where_nvcc_is_and_continue_where_they_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "PLACES", ())
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    sources = tmp_path / "sources"
    pack_source(sources, "plain_peer", {"plain_peer.py": ""})
    pack_source(sources, "built_peer", {"csrc/a.cu": "", "setup.py": SLOW_SETUP})
    report = Report(is_smoke=True, scratch=tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        peers.build(report, sources)
    (tmp_path / "nvcc").write_text("#!/bin/sh\n")
    (tmp_path / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    report.ends_at = time.monotonic() + peers.MARGIN_S + 3.0
    peers.build(report, sources)
    assert report.was_cut
    report.ends_at = float("inf")
    peers.build(report, sources)
    peers.build(report, sources)
    found = [(row["name"], row["ok"], row["note"][:12]) for row in report.rows]
    assert found == [
        ("built_peer", None, "nvcc was not"), ("plain_peer", True, ""), ("built_peer", None, "out of time;"),
        *[("plain_peer", True, ""), ("built_peer", True, ""), ("plain_peer", True, "")],
        *[("built_peer", True, ""), ("plain_peer", True, "")],
    ]  # fmt: skip
    toolchain.use_peers(tmp_path)
    assert importlib.import_module("built_peer").DONE
    assert "plain_peer" in os.environ["PYTHONPATH"]


def test_nano_vllm_runs_the_workload(tmp_path, monkeypatch):
    """With the names of its package; it asks for a tokenizer that the checkpoint lacks."""
    taken = []

    class LLM:
        def __init__(self, folder, **settings):
            assert settings["max_model_len"] == 4096
            assert engine.AutoTokenizer.from_pretrained(folder, use_fast=True).eos_token_id == -1

        def generate(self, prompts, sampling, use_tqdm):
            taken.append((len(prompts), [one["max_tokens"] for one in sampling]))

    engine = SimpleNamespace(AutoTokenizer=None)
    monkeypatch.setitem(sys.modules, "nanovllm", SimpleNamespace(LLM=LLM, SamplingParams=lambda **given: given))
    monkeypatch.setitem(sys.modules, "nanovllm.engine.llm_engine", engine)
    report = Report(is_smoke=True, scratch=tmp_path)
    report.figures["in_process_tok_s"] = 1e9
    peers.nano_vllm_workload(report)
    assert taken == [(4, [4, 5, 6, 7])] * 3
    assert [row["name"] for row in report.rows] == ["nano-vllm", "ours in-process / nano-vllm"]


def test_packed_kernels_are_used_on_a_machine_that_has_none(tmp_path):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton/kernel.cubin").write_text("bits")
    with tarfile.open(tmp_path / "kernels.tar.xz", "w:xz") as file:
        file.add(tmp_path / "triton", "triton")
    unpack_kernels(tmp_path / "state", tmp_path)
    assert (tmp_path / "state/triton/kernel.cubin").read_text() == "bits"
    (tmp_path / "state/triton/kernel.cubin").write_text("newer")
    unpack_kernels(tmp_path / "state", tmp_path)
    assert (tmp_path / "state/triton/kernel.cubin").read_text() == "newer"


def test_all_sections_exist():
    for found in chosen_sections(None, ""):
        assert callable(found.load())
    with pytest.raises(ValueError, match="unknown section decode_step; known are compile, "):
        chosen_sections(None, "decode_step")


BLOCK = """
import importlib.util, runpy, sys
missing = {"xxhash", "redis", "uvloop"}
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name in missing else find_spec(name, *args)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def smoke(tmp_path: Path, *flags: str) -> list[str]:
    run_py = str(ROOT / "bench/gpu/run.py")
    return [sys.executable, "-c", BLOCK, run_py, "--smoke", "--out", str(tmp_path), *flags]


def test_a_smoke_run_writes_its_results_without_small_packages(tmp_path):
    only = "environment,ceilings,prefill_attention,without_early_starts"
    done = subprocess.run(limited(smoke(tmp_path, "--only", only), cpu_s=100), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["failed"] == []
    assert summary["device"] == "cpu (smoke)"
    assert "without_early_starts_ms_b3_ctx30" in summary
    assert "prefill_attention" in (tmp_path / "gpu.md").read_text()
    assert "replaced for the engine's sections: xxhash" in done.stdout


def test_sigterm_keeps_what_was_measured(tmp_path):
    process = subprocess.Popen(smoke(tmp_path, "--only", "environment,self_checks,decode_attention"), text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    deadline = time.monotonic() + 100
    table = tmp_path / "gpu.md"
    while process.poll() is None and not (table.exists() and "self_checks" in table.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert "stopped by SIGTERM" in output
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert {"environment", "self_checks"} <= {row["section"] for row in rows}
    assert json.loads(output.splitlines()[-1])["num_rows"] == len(rows)


def test_kernel_times_are_per_step():
    def event(name: str, start: float, end: float) -> SimpleNamespace:
        span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
        return SimpleNamespace(name=name, time_range=span)

    steps = range(kernel_times.STEPS)
    events = [event("attention", 100 * i, 100 * i + 60) for i in steps] + [
        event("norm", 100 * i + 60, 100 * i + 80) for i in steps
    ]
    report = Report(is_smoke=True)
    kernel_times._table(report, "decode", events)
    found = [(row["name"], round(row["ms"] * 1e3), row["note"]) for row in report.rows]
    assert found == [
        ("decode: attention", 60, "60.0 us in 1.0 launches, 75.0%"),
        ("decode: norm", 20, "20.0 us in 1.0 launches, 25.0%"),
        ("decode: whole step", 96, "2 launches, kernels 80 us, idle 16 us"),
    ]


def test_the_report_shows_failed_rows_and_figures(tmp_path, capsys):
    report = Report(is_smoke=True)
    report.figures |= {"device": "NVIDIA H200", "step_ms_b1_ctx512": 1.5}
    report.row("decode_steps", "B 1", ok=False, ms=1.5)
    report.write(tmp_path, "gpu")
    show(tmp_path)
    text = capsys.readouterr().out
    assert "FAIL decode_steps: B 1" in text
    assert '"step_ms_b1_ctx512": 1.5' in text
    with pytest.raises(SystemExit, match="has no results; run bench/gpu/start 1"):
        show(tmp_path / "none")


def test_libraries_are_called_as_by_workers(monkeypatch):
    """The stand-ins have the signatures and checks of the libraries."""
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    monkeypatch.setattr(fake_flash_attn, "PAGE", 16)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash3)
    report = Report(is_smoke=True)
    libraries(report)
    verdicts = {row["name"]: row["ok"] for row in report.rows if not row["name"].endswith("ours")}
    assert verdicts == {
        f"{step}: {library}": True for step in ("decode", "prefill") for library in ("flash-attn 2", "flash-attn 3")
    }, report.rows


def test_a_library_that_is_wrong_fails_the_benchmark(monkeypatch):
    def wrong(*args, **fields):
        return -fake_flash3.flash_attn_with_kvcache(*args, **fields)

    broken = SimpleNamespace(**vars(fake_flash3) | {"flash_attn_with_kvcache": wrong})
    monkeypatch.setitem(sys.modules, "flash_attn_interface", broken)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    report = Report(is_smoke=True)
    libraries(report)
    assert report.failed == ["libraries: decode: flash-attn 3", "libraries: prefill: flash-attn 3"]
    missing = next(row for row in report.rows if row["name"] == "decode: flash-attn 2")
    assert (missing["ok"], missing["note"][:23]) == (None, "BackendUnavailableError")
