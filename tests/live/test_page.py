"""The page of the live server, in a real Chromium whose microphone is a file.

    python -m tests.live.test_page docs/live.png

makes the screenshot of the docs.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest

from nemo_gpu_decoding.search.result import WordOption
from nemo_gpu_decoding.transcript import Alternative, Transcript
from tests.assets import ASSETS, CTC_MODEL

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
pytest.importorskip("playwright.sync_api")

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt install chromium")
SPEECH = ASSETS / "speech" / "test" / "test_000.flac"
WAIT = 30_000  # milliseconds
COLOR = "element => getComputedStyle(element).color"


def fake_microphone(folder: Path) -> Path:
    """The speech as a WAV file, with silence behind it: Chromium plays it again and again."""
    import numpy as np
    import soundfile

    samples, rate = soundfile.read(SPEECH, dtype="int16")
    silence = np.random.default_rng(1).normal(0, 30, 3 * rate).astype("int16")
    soundfile.write(folder / "speech.wav", np.concatenate([samples, silence]), rate)
    return folder / "speech.wav"


def open_page(playwright, wav: Path, url: str):
    """Open the page in a browser. Assertions wait as long as actions: a busy machine plays the file late."""
    from playwright.sync_api import expect

    expect.set_options(timeout=WAIT)
    flags = ["--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream", "--no-sandbox"]
    flags.append(f"--use-file-for-fake-audio-capture={wav}")
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
    page = browser.new_page(viewport={"width": 1000, "height": 700}, permissions=["microphone"], color_scheme="light")
    page.set_default_timeout(WAIT)
    page.goto(url)
    return browser, page


@needs_chromium
def test_page_transcribes_microphone_and_file_and_shows_errors(tmp_path):
    from playwright.sync_api import expect, sync_playwright

    from nemo_gpu_decoding.live.interface import Limits
    from tests.live.test_server import NumberReader, running

    reader = NumberReader()
    reader.step = lambda chunks, step=reader.step: [hide_numbers(own) for own in step(chunks)]
    with running(reader, limits=Limits(max_phrases=2)) as server, sync_playwright() as playwright:
        browser, page = open_page(playwright, fake_microphone(tmp_path), server.url)
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: problems.append(request.url) if server.url not in request.url else None)

        expect(page.locator("#about")).to_have_text("digits, numbers")
        page.get_by_text("The server’s phrases (2)").click()
        expect(page.locator("#served li")).to_have_text(["one", "two"])
        page.get_by_label("Alternatives to show").fill("2")
        page.get_by_role("button", name="Microphone").click()
        expect(page.get_by_role("status")).to_have_text("Listening to the microphone.")
        expect(page.locator("#committed")).to_have_text("word and")
        expect(page.locator("#tail")).to_have_text(" more")
        assert page.locator("#committed").evaluate(COLOR) != page.locator("#tail").evaluate(COLOR)
        expect(page.locator("#alternatives li")).to_have_text(["word and more", "word and moor"])
        expect(page.locator("#latency")).to_contain_text("ms")
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("status")).to_have_text("Done.")
        spoken = page.locator("#transcript p:not([id]) span")
        expect(spoken.first).to_have_text("word")
        shown = [(span.get_attribute("class"), span.get_attribute("title")) for span in spoken.all()[:3]]
        assert [kind for kind, _ in shown] == [None, "unsure", None]
        assert [str(title).partition(" s")[2] for _, title in shown] == [", confidence 0.50", ", confidence 0.30", ""]
        expect(page.locator("#choices")).to_be_hidden()
        spoken.first.click()
        expect(page.locator("#choices li")).to_have_text(["word", "no word"])
        assert page.locator("#partial").inner_text() == ""
        expect(page.locator("#alternatives li")).to_have_text(["word and more", "word and moor"])

        text = "\n".join(page.locator("#transcript p:not([id])").all_text_contents()) + "\n"
        page.context.grant_permissions(["clipboard-read", "clipboard-write", "microphone"])
        page.get_by_role("button", name="Copy").click()
        page.wait_for_function("text => navigator.clipboard.readText().then(found => found === text)", arg=text)
        with page.expect_download() as download:
            page.get_by_role("button", name="Download").click()
        assert Path(download.value.path()).read_text(encoding="utf-8") == text

        page.locator("#file").set_input_files(SPEECH)
        expect(page.get_by_role("status")).to_have_text("Listening to test_000.flac.")
        expect(page.get_by_role("status")).to_have_text("Done.")
        assert page.locator("#seconds").inner_text() == f"{3.6854:.1f} s"

        assert problems == []
        page.get_by_label("Phrases, one per line").fill("a\n b \n\nc")
        page.get_by_role("button", name="Microphone").click()
        expect(page.get_by_role("alert")).to_contain_text("phrases is 'a list of 3', expected at most 2 phrases")
        expect(page.get_by_role("button", name="Microphone")).to_be_enabled()
        assert not server.batcher.sessions
        browser.close()


def hide_numbers(step):
    """Replace the words by three fixed words, as the number of words from a microphone changes with every run."""
    shown = {}
    for kind, found in (("final", step.final), ("partial", step.partial)):
        if found is not None:
            words = tuple(
                word._replace(word="word", confidence=value) for word in found.words[:1] for value in (0.5, 0.3, None)
            )
            n_best = (Alternative("word and more", -1.0), Alternative("word and moor", -2.0))[: len(found.n_best)]
            choices = WordOption("word", 0.75), WordOption("", 0.25)
            slots = tuple(slot._replace(alternatives=choices) for slot in found.alternatives)
            shown[kind] = Transcript("word and more", None, words, n_best, committed="word and", alternatives=slots)
    return step._replace(**shown)


def make_screenshot(target: str) -> None:
    """The page while it hears the shipped speech, with the shipped checkpoint, LM and phrases."""
    from tempfile import TemporaryDirectory

    from playwright.sync_api import expect, sync_playwright

    from nemo_gpu_decoding.cli.options import parse_options
    from nemo_gpu_decoding.cli.serve import ServeOptions, build_server
    from tests.live.test_server import served

    arguments = [f"model={CTC_MODEL}", f"lm={ASSETS / 'lm' / 'tok3.arpa'}", "port=0"]
    server = build_server(parse_options(ServeOptions, arguments))
    with TemporaryDirectory() as folder, served(server), sync_playwright() as playwright:
        browser, page = open_page(playwright, fake_microphone(Path(folder)), server.url)
        page.get_by_label("Phrases, one per line").fill("teresa\ncarla graham\ncastellano")
        page.get_by_label("Weight").fill("1")
        page.get_by_label("Alternatives to show").fill("3")
        page.get_by_role("button", name="Microphone").click()
        expect(page.locator("#transcript p:not([id])")).to_have_count(1, timeout=WAIT)
        expect(page.locator("#partial")).to_contain_text("contract", timeout=WAIT)
        page.screenshot(path=target)
        browser.close()
    print(f"{target}: {os.path.getsize(target)} bytes")


if __name__ == "__main__":
    make_screenshot(sys.argv[1])
