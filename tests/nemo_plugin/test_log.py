"""The log of a run: what it reads is what was written, and only for the same files, requests and run."""

import json

import pytest

from nemo_gpu_decoding.audio import AudioPart
from nemo_gpu_decoding.manifest import Utterance
from nemo_gpu_decoding.nemo_plugin.transcribing import Log
from nemo_gpu_decoding.search.result import Place, WordOption
from nemo_gpu_decoding.transcript import BoostedPhrase, Transcript, Word, as_json, of_json

FULL = Transcript(
    text="ä page",
    score=-1.0000000000000002,
    words=(
        Word("ä", 0.08, 0.16, confidence=0.1),
        Word("page", 0.2, 0.5, 0.3, pieces=(Word("pa", 0.2, 0.3), Word("ge", 0.3, 0.5))),
    ),
    n_best=(("ä page", -1.0), ("page", -2.5)),
    outside_share=0.25,
    in_grammar=False,
    alternatives=(Place(0, 0.08, 0.16, (WordOption("ä", 0.75), WordOption("", 0.25))), Place(None, 0.1, 0.2, ())),
    phrases=(BoostedPhrase("page", 0.5),),
)
LOST = "the log has not kept it"


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "talk.wav"
    file.write_bytes(b"samples")
    return [Utterance("talk.wav", AudioPart(file, start, 1.0), 1.0) for start in (0.0, 1.0)]


def test_new_run_reads_what_the_last_one_has_written(tmp_path, rows):
    file = tmp_path / ".out.run"
    log = Log(file, {"beam_size": 4})
    assert not log.has(rows)
    assert log.kept(rows[:1], lambda: [[0, 1.5], "fault"], "plan") == [[0, 1.5], "fault"]
    assert log.kept(rows, lambda: [FULL, "no speech"]) == [FULL, "no speech"]
    log.kept(rows[:1], lambda: [Transcript("with a lattice", None, lattice=object())])
    again = Log(file, {"beam_size": 4})
    assert [again.has(batch) for batch in (rows, rows[:1], rows[1:])] == [True, False, False]
    assert again.kept(rows[:1], lambda: LOST, "plan") == [[0, 1.5], "fault"]
    assert again.kept(rows, lambda: LOST) == [FULL, "no speech"]
    assert again.kept(rows[1:], lambda: ["third"]) == ["third"]
    assert Log(file, {"beam_size": 4}).kept(rows[1:], lambda: LOST) == ["third"]
    again.remove()
    assert not file.exists()
    assert Log(None, {}).kept(rows, lambda: ["new"]) == ["new"]


@pytest.mark.parametrize("word", [["ä", 0.08, 0.16, 0.1], ["ä", 0.08, 0.16, 0.1, []]])
def test_confidence_of_a_log_without_probabilities_is_raw(word):
    (read,) = of_json({**json.loads(json.dumps(FULL, default=as_json)), "words": [word]}).words
    assert (read.raw_confidence, read.confidence) == (0.1, None)


def test_incomplete_line_is_removed(tmp_path, rows):
    file = tmp_path / ".out.run"
    log = Log(file, {})
    log.kept(rows[:1], lambda: ["one"])
    with file.open("ab") as sink:  # lines of another program
        sink.write(b"[]\n\n\xff\0\n")
    whole = file.stat().st_size
    log.kept(rows[1:], lambda: ["two"])
    both = file.read_bytes()
    for end in range(whole, len(both)):
        file.write_bytes(both[:end])
        log = Log(file, {})
        assert (log.has(rows[:1]), log.has(rows[1:]), file.stat().st_size) == (True, False, whole)
        log.kept(rows[1:], lambda: ["two"])
        assert file.read_bytes() == both


def test_other_file_part_request_or_options_begin_anew(tmp_path, rows):
    file = tmp_path / ".out.run"
    Log(file, {"beam_size": 4}).kept(rows, lambda: ["one", "two"])
    asked = [(4, rows), (4, [rows[0], Utterance("talk.wav", rows[1].audio, 1.0, request=("a phrase",))]), (8, rows)]
    assert [Log(file, {"beam_size": size}).has(batch) for size, batch in asked] == [True, False, False]
    rows[0].path.write_bytes(b"other samples")
    assert not Log(file, {"beam_size": 4}).has(rows)
