"""Where the shipped speech, checkpoints, LMs and scripts are."""

import json
import subprocess
import sys
import tarfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

ROOT = Path(__file__).parent.parent
ASSETS = ROOT / "assets" / "self"
CTC_MODEL = ASSETS / "models" / "self_ctc.nemo"


def load_script(path: Path):
    """A Python file that no package has, as a module."""
    spec = spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def speech() -> list[dict]:
    """The utterances of the shipped test set; `audio_filepath` is made absolute."""
    rows = [json.loads(line) for line in (ASSETS / "speech" / "test.json").read_text().splitlines()]
    return [row | {"audio_filepath": str(ASSETS / "speech" / row["audio_filepath"])} for row in rows]


def build(source: Path, target: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (file,) = folder.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return file


def quoted(value) -> str:
    """A value as Hydra's overrides take it: quoted, because paths may have spaces or accents."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(str(value), Quote.single).with_quotes()


def sentencepiece_processor():
    """The tokenizer of the shipped checkpoints."""
    import sentencepiece

    with tarfile.open(CTC_MODEL) as archive:
        name = next(n for n in archive.getnames() if n.endswith("tokenizer.model"))
        return sentencepiece.SentencePieceProcessor(model_proto=archive.extractfile(name).read())
