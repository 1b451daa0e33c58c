"""The GPU benchmark checks at once for the compiler and headers that Triton needs."""

from __future__ import annotations

import sysconfig

import pytest

from bench.gpu import toolchain


def test_a_compiler_with_headers_is_found():
    assert toolchain.prepare_toolchain()


def test_a_missing_compiler_is_reported_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"neither gcc nor clang was found, and CC is not set.*bench/gpu/pack VERSION"):
        toolchain.prepare_toolchain(tmp_path)


def test_a_packed_compiler_is_used(tmp_path, monkeypatch):
    real = toolchain.prepare_toolchain()
    monkeypatch.setenv("CC", "")
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    (tmp_path / "cc").write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    (tmp_path / "cc").chmod(0o755)
    assert toolchain.prepare_toolchain(tmp_path) == str(tmp_path / "cc")
    assert toolchain.os.environ["CC"] == str(tmp_path / "cc")


def test_missing_headers_are_reported_or_taken_from_the_pack(tmp_path, monkeypatch):
    real = toolchain.Path(sysconfig.get_paths()["include"])
    missing = tmp_path / "none" / real.name
    monkeypatch.setattr(toolchain.sysconfig, "get_paths", lambda scheme: {"include": str(missing)})
    monkeypatch.setenv("CPATH", "")
    with pytest.raises(SystemExit, match=r"does not compile a file that includes Python.h from .*Install python3"):
        toolchain.prepare_toolchain(tmp_path)
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / real.name).symlink_to(real)
    assert toolchain.prepare_toolchain(tmp_path)
