"""`aliases`: what a model hears for phrases."""

from collections import Counter

import pytest

from nemo_gpu_decoding import Phrase
from nemo_gpu_decoding.cli import aliases
from nemo_gpu_decoding.cli.main import main
from nemo_gpu_decoding.fusion.phrases import read_phrases
from tests.assets import ASSETS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("call sasilano now", "sasilano"),
        ("Call sasi lano, now", "sasi lano"),
        ("call castellano now", "castellano"),
        ("call now", ""),
        ("cal sasilano now", ""),
        ("call sasilano no", ""),
    ],
)
def test_heard_returns_the_words_aligned_with_a_phrase(text, expected):
    assert aliases.heard(["call", "castellano", "now"], text, 1, 2) == expected


def test_phrases_of_several_words_and_whole_texts():
    assert aliases.heard(["new", "york"], "nu yorck", 0, 2) == "nu yorck"
    assert aliases.heard(["phi-4"], "phi four", 0, 1) == "phi four"
    spoken = [aliases.Spoken("a.wav", "Call Ann, now", ("Ann", "bob"))] * 2
    counts = aliases.heard_phrases(spoken, [["call an now", "call ant now"], ["call an now", "call an now"]])
    assert counts == {"Ann": Counter(an=2, ant=1)}


def test_aliases_are_heard_for_one_phrase_and_are_no_ordinary_words():
    phrases = [Phrase("castellano", 2.0, aliases=("casteliano",)), Phrase("gdansk"), Phrase("bob")]
    own = Counter({"sasilano": 3, "castilano": 5, "the lane": 9, "gdansk": 7, "same": 8, "casteliano": 4, "ca": 9})
    counts = {"castellano": own, "gdansk": Counter({"same": 1, "dansk": 1})}
    chosen = aliases.choose(phrases, counts, ["down the lane"], most=4, min_count=2)
    assert chosen[0] == Phrase("castellano", 2.0, aliases=("casteliano", "castilano", "sasilano"))
    assert chosen[1:] == phrases[1:]
    assert aliases.choose(phrases, counts, [], most=1, min_count=1)[1].aliases == ("dansk",)
    assert [aliases.line_of(each) for each in chosen] == [
        "castellano\t2\tcasteliano\tcastilano\tsasilano", "gdansk", "bob",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "phrases is not set"),
        ([f"phrases={ASSETS / 'phrases.txt'}"], "give either manifest=FILE or command="),
        (["phrases=p.txt", "command=speak {wav}"], "expected one with {wav} and {text}"),
        (["phrases=p.txt", "command=speak {wav} {text}", "sentences=[call]"], "expected texts with PHRASE"),
    ],
)
def test_wrong_options_are_named(arguments, message, capsys):
    assert main(["aliases", "model=m.nemo", "out=o.txt", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_texts_that_are_not_utf_8_are_named_before_the_work(tmp_path, capsys):
    (texts := tmp_path / "texts.txt").write_bytes(b"caf\xe9\n")
    arguments = [f"phrases={ASSETS / 'phrases.txt'}", f"texts={texts}", "manifest=m", f"out={tmp_path / 'o.txt'}"]
    assert main(["aliases", "model=m.nemo", *arguments]) == 2
    assert f"{texts}, line 1: byte 0xe9 at 4, expected UTF-8 text" in capsys.readouterr().err


def test_commands_that_make_no_file_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"command ls -no-such-option .* made no WAV file \(exit status 2\)"):
        aliases.speak("ls -no-such-option {wav} {text}", "ann", tmp_path / "a.wav")
    for command in ("cp {text} {wav}", "python -c 'import shutil, sys; shutil.copy(sys.argv[2], sys.argv[1])'"):
        aliases.speak(command, str(ASSETS / "phrases.txt"), tmp_path / "b.wav")
        (tmp_path / "b.wav").unlink()


@pytest.mark.slow
@pytest.mark.nemo
def test_aliases_of_recordings_are_written_as_the_phrase(tmp_path, capsys):
    pytest.importorskip("nemo.collections.asr")
    out, model = tmp_path / "heard.txt", f"model={ASSETS / 'models' / 'self_ctc.nemo'}"
    manifest = f"manifest={ASSETS / 'speech' / 'dev.json'}"
    arguments = [model, manifest, f"phrases={ASSETS / 'phrases.txt'}", f"texts={ASSETS / 'lm' / 'lm_train.txt'}"]
    assert main(["aliases", *arguments, f"out={out}"]) == 0
    found = {phrase.text: phrase.aliases for phrase in read_phrases(out)}
    assert list(found) == [phrase.text for phrase in read_phrases(ASSETS / "phrases.txt")]
    assert sum(map(bool, found.values())) >= 5
    assert "(1)" in capsys.readouterr().out
