"""Kernel files and their headers."""

from __future__ import annotations

import pytest

from nemo_gpu_decoding.cuda.sources import kernel_files, read_source


def test_headers_are_followed_and_read_once(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "kernel.cu").write_text('#include "b.cuh"\n  #  include "a/c.cuh"\nint x;\n')
    (tmp_path / "b.cuh").write_text('#pragma once\n#include "a/c.cuh"\n')
    (tmp_path / "a" / "c.cuh").write_text('#include "b.cuh"\n// #include "not/there.cuh"\n')
    source = read_source("a/kernel.cu", tmp_path)
    assert source.name == "a/kernel.cu"
    assert source.text.endswith("int x;\n")
    assert set(source.headers) == {"b.cuh", "a/c.cuh"}


def test_a_missing_header_names_the_file_that_wants_it(tmp_path):
    (tmp_path / "kernel.cu").write_text('#include "b.cuh"\n')
    (tmp_path / "b.cuh").write_text('#include "gone.cuh"\n')
    with pytest.raises(FileNotFoundError, match=r"gone.cuh \(included by b.cuh\)"):
        read_source("kernel.cu", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"kernel source other.cu is not in"):
        read_source("other.cu", tmp_path)


def test_the_packages_kernels_are_found_with_all_their_headers():
    names = kernel_files()
    assert "search/flexctc_beam/kernel.cu" in names
    assert all("cuda/common.cuh" in read_source(name).headers for name in names)
