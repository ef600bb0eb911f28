"""Make the self-made speech set and its checkpoints from nothing.

    python assets/self/recipe/make.py OUT_DIR

Needs espeak-ng (Debian: ``apt-get install espeak-ng``) and ``pip install nemo_toolkit[asr]``.
The stages run in this order, and each one can be run alone once those before it have been run:

    text    sentences, phrase list and tokenizer
    speech  FLAC files and NeMo manifests
    lm      word and token language models
    train   weights of one encoder with CTC, RNN-T and TDT heads
    export  .nemo files
    check   restore them and print NeMo's greedy word error rates

To see all of it run in a few minutes: ``make.py OUT_DIR --sentences 60 --steps 5``.
"""

import argparse
from pathlib import Path

STAGES = ("text", "speech", "lm", "train", "export", "check")
SPOKEN_SPLITS = ("test", "dev", "train")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, metavar="STAGE")
    parser.add_argument("--sentences", type=int, default=5000, help="to train on (5000)")
    parser.add_argument("--lm-sentences", type=int, default=4000, help="for the LMs (4000)")
    parser.add_argument(
        "--coined",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of invented surnames in training and LM text, 0 to 0.9 (0)",
    )
    parser.add_argument("--steps", type=int, default=3600, help="of training (3600)")
    parser.add_argument("--layers", type=int, default=4, help="of the encoder (4)")
    parser.add_argument("--width", type=int, default=96, help="of encoder and heads (96)")
    parser.add_argument("--processes", type=int, default=1, help="for speech synthesis (1)")
    parser.add_argument("--seed", type=int, default=3)
    arguments = parser.parse_args()
    if not 0 <= arguments.coined <= 0.9:
        parser.error("--coined must lie between 0 and 0.9")
    return arguments


def quieten_nemo() -> None:
    """Keep NeMo to errors (`transcribe` still prints a few warnings)."""
    from nemo.utils import logging

    logging.setLevel(logging.ERROR)


def make_text(args: argparse.Namespace) -> None:
    """Draw the sentences; train the tokenizer on the training sentences."""
    import text

    splits = text.draw_sentences(args.sentences, args.lm_sentences, args.coined, args.seed)
    for split in SPOKEN_SPLITS:
        text.write_lines(args.out / "text" / f"{split}.txt", splits[split])
    text.write_lines(args.out / "lm" / "lm_train.txt", splits["lm"])
    text.write_lines(args.out / "phrases.txt", text.phrases())
    text.train_tokenizer(splits["train"], args.out / "tokenizer")


def make_speech(args: argparse.Namespace) -> None:
    """Speak every split."""
    import speech
    import text

    for split in SPOKEN_SPLITS:
        sentences = text.read_lines(args.out / "text" / f"{split}.txt")
        speech.record_split(sentences, split, args.out / "speech", args.seed, args.processes)


def make_lm(args: argparse.Namespace) -> None:
    """Estimate the language models."""
    import arpa
    import text

    sentences = text.read_lines(args.out / "lm" / "lm_train.txt")
    arpa.write_models(sentences, args.out / "tokenizer" / "tokenizer.model", args.out / "lm")


def make_train(args: argparse.Namespace) -> None:
    """Train the weights."""
    import train

    quieten_nemo()
    settings = train.Settings(steps=args.steps, layers=args.layers, width=args.width, seed=args.seed)
    manifest = args.out / "speech" / "train.json"
    train.train(manifest, args.out / "tokenizer", args.out / "weights.pt", settings)


def make_export(args: argparse.Namespace) -> None:
    """Write the .nemo files."""
    import model

    quieten_nemo()
    tokenizer, models = args.out / "tokenizer", args.out / "models"
    model.export(args.out / "weights.pt", tokenizer, args.layers, args.width, models)


def make_check(args: argparse.Namespace) -> None:
    """Restore every .nemo file and print its greedy word error rate on dev and test."""
    from nemo.collections.asr.metrics.wer import word_error_rate
    from nemo.collections.asr.models import ASRModel
    from speech import read_manifest

    quieten_nemo()
    for path in sorted((args.out / "models").glob("*.nemo")):
        model = ASRModel.restore_from(str(path), map_location="cpu")
        for split in ("dev", "test"):
            entries = read_manifest(args.out / "speech" / f"{split}.json")
            audio = [entry["audio_filepath"] for entry in entries]
            hypotheses = [h.text for h in model.transcribe(audio, batch_size=16, verbose=False)]
            errors = word_error_rate(hypotheses, [entry["text"] for entry in entries])
            print(f"{path.stem:18} {split:4} greedy WER {100 * errors:.1f} %", flush=True)


def main() -> None:
    """Run the chosen stages in order."""
    args = parse_arguments()
    for stage in STAGES:
        if stage in args.stages:
            print(f"== {stage}", flush=True)
            globals()[f"make_{stage}"](args)


if __name__ == "__main__":
    main()
