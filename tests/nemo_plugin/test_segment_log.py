"""The log of segments: what it reads is what was written, and only for the same recording, request and run."""

import pytest

from nemo_gpu_decoding.live.interface import BoostedPhrase, Word
from nemo_gpu_decoding.nemo_plugin.transcript import SegmentLog, Transcript
from nemo_gpu_decoding.search.result import Place, WordOption

FULL = Transcript(
    text="ä page",
    score=-1.0000000000000002,
    words=(Word("ä", 0.08, 0.16, 0.1), Word("page", 0.2, 0.5)),
    n_best=(("ä page", -1.0), ("page", -2.5)),
    alternatives=(
        Place(0, 0.08, 0.16, (WordOption("ä", 0.75), WordOption("", 0.25))),
        Place(None, 0.1, 0.2, (WordOption("a", 0.1),)),
    ),
    phrases=(BoostedPhrase("page", 0.5),),
)
PLAN = {"segments": [[0, 5], [7, 20], [21, 30]], "step_seconds": 0.01, "seconds": 0.3, "fault": ""}


@pytest.fixture
def recording(tmp_path):
    file = tmp_path / "talk.wav"
    file.write_bytes(b"samples")
    return file


def test_new_run_reads_the_segments_of_the_last_one(tmp_path, recording):
    file = tmp_path / "out.segments"
    log = SegmentLog(file, {"beam_size": 4})
    key = log.key(recording)
    assert log.plan(key) is None
    log.begin(key, PLAN)
    assert log.transcripts(key, 3, 1) == []
    log.add(key, [FULL])
    log.add(key, ["no speech"])
    again = SegmentLog(file, {"beam_size": 4})
    assert again.key(recording) == key
    assert again.plan(key) == PLAN
    assert again.transcripts(key, 3, 1) == [FULL, "no speech"]
    again.add(key, [Transcript("third", None)])
    assert SegmentLog(file, {"beam_size": 4}).transcripts(key, 3, 2) == [FULL, "no speech", Transcript("third", None)]
    again.remove()
    assert not file.exists()


def test_batches_that_are_not_whole_are_decoded_again(tmp_path, recording):
    file = tmp_path / "out.segments"
    log = SegmentLog(file, {})
    key = log.key(recording)
    log.begin(key, PLAN)
    log.transcripts(key, 3, 2)
    log.add(key, [FULL])
    second = SegmentLog(file, {})
    assert second.transcripts(key, 3, 2) == []
    second.add(key, ["one", "two"])
    second.add(key, ["three"])
    assert SegmentLog(file, {}).transcripts(key, 3, 2) == ["one", "two", "three"]
    whole = file.read_bytes()
    for other in (
        whole.splitlines(True)[-1].replace(b'"first": 2', b'"first": 4'),
        b"[]\n",
        b"\n",
        b"\0\n",
        b'{"recording": "x"}\n',
    ):
        file.write_bytes(whole + other + b"more\n")
        assert SegmentLog(file, {}).transcripts(key, 3, 2) == ["one", "two", "three"]
        assert file.read_bytes() == whole


def test_incomplete_line_is_removed(tmp_path, recording):
    file = tmp_path / "out.segments"
    log = SegmentLog(file, {})
    key = log.key(recording)
    log.begin(key, PLAN)
    log.transcripts(key, 3, 1)
    log.add(key, ["one"])
    whole = file.read_bytes()
    log.add(key, ["two"])
    both = file.read_bytes()
    for end in range(len(whole), len(both)):
        file.write_bytes(both[:end])
        log = SegmentLog(file, {})
        assert log.transcripts(key, 3, 1) == ["one"]
        assert file.read_bytes() == whole
        log.add(key, ["two"])
        assert file.read_bytes() == both


def test_other_recording_request_or_options_begin_anew(tmp_path, recording):
    log = SegmentLog(tmp_path / "out.segments", {"beam_size": 4})
    key = log.key(recording, ("a phrase",))
    assert key == log.key(recording, ("a phrase",))
    assert key != log.key(recording)
    assert key != SegmentLog(tmp_path / "out.segments", {"beam_size": 8}).key(recording, ("a phrase",))
    recording.write_bytes(b"other samples")
    assert key != log.key(recording, ("a phrase",))
