"""Make the drifting checkpoint, its monolingual twin and their speech.

    PYTHONPATH=assets/self/recipe python assets/drift/recipe/make.py OUT_DIR

Needs espeak-ng (Debian: ``apt-get install espeak-ng``) and ``pip install nemo_toolkit[asr]``. Speech synthesis,
model and training are those of assets/self/recipe. The stages run in this order:

    text    sentences, LM text and the tokenizer, which all languages share
    speech  audio and NeMo manifests
    train   one encoder with CTC, RNN-T and TDT heads on English, French and Spanish, 90/5/5
    twin    the same on the French utterances alone
    export  .nemo files, and the text of the LMs
    more    more French test utterances, with other sentences
"""

import argparse
import gzip
import json
import random
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import sentences
import soundfile
import speech
import text

STAGES = ("text", "speech", "train", "twin", "export", "more")
TWIN = "fr"
# Utterances that are trained on, and those of dev and of test.
TRAINING = {"en": 5400, "fr": 300, "es": 300}
HELD_OUT = {"en": 20, "fr": 40, "es": 20}
MORE = 200  # further test utterances of TWIN
LM_SENTENCES = 4000  # of each language
ACCENTS = {"en": speech.TRAINING_ACCENTS, "fr": ("fr-fr", "fr-fr", "fr-be", "fr-ch"), "es": ("es", "es", "es-419")}
HELD_OUT_VARIANTS = ("+f3", "+m5", "+steph")  # that training never hears
SHIPPED = Path(__file__).parents[2] / "self" / "models" / "self_hybrid_rnnt.nemo"  # its encoder is the start


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, metavar="STAGE")
    parser.add_argument("--pieces", type=int, default=128, help="of the tokenizer (128)")
    parser.add_argument("--encoder", type=Path, default=SHIPPED, metavar="FILE", help="the start: .nemo or .pt")
    parser.add_argument("--steps", type=int, default=4000, help="of training (4000)")
    parser.add_argument("--twin-steps", type=int, default=1500, help="of the twin's training (1500)")
    parser.add_argument("--seconds-per-batch", type=float, default=40.0, help="of speech (40)")
    parser.add_argument("--ctc-only", type=float, default=0.3, metavar="SHARE", help="of the training (0.3)")
    parser.add_argument("--learning-rate", type=float, default=1.6e-3, help="at its highest (1.6e-3)")
    parser.add_argument("--resume", action="store_true", help="train on from the weights that there are")
    parser.add_argument("--processes", type=int, default=1, help="for speech synthesis (1)")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def make_text(args: argparse.Namespace) -> None:
    """Draw the sentences of each split; none is in two of them. The tokenizer has as much text of each language."""
    seen: set[str] = set()
    balanced = []
    for language in TRAINING:
        counts = {"test": HELD_OUT, "dev": HELD_OUT, "train": TRAINING, "lm": dict.fromkeys(TRAINING, LM_SENTENCES)}
        for split, count in counts.items():
            drawn = sentences.distinct(language, random.Random(f"{args.seed} {split} {language}"), seen)
            lines = text.take(drawn, count[language])
            text.write_lines(args.out / "text" / f"{split}_{language}.txt", lines)
        balanced += lines
    text.VOCABULARY_SIZE = args.pieces
    text.train_tokenizer(balanced, args.out / "tokenizer")


def make_speech(args: argparse.Namespace) -> None:
    """Speak every split; dev and test are Opus files."""
    for split in ("test", "dev", "train"):
        entries = [entry for language in TRAINING for entry in recorded(language, split, args)]
        write_manifest(args.out / "speech" / f"{split}.json", entries)
        write_manifest(args.out / "speech" / f"{split}_{TWIN}.json", [e for e in entries if e["lang"] == TWIN])


def recorded(language: str, split: str, args: argparse.Namespace) -> list[dict]:
    """Speak a split of a language; returns its lines of the manifest."""
    entries = []
    utterances = plan(language, split, args)
    with ProcessPoolExecutor(args.processes) as pool:
        durations = list(pool.map(speech.record, utterances, chunksize=16))
    for utterance, duration in zip(utterances, durations, strict=True):
        path = utterance.path if split == "train" else compressed(utterance.path)
        entries.append({
            "audio_filepath": path.relative_to(args.out / "speech").as_posix(),
            "duration": round(duration, 4),
            "text": utterance.text,
            "lang": language,
        })  # fmt: skip
    return entries


def make_more(args: argparse.Namespace) -> None:
    """Add test utterances of one language, whose sentences are in no other split."""
    seen = {line for file in (args.out / "text").glob("*_*.txt") for line in text.read_lines(file)}
    more = argparse.Namespace(out=args.out / "more", seed=args.seed + 1, processes=args.processes)
    drawn = sentences.distinct(TWIN, random.Random(f"{more.seed} test {TWIN}"), seen)
    (more.out / "text").mkdir(parents=True, exist_ok=True)
    text.write_lines(more.out / "text" / f"test_{TWIN}.txt", text.take(drawn, MORE))
    folder = args.out / "speech"
    manifest = folder / "test.json"
    first = [json.loads(line) for line in text.read_lines(manifest)][: sum(HELD_OUT.values())]
    added = recorded(TWIN, "test", more)
    for number, entry in enumerate(added, HELD_OUT[TWIN]):
        name = f"test/{TWIN}_{number:03d}.ogg"
        (more.out / "speech" / entry["audio_filepath"]).rename(folder / name)
        entry["audio_filepath"] = name
    write_manifest(manifest, first + added)


def plan(language: str, split: str, args: argparse.Namespace) -> list[speech.Utterance]:
    """Choose a voice, speed, pitch and seed for every sentence."""
    rng = random.Random(f"{args.seed} speech {split} {language}")
    variants = speech.TRAINING_VARIANTS if split == "train" else HELD_OUT_VARIANTS
    return [
        speech.Utterance(
            text=sentence,
            voice=rng.choice(ACCENTS[language]) + rng.choice(variants),
            speed=rng.randint(150, 190),
            pitch=rng.randint(38, 62),
            disturbance=speech.TRAINING_DISTURBANCE if split == "train" else speech.HELD_OUT_DISTURBANCE,
            seed=rng.randrange(1 << 30),
            path=args.out / "speech" / split / f"{language}_{number:03d}.flac",
        )
        for number, sentence in enumerate(text.read_lines(args.out / "text" / f"{split}_{language}.txt"))
    ]


def compressed(path: Path) -> Path:
    """The file as Opus, which replaces it."""
    samples, rate = soundfile.read(path, dtype="float32")
    opus = path.with_suffix(".ogg")
    soundfile.write(opus, samples, rate, format="OGG", subtype="OPUS")
    path.unlink()
    return opus


def write_manifest(path: Path, entries: list[dict]) -> None:
    """Write NeMo's JSON lines."""
    path.write_text("".join(json.dumps(e, ensure_ascii=False) + "\n" for e in entries), encoding="utf-8")


def make_train(args: argparse.Namespace) -> None:
    """Train on all languages."""
    run_training(args, "train", "weights.pt", args.steps)


def make_twin(args: argparse.Namespace) -> None:
    """Train on one language."""
    run_training(args, f"train_{TWIN}", "twin.pt", args.twin_steps)


def run_training(args: argparse.Namespace, manifest: str, weights: str, steps: int) -> None:
    """Train from the encoder of another model, with new heads, or go on."""
    import model
    import torch
    import train
    from nemo.collections.asr.models import ASRModel
    from nemo.utils import logging

    logging.setLevel(logging.ERROR)
    shape = model.Shape(layers=4, width=96, streaming=False)
    path = args.out / weights
    if not args.resume:
        torch.manual_seed(args.seed)
        heads = model.build_sharing_encoder(args.out / "tokenizer", shape)
        if args.encoder.suffix == ".pt":
            start = model.part(torch.load(args.encoder)["hybrid_rnnt"], "encoder")
        else:
            start = ASRModel.restore_from(str(args.encoder), map_location="cpu").encoder.state_dict()
        for head in heads.values():
            head.encoder.load_state_dict(start)
        torch.save({kind: head.state_dict() for kind, head in heads.items()}, path)
    names = ("seconds_per_batch", "learning_rate", "ctc_only", "seed")
    settings = train.Settings(shape, steps, resume=True, **{name: getattr(args, name) for name in names})
    train.train([args.out / "speech" / f"{manifest}.json"], args.out / "tokenizer", path, settings)


def make_export(args: argparse.Namespace) -> None:
    """Write the .nemo files of both, and the texts of the LMs."""
    import model
    from nemo.utils import logging

    logging.setLevel(logging.ERROR)
    shape = model.Shape(layers=4, width=96, streaming=False)
    for weights, name in (("weights.pt", "drift"), ("twin.pt", "twin")):
        if (args.out / weights).exists():
            model.export(args.out / weights, args.out / "tokenizer", shape, args.out / name)
            for kind in ("rnnt", "tdt"):  # both have the CTC head
                target = args.out / "models" / f"{name}_{kind}.nemo"
                target.parent.mkdir(exist_ok=True)
                (args.out / name / f"self_hybrid_{kind}.nemo").rename(target)
    rows = [("train", line) for own in TRAINING for line in text.read_lines(args.out / "text" / f"train_{own}.txt")]
    rows += [(own, line) for own in TRAINING for line in text.read_lines(args.out / "text" / f"lm_{own}.txt")]
    lines = "".join(f"{name}\t{line}\n" for name, line in rows)
    (args.out / "text.tsv.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))


def main() -> None:
    """Run the chosen stages in order."""
    args = parse_arguments()
    for stage in STAGES:
        if stage in args.stages:
            print(f"== {stage}", flush=True)
            globals()[f"make_{stage}"](args)


if __name__ == "__main__":
    main()
