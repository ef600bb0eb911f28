"""Make the self-made speech set and its checkpoints from nothing.

    python assets/self/recipe/make.py OUT_DIR

Needs espeak-ng (Debian: ``apt-get install espeak-ng``) and ``pip install nemo_toolkit[asr]``.
The stages run in this order, and each one can be run alone once those before it have been run:

    text    sentences, phrase list and tokenizer
    speech  FLAC files and NeMo manifests
    lm      word and token language models
    train   weights of one encoder with CTC, RNN-T and TDT heads; with --streaming CTC and RNN-T
    export  .nemo files
    check   restore them and print NeMo's greedy word error rates

To see all of it run in a few minutes: ``make.py OUT_DIR --sentences 60 --steps 5``.
"""

import argparse
import math
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
        help="share of invented names in training and LM text, 0 to 0.9 (0)",
    )
    parser.add_argument(
        "--for-set",
        type=Path,
        metavar="SET_DIR",
        help="a set made before, with LMs: take its tokenizer, and never train on its dev and test sentences",
    )
    parser.add_argument(
        "--more", type=Path, nargs="+", default=[], metavar="DIR", help="train on the speech of these folders, too"
    )
    parser.add_argument("--steps", type=int, default=3600, help="of training (3600)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of training, to end it sooner")
    parser.add_argument("--seconds-per-batch", type=float, default=60.0, help="of speech (60)")
    parser.add_argument("--ctc-only", type=float, default=0.5, metavar="SHARE", help="of the training (0.5)")
    parser.add_argument("--learning-rate", type=float, default=2.2e-3, help="at its highest (2.2e-3)")
    parser.add_argument("--resume", action="store_true", help="train on from the weights that there are")
    parser.add_argument("--layers", type=int, default=4, help="of the encoder (4)")
    parser.add_argument("--width", type=int, default=96, help="of encoder and heads (96)")
    parser.add_argument("--streaming", action="store_true", help="a cache-aware model, with CTC and RNN-T heads")
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
    """Draw the sentences; train the tokenizer on the training sentences, or take that of another set."""
    import speech
    import text

    splits = text.draw_sentences(args.sentences, args.lm_sentences, args.coined, args.seed)
    if args.for_set:
        manifests = [args.for_set / "speech" / f"{split}.json" for split in ("dev", "test")]
        held_out = {entry["text"] for manifest in manifests for entry in speech.read_manifest(manifest)}
        sentences = [sentence for sentence in splits["train"] if sentence not in held_out]
        text.write_lines(args.out / "text" / "train.txt", sentences)
        text.copy_tokenizer(args.for_set / "models" / "self_ctc.nemo", args.out / "tokenizer")
        return
    for split in SPOKEN_SPLITS:
        text.write_lines(args.out / "text" / f"{split}.txt", splits[split])
    text.write_lines(args.out / "lm" / "lm_train.txt", splits["lm"])
    text.write_lines(args.out / "phrases.txt", text.phrases())
    text.train_tokenizer(splits["train"], args.out / "tokenizer")


def make_speech(args: argparse.Namespace) -> None:
    """Speak every split, or what is trained on if there is a set."""
    import speech
    import text

    for split in ("train",) if args.for_set else SPOKEN_SPLITS:
        sentences = text.read_lines(args.out / "text" / f"{split}.txt")
        speech.record_split(sentences, split, args.out / "speech", args.seed, args.processes)
        if split in speech.BURST_SEEDS:
            speech.burst_split(args.out / "speech" / f"{split}.json", set(text.phrases()), args.out / "speech")


def make_lm(args: argparse.Namespace) -> None:
    """Estimate the language models, if there is no set that has them."""
    import arpa
    import text

    if args.for_set:
        return
    sentences = text.read_lines(args.out / "lm" / "lm_train.txt")
    arpa.write_models(sentences, args.out / "tokenizer" / "tokenizer.model", args.out / "lm")


def make_train(args: argparse.Namespace) -> None:
    """Train the weights."""
    import model
    import train

    quieten_nemo()
    shape = model.Shape(args.layers, args.width, args.streaming)
    names = ("steps", "minutes", "seconds_per_batch", "learning_rate", "resume", "ctc_only", "seed")
    settings = train.Settings(shape, **{name: getattr(args, name) for name in names})
    manifests = [folder / "speech" / "train.json" for folder in (args.out, *args.more)]
    train.train(manifests, args.out / "tokenizer", args.out / "weights.pt", settings)


def make_export(args: argparse.Namespace) -> None:
    """Write the .nemo files."""
    import model
    from speech import read_manifest

    quieten_nemo()
    shape = model.Shape(args.layers, args.width, args.streaming)
    manifests = [folder / "speech" / "train.json" for folder in (args.out, *args.more)]
    seconds = [entry["duration"] for manifest in manifests for entry in read_manifest(manifest)]
    model.export(args.out / "weights.pt", args.out / "tokenizer", shape, args.out / "models", seconds)


def make_check(args: argparse.Namespace) -> None:
    """Restore every .nemo file and print the greedy word error rates of its heads on dev and test."""
    from nemo.collections.asr.metrics.wer import word_error_rate
    from nemo.collections.asr.models import ASRModel
    from speech import read_manifest

    quieten_nemo()
    for path in sorted((args.out / "models").glob("*.nemo")):
        model = ASRModel.restore_from(str(path), map_location="cpu")
        for head in ("rnnt", "ctc") if hasattr(model, "cur_decoder") else ("ctc",):
            if hasattr(model, "cur_decoder"):
                model.change_decoding_strategy(decoder_type=head, verbose=False)
            for split in ("dev", "test"):
                entries = read_manifest((args.for_set or args.out) / "speech" / f"{split}.json")
                audio = [entry["audio_filepath"] for entry in entries]
                hypotheses = [h.text for h in model.transcribe(audio, batch_size=16, verbose=False)]
                errors = word_error_rate(hypotheses, [entry["text"] for entry in entries])
                print(f"{path.stem:18} {head:4} {split:4} greedy WER {100 * errors:.1f} %", flush=True)


def main() -> None:
    """Run the chosen stages in order."""
    args = parse_arguments()
    for stage in STAGES:
        if stage in args.stages:
            print(f"== {stage}", flush=True)
            globals()[f"make_{stage}"](args)


if __name__ == "__main__":
    main()
