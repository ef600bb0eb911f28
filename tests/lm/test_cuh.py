"""packed.cuh and paged.cuh against packed.py: every look-up of small LMs, to the bit."""

from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.cuda import nvrtc
from nemo_gpu_decoding.cuda.compile import Architecture, compiler_options, read_source
from nemo_gpu_decoding.cuda.launch import Scalar, Signature, Tensor, as_records
from nemo_gpu_decoding.lm.on_device import SLOT_BYTES, PlacedLM
from nemo_gpu_decoding.lm.pack import pack_arpa_in_memory
from nemo_gpu_decoding.lm.packed import COST_BITS
from tests.cuda.marks import needs_nvrtc
from tests.cuda_emulator.build import PACKAGE
from tests.lm.paged_lookups import SOURCE as PAGED_SOURCE
from tests.lm.paged_lookups import Counts, answers, look_up, questions
from tests.oracles.ngram import closed_table, write_arpa

pytest_plugins = ["tests.cuda_emulator.fixtures"]
SOURCE = Path(__file__).with_name("packed_lookups.cu")
LOOKUPS = Signature(
    "lookups",
    {
        "states": Tensor(torch.uint8, ("S + 1", 12)),
        "labels": Tensor(torch.int64, ("L",)),
        "arcs": Tensor(torch.int64, ("A",)),
        "label_bits": Scalar(np.int32),
        "target_bits": Scalar(np.int32),
        "asked_states": Tensor(torch.int64, ("N",)),
        "asked_labels": Tensor(torch.int64, ("N",)),
        "costs": Tensor(torch.float32, ("N",)),
        "targets": Tensor(torch.int64, ("N",)),
        "count": Scalar(np.int32),
    },
)


@pytest.mark.parametrize("emulated_runtime", [{"check": True}], indirect=True, ids=["checked"])
@pytest.mark.parametrize("order", [1, 4])
def test_every_device_lookup_equals_that_of_the_cpu(emulated_runtime, tmp_path, order):
    lm = pack_arpa_in_memory(write_arpa(tmp_path / "lm.arpa", closed_table(seed=order, order=order, keep=0.4)))
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
        label_bits=arrays.label_bits,
        target_bits=arrays.target_bits,
        asked_states=states,
        asked_labels=labels,
        costs=costs,
        targets=targets,
        count=len(asked),
    )
    assert list(zip(costs.tolist(), targets.tolist(), strict=True)) == [lm.advance(*question) for question in asked]


# -------- paged.cuh against packed.py: every look-up through the cache, to the bit, whatever its size
CPU = torch.device("cpu")
HUGE = 10**6
checked = pytest.mark.parametrize(
    "emulated_runtime", [{"check": True, "yield_percent": 30}], indirect=True, ids=["checked"]
)


@pytest.fixture
def lm(tmp_path):
    return pack_arpa_in_memory(write_arpa(tmp_path / "lm.arpa", closed_table(seed=5, order=4, keep=0.4)))


def placed(lm, slots):
    return PlacedLM(lm.arrays, "paged", slots * SLOT_BYTES)


@checked
@pytest.mark.parametrize("slots", [1, 5, HUGE])
def test_every_paged_lookup_equals_that_of_the_cpu(emulated_runtime, lm, slots):
    """Four blocks share the cache, which is filled by the first launches and used by all."""
    copies, table = placed(lm, slots), None
    for seed in range(3):
        table = copies.on(CPU)
        asked = questions(lm, seed)
        found, counts = look_up(emulated_runtime, table, asked)
        assert found == answers(lm, asked)
        assert counts.hits + counts.misses == len(asked)
        assert counts.misses <= counts.sectors <= 2 * counts.misses
    if slots == HUGE:
        assert counts == Counts(hits=len(asked))
    else:
        assert counts.misses > len(asked) // 4


@checked
def test_an_lm_on_the_device_has_no_cache(emulated_runtime, lm):
    asked = questions(lm)
    table = PlacedLM(lm.arrays, "device", SLOT_BYTES).on(CPU)
    assert look_up(emulated_runtime, table, asked) == (answers(lm, asked), Counts())


def test_lookups_follow_each_other_without_other_threads(emulated_runtime, lm):
    """A cache of one slot serves what was asked for last; the reads are counted in sectors."""
    bits = lm.arrays.target_bits + COST_BITS
    table = placed(lm, 1).on(CPU)
    for label in range(lm.vocab_size):  # label i of state 0 is arc i
        word = label * bits // 64
        sectors = 2 if word % 4 == 3 else 1
        asked = torch.tensor([[0, label]])
        assert look_up(emulated_runtime, table, asked)[1] == Counts(0, 1, sectors)
        assert look_up(emulated_runtime, table, asked)[1] == Counts(1, 0, 0)


@checked
@pytest.mark.parametrize("half", ["low", "high"])
def test_a_slot_with_halves_of_two_arcs_would_be_noticed(emulated_runtime, lm, tmp_path, half):
    """With one half's number unchecked, answers are wrong: other threads do write in between."""
    text = (PACKAGE / "lm" / "paged.cuh").read_text()
    check = f"number_in(found.{half}) == number"
    assert text.count(check) == 1
    (tmp_path / "lm").mkdir()
    (tmp_path / "lm" / "paged.cuh").write_text(text.replace(check, "true"))
    careless = tmp_path / PAGED_SOURCE.name
    careless.write_text(PAGED_SOURCE.read_text())
    table, asked = placed(lm, 1).on(CPU), questions(lm)
    found = [look_up(emulated_runtime, table, asked, source=careless)[0] for _ in range(3)]
    assert any(answer != answers(lm, asked) for answer in found)


@needs_nvrtc
@pytest.mark.parametrize("path", [SOURCE, PAGED_SOURCE], ids=["packed", "paged"])
def test_nvrtc_compiles_the_lookup_without_a_warning(path):
    source = read_source(str(path))
    for arch in (nvrtc.architectures()[0], nvrtc.architectures()[-1]):
        compiled = nvrtc.compile_program(path.name, source.text, source.headers, compiler_options(Architecture(arch)))
        assert len(compiled.code) > 0
        assert "warning" not in compiled.log
