"""`compare`: what is read, how transcripts are collated and scored, and the page in a real Chromium.

    python -m tests.tools.test_compare docs/compare.png

makes the screenshot of the docs.
"""

import base64
import json
import os
import random
import re
import shutil
import sys
from pathlib import Path

import pytest

from nemo_gpu_decoding.cli.main import main
from nemo_gpu_decoding.metrics import word_errors
from tests.assets import ASSETS, CTC_MODEL
from tools.compare.__main__ import main as compare
from tools.compare.collation import Passage, Reading, Transcript, collate, difference
from tools.compare.compare import page

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt install chromium")
SPEECH = ASSETS / "speech" / "test" / "test_000.flac"


def text(line, **more):
    return Transcript(line.split(), **more)


def shown(passages: list[Passage]) -> list[str]:
    """A passage as "words", or "R,0: words | 1: words" where transcripts differ; (extra), *wrong*, -."""
    marks = {"": "{}", "wrong": "*{}*", "extra": "({})", "missing": "-"}

    def words(reading: Reading) -> str:
        return " ".join(marks[mark.kind].format(mark.text) for mark in reading.words)

    def one(passage: Passage) -> str:
        if passage.is_agreed:
            return words(passage.readings[0])
        names = [",".join("R" if n < 0 else str(n) for n in reading.transcripts) for reading in passage.readings]
        return " | ".join(f"{name}: {words(reading)}" for name, reading in zip(names, passage.readings, strict=True))

    return [one(passage) for passage in passages]


# ------------------------------------------------------------------------------------------------ collation
def test_agreed_words_are_merged_and_differences_listed():
    passages = collate(text("call anna brown now"), [text("call ana brown now"), text("call anna now please")])
    assert shown(passages) == [
        "call", "R: anna brown | 0: *ana* brown | 1: anna", "now", "R,0:  | 1: (please)"
    ]  # fmt: skip
    assert shown(collate(text("a b"), [text("a"), text("a b")])) == ["a", "R,1: b | 0: -"]
    passages = collate(None, [text("one two three"), text("one too three four")])
    assert shown(passages) == ["one", "0: two | 1: too", "three", "0:  | 1: four"]
    assert difference(passages, 2) == 2
    assert collate(None, [text("")]) == []
    reference = text("a b c d")
    assert difference(collate(reference, [text("a x c d"), text("a x c d")]), 2) == 0
    assert difference(collate(reference, [text("a x y d"), text("a b c d"), text("a b c d")]), 3) == 2


def test_each_transcript_can_be_read_from_the_passages():
    generator = random.Random(3)
    for _ in range(200):
        lines = [" ".join(generator.choices("abc", k=generator.randrange(7))) for _ in range(4)]
        passages = collate(text(lines[0]), [text(line) for line in lines[1:]])
        for number, line in enumerate(lines, -1):
            (own,) = zip(*(
                [reading.words for reading in passage.readings if number in reading.transcripts]
                for passage in passages
            ), strict=True) or [()]  # fmt: skip
            assert [mark.text for words in own for mark in words if mark.text] == line.split()
            kinds = [mark.kind for words in own for mark in words]
            counts = word_errors([lines[0]], [line])
            assert kinds.count("wrong") == counts.substitutions
            assert kinds.count("extra") == counts.insertions


def test_passages_begin_when_their_first_word_does():
    timed = text("a b c", starts=(0.1, 0.5, 0.9))
    assert [passage.start for passage in collate(text("a x c"), [timed, text("a c")])] == [0.1, 0.5, 0.9]


# ------------------------------------------------------------------------------------------------ inputs and scores
@pytest.fixture
def outputs(tmp_path, monkeypatch):
    """Two outputs of transcribe over three utterances, a phrase list, and the audio of the first utterance."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(SPEECH, tmp_path / "zero.flac")
    references = ["call anna brown", "to gdansk", "no <b>names</b> & none"]
    heard = {"greedy": ["call anna brow", "to dansk", references[2]], "beam": references}
    for name, texts in heard.items():
        rows = [
            {"audio_filepath": f"{audio}.flac", "pred_text": hypothesis, "text": reference}
            | {"duration": 2.0, "seconds": 0.5}
            for audio, hypothesis, reference in zip(("zero", "one", "two"), texts, references, strict=True)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "names.txt").write_text("Anna Brown\ngdansk\n")
    return tmp_path


def data_of(page_file: Path):
    (found,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page_file.read_text(), re.S)
    return json.loads(found)


def rewrite(file: Path, change):
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for number, row in enumerate(rows):
        change(number, row)
    file.write_text("\n".join(map(json.dumps, rows)))


def test_totals_are_printed_and_stand_on_the_page(outputs, capsys):
    assert compare(["greedy.jsonl", "beam.jsonl", "phrases=names.txt"]) == 0
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines()]
    assert " ".join(lines[0]) == "output utterances WER % sub del ins precision recall F-score seconds RTFx"
    assert lines[2] == ["greedy", "3", "22.22", "2", "0", "0", "1.000", "0.000", "0.000", "1.50", "4.00"]
    assert lines[3] == ["beam", "3", "0.00", "0", "0", "0", "1.000", "1.000", "1.000", "1.50", "4.00"]
    assert out.endswith("3 utterances side by side: compare.html\n")
    assert err == "2 utterances cannot be played: their audio files are not here\n"
    data = data_of(outputs / "compare.html")
    assert [output["name"] for output in data["outputs"]] == ["greedy", "beam"]
    first, second, third = data["utterances"]
    assert (first["errors"], second["errors"], third["errors"]) == ([1, 0], [1, 0], [0, 0])
    assert [u["difference"] for u in data["utterances"]] == [1, 1, 0]
    assert [u["phrases"] for u in data["utterances"]] == [True, True, False]
    assert first["passages"][1] == [None, [[[-1, 1], [["brown", "", 1]]], [[0], [["brow", "wrong", 0]]]]]


def test_audio_is_embedded_up_to_a_size_else_linked(outputs):
    def source(*options):
        assert compare(["greedy.jsonl", "beam.jsonl", f"out={outputs}/out put/page.html", *options]) == 0
        return data_of(outputs / "out put" / "page.html")["utterances"][0]["audio"]

    (outputs / "out put").mkdir()
    kind, content = source().split(";base64,")
    assert (kind, base64.b64decode(content)) == ("data:audio/flac", SPEECH.read_bytes())
    assert source("embed_mb=0.001") == "../zero.flac"
    assert source("audio=embed", "embed_mb=0").startswith("data:")
    assert source("audio=none") is None
    os.rename(outputs / "zero.flac", outputs / "a #1 zero.flac")
    for name in ("greedy", "beam"):
        rewrite(outputs / f"{name}.jsonl", lambda n, row: n or row.update(audio_filepath="a #1 zero.flac"))
    assert source("audio=link") == "../a%20%231%20zero.flac"


def test_a_manifest_brings_references_phrases_and_the_place_of_the_audio(outputs, capsys):
    for name in ("greedy", "beam"):
        rewrite(outputs / f"{name}.jsonl", lambda n, row: [row.pop("text"), row.pop("seconds")])
    rows = [
        {"audio_filepath": "zero.flac", "text": "call anna brown", "phrases": ["anna brown"]},
        {"audio_filepath": "one.flac", "text": "to gdansk", "phrases": []},
    ]
    (outputs / "speech").mkdir()
    os.rename(outputs / "zero.flac", outputs / "speech" / "zero.flac")
    (outputs / "speech" / "dev.json").write_text("\n".join(map(json.dumps, rows)))
    assert compare(["greedy.jsonl", "beam.jsonl", "manifest=speech/dev.json", "phrases=names.txt"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[2].split() == ["greedy", "3", "40.00", "2", "0", "0", "1.000", "0.000", "0.000"]
    assert "1 utterances without a reference: not in the totals" in err
    data = data_of(outputs / "compare.html")
    assert data["utterances"][0]["audio"].startswith("data:audio/flac")
    assert [u["phrases"] for u in data["utterances"]] == [True, False, False]
    assert data["utterances"][2]["errors"] == [None, None]


def test_utterances_that_an_output_lacks_are_shown_and_not_counted(outputs, capsys):
    rows = (outputs / "beam.jsonl").read_text().splitlines()
    failed = {"audio_filepath": "one.flac", "text": "to gdansk", "error": "one.flac cannot be read as audio"}
    for number, lines in enumerate([[rows[0]], [json.dumps(failed)]]):
        (outputs / "parts").mkdir(exist_ok=True)
        (outputs / "parts" / f"part-0000{number}.jsonl").write_text("\n".join(lines))
        (outputs / "parts" / f"part-0000{number}.done").write_text('{"work": 2.0}')
    rewrite(outputs / "parts" / "part-00000.jsonl", lambda n, row: row.pop("seconds"))
    assert compare(["greedy.jsonl", "parts"]) == 0
    out, err = capsys.readouterr()
    assert [line.split() for line in out.splitlines()[2:4]] == [
        ["greedy", "3", "33.33", "1", "0", "0", "1.50", "4.00"],
        ["parts", "2", "0.00", "0", "0", "0", "4.00", "0.50"],
    ]
    assert "2 utterances that an output lacks or has no text for: not in the totals" in err
    second, third = data_of(outputs / "compare.html")["utterances"][1:]
    assert second["faults"] == [None, "one.flac cannot be read as audio"]
    assert third["faults"] == [None, "not in this output"]
    assert second["passages"][1][1] == [[[-1], [["gdansk", "", 0]]], [[0], [["dansk", "wrong", 0]]]]


def test_same_audio_under_two_names_is_one_utterance(outputs, capsys):
    rewrite(outputs / "greedy.jsonl", lambda n, row: row.update(audio_filepath="zero.flac", text="a"))
    rewrite(outputs / "beam.jsonl", lambda n, row: row.update(audio_filepath=str(outputs / "zero.flac"), text="a"))
    assert compare(["files=greedy.jsonl,beam.jsonl"]) == 0
    assert "3 utterances side by side" in capsys.readouterr().out
    assert all(u["faults"] == [None, None] for u in data_of(outputs / "compare.html")["utterances"])


def test_parts_of_a_file_are_paired_by_their_offset(outputs):
    def cut(order):
        return lambda n, row: row.update(audio_filepath="zero.flac", text=order[n], offset=float(order[n]))

    rewrite(outputs / "greedy.jsonl", cut("012"))
    rewrite(outputs / "beam.jsonl", cut("210"))
    assert compare(["files=greedy.jsonl,beam.jsonl"]) == 0
    found = data_of(outputs / "compare.html")["utterances"]
    assert [u["name"] for u in found] == ["zero.flac", "zero.flac at 1.0 s", "zero.flac at 2.0 s"]
    assert [(u["offset"], u["faults"]) for u in found] == [(n, [None, None]) for n in range(3)]


def test_one_output_is_set_beside_its_references(outputs, capsys):
    assert compare(["greedy.jsonl"]) == 0
    assert data_of(outputs / "compare.html")["utterances"][1]["passages"][1][1][1] == [[0], [["dansk", "wrong", 0]]]
    rewrite(outputs / "greedy.jsonl", lambda n, row: row.pop("text"))
    capsys.readouterr()
    assert compare(["greedy.jsonl"]) == 2
    assert "files holds 1 output without references, expected two or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "arguments", "problem"),
    [
        ("", [], "bad.jsonl has no lines"),
        ("{", [], "bad.jsonl, line 1: not JSON"),
        ('{"pred_text": "a"}', [], "bad.jsonl, line 1: has no audio_filepath"),
        ('{"audio_filepath": "a.wav"}', [], "bad.jsonl, line 1: has no pred_text, expected an output of transcribe"),
        ('{"audio_filepath": "zero.flac", "pred_text": "", "text": "b"}', [], "text is 'b', elsewhere 'call anna"),
        ("\udcff", [], "bad.jsonl, line 1: byte 0xff at 1, expected UTF-8 text"),
        ("", ["no.jsonl"], "files: no.jsonl is neither a file nor a folder with part-*.jsonl"),
        ("", ["out=no/such/page.html"], "out=no/such/page.html: there is no folder no/such"),
        ("", ["manifest=no.json"], "manifest=no.json is no file here"),
        ("", ["audio=play"], "audio is 'play', expected"),
        ("", ["embed_mb=-1"], "embed_mb is -1"),
        ("", ["files=[]"], "files is empty, expected outputs of transcribe"),
    ],
)  # fmt: skip
def test_wrong_input_is_named_before_the_page_is_written(content, arguments, problem, outputs, capsys):
    (outputs / "bad.jsonl").write_text(content, errors="surrogateescape")
    assert compare(["greedy.jsonl", *([] if arguments else ["bad.jsonl"]), *arguments]) == 2
    assert problem in capsys.readouterr().err
    assert not (outputs / "compare.html").exists()


# ------------------------------------------------------------------------------------------------ the page
HOSTILE = '</script><script>document.title="owned"</script><img src=x onerror=alert(1)> {{rules}} \u2028 \ud800'


def test_texts_cannot_end_the_data(outputs):
    for name in ("greedy", "beam"):
        rewrite(outputs / f"{name}.jsonl", lambda n, row: row.update(pred_text=HOSTILE, text=HOSTILE + " x"))
    assert compare(["greedy.jsonl", "beam.jsonl"]) == 0
    assert (outputs / "compare.html").read_text().count("</script>") == 2
    words = data_of(outputs / "compare.html")["utterances"][0]["passages"][0][1][0][1]
    assert " ".join(word for word, _, _ in words) == " ".join(HOSTILE.split()).replace("\ud800", "?")
    assert "{{" not in page({"outputs": [], "utterances": []})


@pytest.fixture
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    playwright.expect.set_options(timeout=30_000)
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def opened(browser, file: Path, problems: list[str], **more):
    tab = browser.new_page(**more)
    tab.set_default_timeout(30_000)
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("request", lambda request: problems.append(request.url) if request.url.startswith("http") else None)
    tab.goto(file.as_uri())
    return tab


def played_to(tab, seconds: float) -> bool:
    heard = f"audio => new Promise(done => audio.ontimeupdate = () => audio.currentTime >= {seconds} && done(true))"
    return tab.locator("audio").evaluate(heard)


@needs_chromium
def test_page_orders_filters_searches_and_plays(outputs, browser):
    from playwright.sync_api import expect

    def many(name):
        rows = [json.loads(line) for line in (outputs / f"{name}.jsonl").read_text().splitlines()]
        more = [
            {**rows[2], "audio_filepath": f"more{n}.flac", "text": f"number {n}", "pred_text": f"number {n}"}
            for n in range(400)
        ]
        if name == "greedy":
            more[7]["pred_text"] = f"{HOSTILE.split()[0]} other words"
        words = enumerate(rows[0]["pred_text"].split())
        rows[0]["words"] = [{"word": word, "start": 0.4 * n, "end": 0.4 * n + 0.3} for n, word in words]
        (outputs / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows + more)))

    many("greedy"), many("beam")
    for options in ([], ["audio=link"]):
        assert compare(["greedy.jsonl", "beam.jsonl", "phrases=names.txt", *options]) == 0
        problems: list[str] = []
        tab = opened(browser, outputs / "compare.html", problems)
        articles = tab.locator("article")
        expect(tab.get_by_role("status")).to_have_text("403 of 403 utterances")
        expect(articles).to_have_count(50)
        expect(articles.first).to_contain_text("more7.flac")  # most words differ
        expect(articles.first.locator(".wrong, .extra")).to_have_count(3)
        tab.get_by_role("button", name="More").click()
        expect(articles).to_have_count(100)

        tab.get_by_label("Show").select_option("outputs differ")
        expect(tab.get_by_role("status")).to_have_text("3 of 403 utterances")
        tab.get_by_label("Show").select_option("B worse than A")
        expect(tab.get_by_role("status")).to_have_text("0 of 403 utterances")
        tab.get_by_label("Show").select_option("with listed phrases")
        expect(articles.locator(".phrase")).to_have_text(["anna", "brown", "gdansk"])
        tab.get_by_label("Show").select_option("all")
        tab.get_by_label("Order").select_option("as in the files")
        expect(articles.first).to_contain_text("zero.flac")
        tab.get_by_label("Search").fill("CALL anna brow")
        expect(tab.get_by_role("status")).to_have_text("1 of 403 utterances")

        cells = tab.locator("#totals tbody tr").last.locator("td")
        expect(cells.nth(2)).to_have_text("0.00")
        expect(cells.nth(2)).to_have_class("best")
        tab.get_by_role("button", name="play").click()
        assert played_to(tab, 0.1)
        tab.locator(".timed").nth(1).click()
        assert played_to(tab, 0.6)
        assert problems == []
        tab.close()


@needs_chromium
def test_hostile_texts_stay_text_and_fit_a_phone(outputs, browser):
    long = "w" * 200
    rewrite(outputs / "greedy.jsonl", lambda n, row: row.update(pred_text=f"{HOSTILE} {long}", text=HOSTILE))
    rewrite(outputs / "beam.jsonl", lambda n, row: row.update(pred_text=HOSTILE, text=HOSTILE))
    os.rename(outputs / "greedy.jsonl", outputs / "<i>greedy.jsonl")
    assert compare(["<i>greedy.jsonl", "beam.jsonl"]) == 0
    problems: list[str] = []
    phone = {"viewport": {"width": 360, "height": 700}, "color_scheme": "dark"}
    tab = opened(browser, outputs / "compare.html", problems, **phone)
    assert tab.title() == "Transcripts side by side"
    assert "<img src=x onerror=alert(1)>" in tab.locator("article").first.inner_text()
    assert tab.locator("img, article i").count() == 0
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    dark = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", dark)[:3])) < 3 * 64
    assert problems == []
    # a script that got in would not run: the rules name the page's own by its hash
    script = "Object.assign(document.createElement('script'), {textContent: 'document.title = 1'})"
    tab.evaluate(f"document.body.append({script})")
    assert tab.title() == "Transcripts side by side"
    assert any("Content Security Policy" in problem for problem in problems)
    tab.close()


def make_screenshot(target: str) -> None:
    """Greedy decoding, a token LM, LM and phrases, on the shipped speech."""
    from tempfile import TemporaryDirectory

    from playwright.sync_api import sync_playwright

    speech, phrases = ASSETS / "speech" / "test.json", ASSETS / "phrases.txt"
    runs = {
        "greedy": ["strategy=greedy_batch"],
        "lm": [f"lm={ASSETS / 'lm' / 'tok3.arpa'}", "lm_weight=0.5", "beam_beta=1.0"],
        "lm_phrases": [f"preset={ASSETS / 'demo.yaml'}"],
    }
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        files = [f"{folder}/{name}.jsonl" for name in runs]
        for file, options in zip(files, runs.values(), strict=True):
            arguments = ["transcribe", f"model={CTC_MODEL}", f"out={file}", *options]
            assert main([*arguments, f"audio={SPEECH}"]) == 0  # compiles, and builds the graph
            assert main([*arguments, f"manifest={speech}"]) == 0
        written = Path(folder) / "page.html"
        assert compare([*files, f"manifest={speech}", f"phrases={phrases}", f"out={written}"]) == 0
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = opened(found, written, [], viewport={"width": 980, "height": 760}, color_scheme="light")
        tab.get_by_label("Order").select_option("C gains most over A")
        tab.locator("article").first.wait_for()
        tab.screenshot(path=target)
        found.close()
    print(f"{target}: {os.path.getsize(target)} bytes")


if __name__ == "__main__":
    make_screenshot(sys.argv[1])
