"""The adapter for NeMo Curator gives what `transcribe` gives, alone and in Curator's own stage."""

from __future__ import annotations

import json

import numpy as np
import pytest

from nemo_gpu_decoding.cli.main import main
from nemo_gpu_decoding.curator import BeamASRAdapter

pytestmark = pytest.mark.nemo
soundfile = pytest.importorskip("soundfile")

OPTIONS = {"strategy": "flexctc_beam", "beam_size": 8, "n_best": 3, "timestamps": True}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"beam": 4}, "options has beam, expected some of .*beam_size"),
        ({"out": "x/"}, "options has out, expected some of"),
        ({"n_best": 0}, "n_best is 0, expected an integer >= 1"),
    ],
)
def test_options_are_checked_when_the_stage_is_made(options, problem):
    with pytest.raises(ValueError, match=problem):
        BeamASRAdapter("model.nemo", options)


@pytest.fixture
def expected(assets, manifest, tmp_path):
    """Rows of `transcribe`, both utterances in one batch as Curator has them."""
    pytest.importorskip("nemo.collections.asr")
    options = [f"{name}={str(value).lower()}" for name, value in {**OPTIONS, "lm": f"{assets}/lm/tok3.arpa"}.items()]
    model = f"{assets}/models/self_ctc.nemo"
    assert main(["transcribe", f"model={model}", f"manifest={manifest}", f"out={tmp_path}/rows.jsonl", *options]) == 0
    return [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]


def test_the_adapter_gives_the_rows_of_transcribe(assets, manifest, expected):
    base = pytest.importorskip("nemo_curator.models.asr.base", reason="NeMo Curator is not installed")
    adapter = BeamASRAdapter(f"{assets}/models/self_ctc.nemo", {**OPTIONS, "lm": f"{assets}/lm/tok3.arpa"})
    assert isinstance(adapter, base.ASRAdapter)
    with pytest.raises(RuntimeError, match="call load_model first"):
        adapter.transcribe_batch([])
    adapter.download_weights_on_node()
    adapter.load_model(num_gpus=0)
    files = [json.loads(line)["audio_filepath"] for line in manifest.read_text().splitlines()]
    items = [
        dict(zip(("waveform", "sample_rate"), soundfile.read(file, dtype="float32"), strict=True)) for file in files
    ]
    empty = {"waveform": np.zeros(0, np.float32), "sample_rate": 16000}
    first, skipped, second = adapter.transcribe_batch([items[0], empty, items[1]])
    assert (skipped.text, skipped.skip_reason) == ("", "empty_audio")
    for result, row in zip((first, second), expected, strict=True):
        assert {"pred_text": result.text, **result.extras} == {
            name: row[name] for name in ("pred_text", *result.extras)
        }
        assert set(result.extras) == {"score", "n_best", "words"}
    with pytest.raises(ValueError, match=r"waveform of a is \[16000\] at 8000 Hz, expected \[N\] at 16000 Hz"):
        adapter.transcribe_batch([{"waveform": np.zeros(16000), "sample_rate": 8000, "task_id": "a"}])
    adapter.unload_model()


def test_curators_stage_writes_our_transcripts(assets, manifest, expected):
    stages = pytest.importorskip(
        "nemo_curator.stages.audio.inference.asr.stage", reason="NeMo Curator or torchaudio is not installed"
    )
    from nemo_curator.stages.resources import Resources
    from nemo_curator.tasks import AudioTask

    stage = stages.ASRStage(
        adapter_target="nemo_gpu_decoding.curator.BeamASRAdapter",
        model_id=f"{assets}/models/self_ctc.nemo",
        adapter_kwargs={"options": {**OPTIONS, "lm": f"{assets}/lm/tok3.arpa"}},
        waveform_key="waveform",
        extras_key="decoding",
        resources=Resources(gpus=0),
    )
    tasks = []
    for line in manifest.read_text().splitlines():
        waveform, rate = soundfile.read(json.loads(line)["audio_filepath"], dtype="float32")
        tasks.append(AudioTask(dataset_name="dev", data={"waveform": waveform, "sampling_rate": rate}))
    stage.setup_on_node()
    stage.setup()
    found = stage.process_batch(tasks)
    stage.teardown()
    assert [task.data["pred_text"] for task in found] == [row["pred_text"] for row in expected]
    assert [task.data["decoding"]["score"] for task in found] == [row["score"] for row in expected]
