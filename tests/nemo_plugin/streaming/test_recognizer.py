"""Live streams through NeMo's pipelines, and through the server before them."""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from difflib import SequenceMatcher

import pytest
import soundfile
import torch

from nemo_gpu_decoding import Phrase
from nemo_gpu_decoding.checks import FieldError
from nemo_gpu_decoding.cli.decoding import decoding_config
from nemo_gpu_decoding.cli.main import main
from nemo_gpu_decoding.cli.options import parse_options
from nemo_gpu_decoding.cli.serve import ServeOptions, build_recognizer, build_server
from nemo_gpu_decoding.fusion.phrases import WrittenRequest
from nemo_gpu_decoding.live.interface import Chunk, StreamOptions, warm_up
from tests.assets import ASSETS

pytestmark = pytest.mark.slow

CTC, HYBRID, CAUSAL = (str(ASSETS / "models" / f"self_{name}.nemo") for name in ("ctc", "hybrid_rnnt", "streaming"))
LM = f"lm={ASSETS / 'lm' / 'tok3.arpa'}"


def recognizer(*arguments):
    return build_recognizer(parse_options(ServeOptions, arguments))


def own_request(boosting_weight=None, **written):
    return StreamOptions(WrittenRequest(boosting_weight=boosting_weight, **written))


@pytest.fixture(scope="module")
def shared():
    return recognizer(f"model={CTC}", LM)


@pytest.fixture(scope="module")
def speech(files):
    return [soundfile.read(file, dtype="float32")[0] for file in files]


def finals_of(own, samples, wanted):
    n, prepared, finals = own.chunk_samples, own.prepare(wanted), []
    for at in range(0, len(samples), n):
        (step,) = own.step([Chunk(0, samples[at : at + n], at == 0, at + n >= len(samples), prepared)])
        finals += [step.final] if step.final is not None else []
    return finals


def streamed(own, speech, options=None, *, commits=False):
    """(partial texts, final text, words) of utterances in the same steps. `commits`: what is committed stays."""
    n, found, committed = own.chunk_samples, [([], "", []) for _ in speech], [""] * len(speech)
    wanted = [own.prepare(option) for option in options or [StreamOptions()] * len(speech)]
    live, known = dict.fromkeys(range(len(speech)), 0), [0] * len(speech)
    while live:
        chunks = [
            Chunk(i, speech[i][at : at + n], at == 0, at + n >= len(speech[i]), wanted[i]) for i, at in live.items()
        ]
        for chunk, step in zip(chunks, own.step(chunks), strict=True):
            assert step.error is None
            partials, text, words = found[chunk.stream]
            if step.final is not None:
                assert step.final.text.startswith(committed[chunk.stream])
                committed[chunk.stream] = ""
            if step.partial is not None:
                partials.append(step.partial.text)
                assert step.partial.text.startswith(step.partial.committed)
                assert step.partial.committed.startswith(committed[chunk.stream])
                committed[chunk.stream] = step.partial.committed
                known[chunk.stream] = max(known[chunk.stream], len(step.partial.committed))
            if step.final is not None:
                text = f"{text} {step.final.text}".strip()
                found[chunk.stream] = partials, text, words + list(step.final.words)
            live[chunk.stream] += n
            if chunk.is_last:
                del live[chunk.stream]
    assert any(known) or not commits
    return found


def test_texts_equal_those_of_nemos_loop(shared, files, speech):
    expected = [row["text"] for row in shared.pipeline.run(files[:4]).values()]
    found = streamed(shared, speech[:4], commits=True)
    assert [text for _, text, _ in found] == expected
    for partials, text, words in found:
        assert len(set(partials)) > 2
        assert [word.word for word in words] == text.split()
        assert all(0 <= word.start < word.end and word.ranked is None for word in words)


@pytest.mark.parametrize(("model", "strategy"), [(CTC, "flexctc_beam"), (HYBRID, "alsd_pp")])
def test_confidence_with_a_map_is_that_of_files(model, strategy, utterances, speech, tmp_path):
    options = [f"model={model}", f"strategy={strategy}", "decoding.beam.confidence_map=[1,0]"]
    manifest, out = tmp_path / "files.json", tmp_path / "rows.json"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in utterances[:4]))
    assert main(["transcribe", *options, f"manifest={manifest}", "timestamps=true", f"out={out}"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    gaps = []
    for row, (_, _, words) in zip(rows, streamed(recognizer(*options), speech[:4]), strict=True):
        of_file, of_stream = ([word["word"] for word in side] for side in (row["words"], [w.shown() for w in words]))
        for a, b, size in SequenceMatcher(None, of_file, of_stream, autojunk=False).get_matching_blocks():
            gaps += [abs(row["words"][a + n]["confidence"] - words[b + n].confidence) for n in range(size)]
    assert len(gaps) > 20
    assert sorted(gaps)[len(gaps) // 2] < 0.15


WORD_LM = f"lm={ASSETS / 'lm' / 'word3.arpa'}"
SMALL_LM = [f"lm={ASSETS / 'lm' / 'word_small.arpa'}", f"large_{WORD_LM}"]


@pytest.mark.parametrize(
    "arguments",
    [
        [f"model={CTC}", "strategy=greedy"],
        [f"model={CTC}", "strategy=cuda_wfst", WORD_LM],
        [f"model={CTC}", "strategy=paged_biglm", *SMALL_LM],
        [f"model={HYBRID}", "strategy=alsd_pp"],
        [f"model={CAUSAL}"],
        [f"model={CAUSAL}", "strategy=aes_pp"],
    ],
)
def test_texts_equal_those_of_every_pipeline_and_of_streams_alone(arguments, files, speech):
    if "lm=" in arguments[-1]:
        pytest.importorskip("kaldifst")
    own = recognizer(*arguments, "end_silence=-1", "max_streams=4")
    assert own.is_cache_aware == (CAUSAL in arguments[0])
    expected = [row["text"] for row in own.pipeline.run(files[:3]).values()]
    assert [text for _, text, _ in streamed(own, speech[:3], commits=True)] == expected
    assert [streamed(own, [samples])[0][1] for samples in speech[:3]] == expected


def test_rules_end_utterances_and_their_texts_add_up(speech):
    own = recognizer(f"model={CTC}", LM, "rules={rule5: {min_utterance_length: 1.5}}")
    finals = finals_of(own, speech[0], StreamOptions())
    words = [word for final in finals for word in final.words]
    assert len(finals) > 1
    assert words[0].start < 0.5 < 3 < words[-1].end
    assert all(before.start <= after.start for before, after in itertools.pairwise(words))


def test_final_transcripts_name_their_phrases(shared, speech):
    finals = finals_of(shared, speech[0], own_request(30.0, phrases=("zebra",)))
    found = [phrase for final in finals for phrase in final.phrases]
    assert len(found) == sum(final.text.split().count("zebra") for final in finals) > 0
    assert {phrase.phrase for phrase in found} == {"zebra"}
    assert all(0 <= phrase.evidence < 0.5 for phrase in found)


@pytest.mark.parametrize(
    "arguments", [[f"model={CTC}"], [f"model={HYBRID}", "strategy=alsd_pp"], [f"model={CAUSAL}", "strategy=alsd_pp"]]
)
def test_lm_of_a_stream_equals_that_of_a_decoder(arguments, speech):
    own = recognizer(*arguments, f"lms.office={ASSETS / 'lm' / 'tok3.arpa'}", "lm_weight=0.8")
    named = [
        StreamOptions(),
        own_request(lm="office"),
        own_request(lm="none"),
        own_request(30.0, lm="office", phrases=("zebra",)),
    ]
    plain, office, none, both = (text for _, text, _ in streamed(own, [speech[0]] * 4, named))
    assert plain == none
    alone = recognizer(*arguments, LM, "lm_weight=0.8")
    wanted = [StreamOptions(), own_request(30.0, phrases=("zebra",))]
    ((_, expected, _), (_, boosted, _)) = streamed(alone, [speech[0]] * 2, wanted)
    assert (office, both) == (expected, boosted)
    assert "zebra" in both
    assert "zebra" not in office
    with pytest.raises(FieldError, match="lm is 'law', expected one of office, none"):
        own.prepare(own_request(lm="law"))


@pytest.mark.parametrize("arguments", [[f"model={CTC}"], [f"model={CAUSAL}", "strategy=alsd_pp"]])
def test_locks_and_grammars_hold_for_their_stream(arguments, speech):
    own, tokens = recognizer(*arguments, "end_silence=-1", "max_streams=4"), ("\u2581", "o", "f", "t", "h", "e")
    sentences = ("castle door", "of the")
    wanted = [
        StreamOptions(),
        own_request(allowed_tokens=tokens),
        own_request(grammar=sentences),
        own_request(grammar=sentences, grammar_price=1e-3),
    ]
    found = streamed(own, [speech[0]] * 4, wanted)
    finals = [finals_of(own, speech[0], each)[-1] for each in wanted]
    texts = [text for _, text, _ in found]
    assert [final.text for final in finals] == texts
    assert [(final.outside_share, final.in_grammar) for final in finals] == [
        (None, None), (0.0, None), (None, True), (None, False)
    ]  # fmt: skip
    assert set(texts[1]) <= {*"ofthe", " "} < set(texts[0])
    assert texts[2] in sentences
    assert texts[3] == ""


@pytest.mark.parametrize(
    ("arguments", "written", "problem"),
    [
        ([f"model={CTC}"], {"allowed_scripts": ("Latn",)}, "allowed_scripts is 'Latn', expected scripts of the voc"),
        ([f"model={CTC}"], {"allowed_price": 2.0}, "allowed_price is 2.0, expected allowed_scripts or allowed_tokens"),
        ([f"model={CTC}"], {"grammar": ("\u4f60",)}, r"grammar is .* is in no token of the model\), expected a gr"),
        ([f"model={CTC}"], {"grammar_price": 2.0}, "grammar_price is 2.0, expected a grammar that it is for"),
        ([f"model={CTC}", "grammar=GRAMMAR"], {"phrases": ("a",)}, "expected none: the decoder's grammar has all"),
        ([f"model={CTC}", "strategy=cuda_wfst", WORD_LM], {"grammar": ("a",)}, "expected none: a word graph writes"),
        (
            [f"model={HYBRID}", "strategy=aes_pp", "decoding.beam.pruning_mode=early"],
            {"allowed_scripts": ("Latin",)},
            "expected none: pruning_mode 'early' drops labels",
        ),
        ([f"model={CTC}"], {"grammar": ("a " * 10_001,)}, "more than 20000 letters"),
    ],
)
def test_request_that_the_model_cannot_have_is_named(arguments, written, problem, tmp_path):
    (tmp_path / "g").write_text("the\n")
    own = recognizer(*[each.replace("GRAMMAR", str(tmp_path / "g")) for each in arguments])
    with pytest.raises(FieldError, match=problem) as error:
        own.prepare(own_request(1.0 if "phrases" in written else None, **written))
    assert error.value.field in written


@pytest.mark.parametrize(
    "arguments",
    [
        [f"model={CTC}"],
        [f"model={CTC}", "strategy=cuda_wfst", WORD_LM],
        [f"model={HYBRID}", "strategy=alsd_pp"],
        [f"model={CAUSAL}"],
        [f"model={CAUSAL}", "strategy=aes_pp"],
    ],
)
def test_aliases_of_a_stream_replace_its_words(arguments, speech):
    """Words of an alias are not committed before they are complete; `streamed` checks what is committed."""
    own = recognizer(*arguments, "end_silence=-1", "max_streams=4")
    wanted = [own_request(1.0, phrases=each) for each in [("of the",), (Phrase("K\u20ac-9", aliases=("of the",)),)]]
    (_, plain, heard), (partials, text, words) = streamed(own, [speech[0], speech[0]], wanted, commits=True)
    assert " of the " in plain
    assert text == plain.replace("of the", "K\u20ac-9")
    assert any("K\u20ac-9" in partial for partial in partials)
    (at,) = [n for n, word in enumerate(words) if word.word == "K\u20ac-9"]
    assert (words[at].start, words[at].end) == (heard[at].start, heard[at + 1].end)
    assert words[:at] == heard[:at]


@pytest.mark.parametrize("arguments", [[], [f"model={CAUSAL}", "strategy=alsd_pp"], ["strategy=cuda_wfst", WORD_LM]])
def test_alternatives_are_given_to_streams_that_ask(arguments, shared, speech):
    own = shared
    if arguments:
        own = recognizer(f"model={CTC}", *arguments, "end_silence=-1", "max_n_best=3")
    n, samples, wanted = own.chunk_samples, speech[0], own.prepare(StreamOptions(n_best=3))
    partials = 0
    for at in range(0, len(samples), n):
        place = at == 0, at + n >= len(samples)
        chunks = [Chunk(0, samples[at : at + n], *place, wanted)]
        chunks.append(Chunk(1, samples[at : at + n], *place, own.prepare(StreamOptions())))
        step, other = own.step(chunks)
        assert not (other.partial or other.final).n_best
        for found in filter(None, (step.partial, step.final)):
            scores = [alternative.score for alternative in found.n_best]
            assert scores == sorted(scores, reverse=True) or own.strategy == "alsd_pp"  # it ranks by score per token
            assert len({alternative.text for alternative in found.n_best}) == len(scores)
            partials += found is step.partial and len(scores) == 3
    assert partials > 1
    assert len(step.final.n_best) == 3
    assert step.final.n_best[0].text == step.final.text
    slots = [slot for slot in step.final.alternatives if slot.word_index is not None]
    assert [slot[:3] for slot in slots] == [(n, *word[1:3]) for n, word in enumerate(step.final.words)]
    assert not other.final.alternatives


def test_too_many_alternatives_are_refused(shared):
    with pytest.raises(FieldError, match=r"n_best is 6, expected an integer 1 \.\. 5"):
        shared.prepare(StreamOptions(n_best=6))
    with pytest.raises(FieldError, match="max_n_best is 2, expected 1 with strategy greedy"):
        recognizer(f"model={CTC}", "strategy=greedy", "max_n_best=2")
    with pytest.raises(
        FieldError, match=r"max_n_best is 2 \(every buffer is decoded anew.*expected 1 with strategy alsd"
    ):
        recognizer(f"model={HYBRID}", "strategy=alsd_pp", "max_n_best=2")
    with pytest.raises(FieldError, match="max_n_best is 0"):
        recognizer(f"model={CTC}", "max_n_best=0")


def test_options_that_a_stream_cannot_have_are_named(shared):
    with pytest.raises(FieldError, match="language is 'de', expected none: this model takes no language"):
        shared.prepare(StreamOptions(language="de"))
    assert shared.left_out(shared.prepare(own_request(1.0, phrases=("\u4f60",)))) == ["\u4f60"]
    greedy = recognizer(f"model={CTC}", "strategy=greedy")
    with pytest.raises(FieldError, match="lm is 'a', expected none: the decoder has no lm_pool"):
        shared.prepare(own_request(lm="a"))
    with pytest.raises(FieldError, match="lm is 'a', expected none: strategy greedy takes no requests"):
        greedy.prepare(own_request(lm="a"))
    with pytest.raises(FieldError, match=r"phrases is \['a'\], expected none: strategy greedy takes no requests"):
        greedy.prepare(own_request(phrases=("a",)))


@pytest.mark.parametrize("model", ["buffered", "cache_aware"])
def test_nan_features_end_one_stream(shared, model, speech, monkeypatch):
    own = shared
    if model == "cache_aware":
        own = recognizer(f"model={CAUSAL}", "max_streams=3")
    expected = streamed(own, speech[:1])[0][1]
    update, n = own.pipeline.bufferer.update, own.chunk_samples

    def damaged(frames):
        features, paddings = update(frames)
        row = [frame.stream_id for frame in frames].index(7)
        features[row] = torch.full_like(features[row], torch.nan)
        return features, paddings

    good, bad = speech[0], speech[1]
    options, text = own.prepare(StreamOptions()), ""
    for number, at in enumerate(range(0, len(good), n)):
        chunks = [Chunk(8, good[at : at + n], at == 0, at + n >= len(good), options)]
        if number < 4:
            chunks.append(Chunk(7, bad[at : at + n], at == 0, False, options))
        with monkeypatch.context() as patch:
            if number == 3:
                patch.setattr(own.pipeline.bufferer, "update", damaged)
            fine, *others = own.step(chunks)
        text += fine.final.text if fine.final else ""
        assert fine.error is None
        assert [other.error is not None for other in others] == [number == 3] * len(others)
    assert text == expected
    own.step([Chunk(7, bad[:0], is_last=True, options=options)])
    if model == "cache_aware":
        assert not own.pipeline.context_manager.streamidx2slotidx
        assert not own.pipeline.bufferer.streamidx2slotidx


def test_warm_up_leaves_no_state(shared, speech):
    expected = streamed(shared, speech[:1])[0][1]
    for own in (shared, recognizer(f"model={CAUSAL}", "strategy=alsd_pp", "max_streams=1", "max_n_best=2")):
        warm_up(own)
        assert not own.pipeline._state_pool
    assert streamed(shared, speech[:1])[0][1] == expected


def test_dropped_streams_leave_no_state(shared, speech):
    for own in (shared, recognizer(f"model={CAUSAL}", "max_streams=1")):
        for stream in range(3):  # in one slot
            own.step([Chunk(stream, speech[0][: own.chunk_samples], True, False, own.prepare(StreamOptions()))])
            own.drop([stream])
        assert not own.pipeline._state_pool
        assert not getattr(own.pipeline.bufferer, "bufferers", None)


def test_strategy_that_does_not_fit_the_head_is_named():
    with pytest.raises(ValueError, match="strategy is 'alsd_pp', which decodes RNN-T and TDT models, but this model"):
        recognizer(f"model={CTC}", "strategy=alsd_pp")
    with pytest.raises(FieldError, match="strategy is 'beam_batch', expected one of greedy, greedy_batch, flexctc"):
        recognizer(f"model={CTC}", "strategy=beam_batch")
    with pytest.raises(ValueError, match=r"model=none\.nemo is no file here"):
        recognizer("model=none.nemo")
    with pytest.raises(FieldError, match="rules is 'kaldi', expected null with strategy greedy"):
        recognizer(f"model={CTC}", "strategy=greedy", "rules=kaldi")
    with pytest.raises(FieldError, match="chunk_seconds is 0"):
        recognizer(f"model={CTC}", "chunk_seconds=0")


def test_texts_of_served_streams_equal_those_of_the_recognizer(shared, speech, monkeypatch):
    """Several clients at once, messages of any length, other rates: the texts of the chunks alone."""
    pytest.importorskip("starlette")
    pytest.importorskip("websockets")
    from nemo_gpu_decoding.cli import serve
    from tests.live.test_server import conversation, served

    monkeypatch.setattr(serve, "build_recognizer", lambda options: shared)
    server = build_server(parse_options(ServeOptions, [f"model={CTC}", "port=0"]))
    expected = [text for _, text, _ in streamed(shared, speech)]

    def client(i):
        pcm = (speech[i] * 32768).astype("<i2").tobytes()
        sizes = range(0, len(pcm), 2 * (997 + 500 * i))
        return conversation(server, *[pcm[at : at + sizes.step] for at in sizes])

    with served(server), ThreadPoolExecutor(len(speech)) as pool:
        found = list(pool.map(client, range(len(speech))))
    for (messages, code), text in zip(found, expected, strict=True):
        assert code == 1000
        assert " ".join(m["text"] for m in messages if m["type"] == "final") == text
        assert any(m["type"] == "partial" and m["words"] for m in messages)


def test_decoding_equals_that_of_transcribe(shared):
    config = decoding_config("flexctc_beam", None, {"lm": str(ASSETS / "lm" / "tok3.arpa")})
    assert shared.pipeline.asr_model.decoding_cfg.beam.beam_size == config.beam.beam_size == 16
    assert json.loads(json.dumps(shared.languages)) == []
