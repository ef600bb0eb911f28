"""packed.cuh against packed.py: every look-up of small LMs, to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.cuda import nvrtc
from nemo_gpu_decoding.cuda.compile import compiler_options
from nemo_gpu_decoding.cuda.launch import Scalar, Signature, Tensor, as_records
from nemo_gpu_decoding.cuda.sources import read_source
from nemo_gpu_decoding.lm.pack import pack_arpa_in_memory
from tests.cuda.needs import needs_nvrtc
from tests.lm.ngrams import closed_table, write_arpa

pytest_plugins = ["tests.cuda_emulator.fixtures"]
SOURCE = Path(__file__).with_name("packed_lookups.cu")
LOOKUPS = Signature(
    "lookups",
    {
        "states": Tensor(torch.uint8, ("S + 1", 12)),
        "labels": Tensor(torch.int64, ("L",)),
        "arcs": Tensor(torch.int64, ("A",)),
        "codebook": Tensor(torch.float32, ("C",)),
        "label_bits": Scalar(np.int32),
        "target_bits": Scalar(np.int32),
        "cost_bits": Scalar(np.int32),
        "asked_states": Tensor(torch.int64, ("N",)),
        "asked_labels": Tensor(torch.int64, ("N",)),
        "costs": Tensor(torch.float32, ("N",)),
        "targets": Tensor(torch.int64, ("N",)),
        "count": Scalar(np.int32),
    },
)


@pytest.mark.parametrize("emulated_runtime", [{"check": True}], indirect=True, ids=["checked"])
@pytest.mark.parametrize("layout", ["exact", "quantised"])
@pytest.mark.parametrize("order", [1, 4])
def test_every_lookup_is_that_of_the_cpu(emulated_runtime, tmp_path, layout, order):
    table = closed_table(seed=order, order=order, keep=0.4)
    lm = pack_arpa_in_memory(write_arpa(tmp_path / "lm.arpa", table), layout=layout)
    asked = [(s, label) for s in range(lm.num_states) for label in range(lm.vocab_size)]
    costs, targets = torch.zeros(len(asked)), torch.zeros(len(asked), dtype=torch.int64)
    states, labels = torch.tensor(asked).T.contiguous()
    arrays = lm.arrays
    emulated_runtime.load(str(SOURCE), torch.device("cpu")).launch(
        LOOKUPS,
        grid=2,
        block=64,
        states=as_records(arrays.states),
        labels=torch.tensor(arrays.labels.view(np.int64)),
        arcs=torch.tensor(arrays.arcs.view(np.int64)),
        codebook=torch.tensor(arrays.codebook),
        label_bits=arrays.label_bits,
        target_bits=arrays.target_bits,
        cost_bits=arrays.cost_bits,
        asked_states=states,
        asked_labels=labels,
        costs=costs,
        targets=targets,
        count=len(asked),
    )
    expected = [lm.advance(*question) for question in asked]
    assert list(zip(costs.tolist(), targets.tolist(), strict=True)) == expected


@needs_nvrtc
def test_nvrtc_compiles_it_without_a_word():
    source = read_source(str(SOURCE))
    options = compiler_options(nvrtc.architectures()[-1])
    compiled = nvrtc.compile_cubin(SOURCE.name, source.text, source.headers, options)
    assert len(compiled.cubin) > 0
    assert "warning" not in compiled.log
