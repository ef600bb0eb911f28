"""OpenAI's endpoint, called with its client, before a recognizer that reads numbers out of the audio."""

import io
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

openai = pytest.importorskip("openai")
soundfile = pytest.importorskip("soundfile")
pytest.importorskip("python_multipart")
pytest.importorskip("starlette")

from nemo_gpu_decoding.checks import warn_once  # noqa: E402
from nemo_gpu_decoding.live.interface import Limits  # noqa: E402
from nemo_gpu_decoding.live.subtitles import subtitles  # noqa: E402
from nemo_gpu_decoding.live.transcriptions import Upload, _response  # noqa: E402
from nemo_gpu_decoding.transcript import Transcript, Word  # noqa: E402
from tests.live.test_server import BAD, CHUNK, FATAL, RATE, NumberReader, audio, counted, running, wait_for  # noqa: E402

SPOKEN = (1, 2, 0, 3, 0)  # two utterances


def recording(*values, rate=RATE, file_format="WAV", channels=1):
    samples = np.frombuffer(audio(*values), "<i2")
    file = io.BytesIO()
    file.name = f"a.{file_format.lower()}"
    soundfile.write(file, np.stack([samples] * channels, axis=1), rate, format=file_format, subtype="PCM_16")
    file.seek(0)
    return file


def client(server, **options):
    return openai.OpenAI(base_url=f"{server.url}v1", **{"api_key": "none", "max_retries": 0, **options})


def transcribe(server, file=None, **fields):
    return client(server).audio.transcriptions.create(
        file=recording(*SPOKEN) if file is None else file, **{"model": "any", **fields}
    )


def test_response_formats_hold_the_text():
    with running() as server:
        assert transcribe(server).text == "1 2 3"
        assert transcribe(server, response_format="text") == "1 2 3\n"
        assert transcribe(server, response_format="srt").startswith("1\n00:00:00,000 --> 00:00:00,040\n1 2 3\n")
        assert transcribe(server, response_format="vtt").startswith("WEBVTT\n\n00:00:00.000 --> 00:00:00.040\n1 2 3\n")
        assert counted(server, "streams_total", outcome="end") == 4


def test_clients_hear_of_phrases_that_are_left_out_and_long_words_are_cut_between_characters(monkeypatch):
    monkeypatch.setattr(NumberReader, "left_out", lambda self, options: ["x"])
    with running() as server:
        assert transcribe(server, extra_body={"phrases": ["x"]}).left_out == ["x"]
    words = [Word("東「日本」。" * 8, 0.0, 4.8), Word("x" * 60, 4.8, 5.0)]
    cues = subtitles([Transcript(word.word, words=(word,)) for word in words], "srt", 0.6).split("\n\n")
    assert [cue.split("\n")[2] for cue in cues[:-1]] == ["東「日本」。東「日本」。"] * 4 + ["x" * 60]
    assert cues[1].split("\n")[1] == "00:00:01,200 --> 00:00:02,400"


def test_verbose_json_has_words_and_segments():
    with running() as server:
        found = transcribe(server, response_format="verbose_json", timestamp_granularities=["word", "segment"])
        assert (found.text, found.duration, found.language) == ("1 2 3", 5 * CHUNK / RATE, "")
        assert [(word.word, word.start, word.end) for word in found.words] == [
            ("1", 0.0, 0.01), ("2", 0.01, 0.02), ("3", 0.03, 0.04)
        ]  # fmt: skip
        assert [(each.id, each.start, each.end, each.text) for each in found.segments] == [
            (0, 0.0, 0.02, "1 2"), (1, 0.03, 0.04, "3")
        ]  # fmt: skip
        assert transcribe(server, response_format="verbose_json", timestamp_granularities=["word"]).segments is None
        assert transcribe(server, response_format="verbose_json", language="en").words is None


def test_a_word_that_was_cut_between_utterances_has_the_end_of_its_second_part():
    parts = [[("wal", 0.0, 0.5)], [("king", 0.5, 0.9), ("on", 1.0, 1.2)]]
    finals = [
        {"text": " ".join(word for word, *_ in part), "words": [Word(*word)._asdict() for word in part]}
        for part in parts
    ]
    finals = [{**final, "audio_seconds": 1.2} for final in finals]
    finals[1]["is_joined"] = True
    upload = Upload(SimpleNamespace(filename="a.wav"), {}, "verbose_json", {"word"}, False)
    found = json.loads(_response(finals, 1.2, upload, "", {}).body)
    assert found["text"] == "walking on"
    assert [(word["word"], word["start"], word["end"]) for word in found["words"]] == [
        ("walking", 0.0, 0.9), ("on", 1.0, 1.2)
    ]  # fmt: skip


@pytest.mark.parametrize(("first", "second", "text"), [("東京", "に", "東京に"), ("go", "on", "go on")])
def test_utterances_are_joined_as_their_script_does(first, second, text):
    finals = [{"text": words, "words": [], "audio_seconds": 1.0} for words in (first, second)]
    upload = Upload(SimpleNamespace(filename="a.wav"), {})
    assert json.loads(_response(finals, 1.0, upload, "", {}).body)["text"] == text


def test_options_of_streams_are_extra_fields():
    seen = []

    class Reader(NumberReader):
        def prepare(self, wanted):
            seen.append(wanted)
            return super().prepare(wanted)

    with running(Reader()) as server:
        extra = {"phrases": ["four", "five"], "boosting_weight": 2.5, "end_silence": 0.5, "n_best": 2}
        found = transcribe(server, response_format="verbose_json", extra_body=extra, language="en")
        assert [each["text"] for each in found.segments[0].n_best] == ["1 2", "1 2?"]
        named = transcribe(server, response_format="verbose_json", extra_body={"phrases": ["2"]}).segments[0]
        assert named.found_phrases == [{"phrase": "2", "evidence": 0.25}]
        transcribe(server, extra_body={"phrases": '["four", "five"]', "boosting_weight": 2.5})
        transcribe(server, keywords=["four"])
        transcribe(server, extra_body={"phrases": "four"})
    assert (seen[0].request.boosting_weight, *[*vars(seen[0]).values()][3:]) == (2.5, 0.5, "en", 2)
    texts = [[phrase.text for phrase in options.request.phrases] for options in seen]
    assert texts == [["four", "five"], ["2"], ["four", "five"], ["four"], ["four"]]


@pytest.mark.parametrize("kind", [{"file_format": "FLAC"}, {"channels": 2}, {"rate": 32000}])
def test_recordings_of_other_formats_are_decoded(kind):
    values = [7] * 40 if "rate" in kind else SPOKEN
    with running() as server:
        text = transcribe(server, recording(*values, **kind)).text
        assert text == "1 2 3" if "rate" not in kind else {"7"} <= set(text.split())


def test_recordings_and_streams_are_decoded_together():
    reader = NumberReader(seconds=0.005)
    with running(reader, tick_seconds=0.02) as server, ThreadPoolExecutor(8) as pool:
        files = [recording(*([n] * 60)) for n in range(1, 9)]
        found = list(pool.map(lambda file: transcribe(server, file).text, files))
    assert found == [" ".join([str(n)] * 60) for n in range(1, 9)]
    assert max(reader.batches) > 3


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        (
            {"response_format": "diarized_json"},
            "response_format",
            "expected one of json, text, verbose_json, srt, vtt",
        ),
        ({"timestamp_granularities": ["line"]}, "timestamp_granularities", "expected one of segment, word"),
        ({"extra_body": {"stream": "perhaps"}}, "stream", "expected one of true, false"),
        ({"stream": True, "response_format": "srt"}, "stream", "expected one of false"),
        ({"language": "de"}, "language", "expected one of en"),
        ({"extra_body": {"beam": 3}}, "beam", "the fields are file, model"),
        ({"extra_body": {"boosting_weight": 2}}, "boosting_weight", "phrases that it is for"),
        ({"extra_body": {"n_best": 9}}, "n_best", "9"),
        ({"extra_body": {"phrases": ["a"] * 4}}, "phrases", "at most 3 phrases"),
        ({"file": ("a.wav", b"no recording")}, "file", "a recording in a format of libsndfile"),
        ({"file": recording(*[1] * 40)}, "file", "at most 0.3 seconds"),
        ({"file": recording(1, rate=4000)}, "sample_rate", "4000"),
    ],
)
def test_bad_fields_are_named(fields, field, message):
    with running(limits=Limits(max_phrases=3, max_upload_seconds=0.3)) as server:
        with pytest.raises(openai.BadRequestError) as caught:
            transcribe(server, **fields)
        assert caught.value.param == field
        assert message in str(caught.value)
        assert transcribe(server).text == "1 2 3"


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.2},
        {"prompt": "A talk."},
        {"chunking_strategy": "auto"},
        {"chunking_strategy": {"type": "server_vad", "threshold": 0.5}},
        {"include": ["logprobs"]},
        {"language": "xx"},
        {"extra_body": {"language": "", "phrases": "", "n_best": "", "response_format": ""}},
    ],
)
def test_fields_of_openai_that_change_nothing_are_ignored(fields, caplog):
    class Monolingual(NumberReader):
        languages = ()

        def prepare(self, wanted):
            assert wanted.language is None
            return super().prepare(wanted)

    warn_once.cache_clear()
    with running(Monolingual()) as server, caplog.at_level("WARNING", "nemo_gpu_decoding"):
        assert transcribe(server, **fields).text == "1 2 3"
    assert "extra_body" in fields or f"{next(iter(fields))}" in caplog.text


def test_a_text_as_server_sent_events():
    with running() as server:
        events = list(transcribe(server, stream=True))
        assert [event.type for event in events] == ["transcript.text.delta", "transcript.text.done"]
        assert "".join(event.delta for event in events[:-1]) == events[-1].text == "1 2 3"


def test_model_is_listed_and_unknown_pages_are_refused():
    with running() as server:
        assert [model.id for model in client(server).models.list()] == ["digits"]
        assert client(server).models.retrieve("openai/whisper-1").id == "digits"
        with pytest.raises(openai.NotFoundError, match=r"GET /v1/files: Not Found"):
            client(server).files.list()
    with running(token="secret") as server, pytest.raises(openai.AuthenticationError):
        client(server).models.list()


def test_float_samples_are_decoded_as_they_are():
    samples = np.repeat(np.float32([2, 0.25, 1e-5]), CHUNK)
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV", subtype="FLOAT")
    seen = []

    class Reader(NumberReader):
        def step(self, chunks):
            seen.extend(chunk.samples for chunk in chunks)
            return super().step(chunks)

    with running(Reader()) as server:
        transcribe(server, ("a.wav", file.getvalue()))
    np.testing.assert_array_equal(np.concatenate(seen), samples)


def test_a_recording_that_is_cut_short_has_its_text_and_the_fault(caplog):
    content = recording(*SPOKEN).getvalue()
    file = ("a.wav", content[: 44 + (len(content) - 44) * 3 // 5])
    with running() as server, caplog.at_level("WARNING", "nemo_gpu_decoding"):
        found = transcribe(server, file, response_format="verbose_json")
        assert found.text == "1 2"
        assert "a.wav cannot be read to its end: the file is cut short" in found.error
    assert found.error in caplog.text


def test_clients_hear_of_channels_that_cancel():
    samples, file = np.frombuffer(audio(*SPOKEN), "<i2"), io.BytesIO()
    soundfile.write(file, np.stack([samples, -samples], axis=1), RATE, format="WAV", subtype="PCM_16")
    with running() as server:
        assert "the average of its channels is almost silent" in transcribe(server, ("a.wav", file.getvalue())).warning
        assert not hasattr(transcribe(server), "warning")


def test_ffmpeg_decodes_what_libsndfile_cannot(tmp_path):
    if shutil.which("ffmpeg") is None:
        pytest.skip("needs ffmpeg")
    (tmp_path / "a.wav").write_bytes(recording(*SPOKEN).getvalue())
    subprocess.run(["ffmpeg", "-v", "error", "-i", "a.wav", "-c:a", "flac", "a.mkv"], cwd=tmp_path, check=True)
    with running() as server:
        assert transcribe(server, ("a.mkv", (tmp_path / "a.mkv").read_bytes())).text == "1 2 3"
        for name, content in {"a.webm": bytes.fromhex("1a45dfa3") + bytes(500), "a.txt": b"#EXTM3U\nfile:/x"}.items():
            with pytest.raises(
                openai.BadRequestError, match=f"file is '{name}' .*, expected .* ffmpeg -i {name}"
            ) as caught:
                transcribe(server, (name, content))
            assert caught.value.param == "file"


def test_faults_of_the_step_are_in_the_response():
    with running() as server:
        with pytest.raises(openai.BadRequestError, match="not finite"):
            transcribe(server, recording(1, BAD, 2))
        with pytest.raises(openai.InternalServerError, match="its log has the reason"):
            transcribe(server, recording(1, FATAL, 2))
        assert transcribe(server).text == "1 2 3"
        assert not server.batcher.sessions


def test_limits_of_streams_and_uploads_hold():
    with running(NumberReader(seconds=0.05), limits=Limits(max_streams=1)) as server:
        first = threading.Thread(target=transcribe, args=(server, recording(*[1] * 30)))
        first.start()
        wait_for(lambda: server.batcher.sessions)
        with pytest.raises(openai.InternalServerError, match="no more than 1 streams are served") as caught:
            transcribe(server)
        assert caught.value.status_code == 503
        first.join()
    too_large = pytest.raises(openai.BadRequestError, match="expected at most 500 bytes")
    with running(limits=Limits(max_upload_bytes=500)) as server, too_large:
        transcribe(server)


def test_a_client_that_leaves_frees_its_stream():
    with running(NumberReader(seconds=0.05)) as server:
        with pytest.raises(openai.APITimeoutError):
            client(server, timeout=0.3).audio.transcriptions.create(file=recording(*[1] * 200), model="any")
        wait_for(lambda: not server.batcher.sessions, seconds=5.0)
        assert transcribe(server).text == "1 2 3"


def test_recording_gets_an_error_if_the_server_stops():
    with running(NumberReader(seconds=0.02)) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(transcribe, server, recording(*[1] * 20000))
        wait_for(lambda: server.batcher.sessions)
        server.should_exit = True
        with pytest.raises(openai.InternalServerError, match="the server stops"):
            answer.result()


@pytest.mark.parametrize(
    ("body", "seconds", "status"), [("--b\r\n", 9.0, 503), ("--b\r\n", 0.3, 408), ("no form at all" * 100, 9.0, 400)]
)
def test_unfinished_and_damaged_uploads_are_answered(body, seconds, status):
    head = "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    limits = Limits(idle_seconds=seconds, max_upload_seconds=seconds)
    with (
        running(limits=limits) as server,
        socket.create_connection(server.servers[0].sockets[0].getsockname()) as line,
    ):
        line.sendall(f"{head}Content-Length: 1400\r\n\r\n{body}".encode())
        for _ in range(4 if status == 408 else 0):  # slower than the limit, but never silent
            time.sleep(0.1)
            line.sendall(b"x")
        wait_for(lambda: server.handlers or status != 503)
        server.should_exit = status == 503
        assert line.recv(1000).startswith(f"HTTP/1.1 {status}".encode())
        assert counted(server, "streams_total", outcome="server") == 0


def test_wrong_token_and_foreign_origin_are_refused_for_recordings():
    with running(token="secret") as server:
        with pytest.raises(openai.AuthenticationError, match="token is missing or wrong"):
            transcribe(server)
        assert client(server, api_key="secret").audio.transcriptions.create(
            file=recording(*SPOKEN), model="any"
        ).text == "1 2 3"  # fmt: skip
    with running() as server:
        request = urllib.request.Request(
            f"{server.url}v1/audio/transcriptions", b"", {"Origin": "http://elsewhere.example"}
        )
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request)
