"""Train CTC and transducer heads on one encoder, in a plain PyTorch loop.

The first half of the steps trains CTC alone, which settles the encoder.  After that each batch
is also dealt out to the transducer heads, an equal part to each, as their losses are costly.
"""

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import soundfile
import torch
from losses import rnnt_loss, tdt_loss
from model import DURATIONS, FRAMES_PER_SECOND, MEL_BANDS, SUBSAMPLING, TDT_SIGMA, Shape, build_sharing_encoder
from nemo.collections.asr.models import ASRModel
from speech import read_manifest
from torch import Tensor

SILENCE = -24 * math.log(2)  # the lowest log-mel feature


@dataclass
class Settings:
    """What to train, and for how long."""

    shape: Shape
    steps: int = 3600
    minutes: float = math.inf  # to end before the steps are done
    seconds_per_batch: float = 60.0
    learning_rate: float = 2.2e-3
    warm_up_steps: int = 200
    resume: bool = False  # go on with the weights that there are
    ctc_only: float = 0.5  # share of the training
    seed: int = 3
    log_every: int = 100
    save_every: int = 500


@dataclass
class Example:
    """One utterance: 16-bit log-mel features (bands, frames) and token ids."""

    features: Tensor
    tokens: list[int]

    @property
    def frames(self) -> int:
        """Number of feature frames."""
        return self.features.shape[1]

    def fits_ctc(self) -> bool:
        """CTC needs a frame per token, and a blank between equal neighbours."""
        repeats = sum(a == b for a, b in pairwise(self.tokens))
        return math.ceil(self.frames / SUBSAMPLING) > len(self.tokens) + repeats


@dataclass
class Batch:
    """Padded tensors, and how much of each row is real."""

    features: Tensor
    frames: Tensor
    tokens: Tensor
    lengths: Tensor

    def rows(self, which: slice) -> "Batch":
        """Some of the utterances, with the tokens cut to the longest of them."""
        lengths = self.lengths[which]
        tokens = self.tokens[which, : int(lengths.max())]
        return Batch(self.features[which], self.frames[which], tokens, lengths)


@torch.no_grad()
def load_examples(manifest: Path, model: ASRModel) -> list[Example]:
    """Compute the features of all utterances with the model's own preprocessor."""
    preprocessor = model.preprocessor.eval()
    examples = []
    for entry in read_manifest(manifest):
        samples, _ = soundfile.read(entry["audio_filepath"], dtype="float32")
        audio = torch.from_numpy(samples)[None]
        features, frames = preprocessor(input_signal=audio, length=torch.tensor([len(samples)]))
        tokens = model.tokenizer.text_to_ids(entry["text"])
        examples.append(Example(features[0, :, : int(frames)].half(), tokens))
    return examples


def in_silence(example: Example, rng: random.Random) -> Example:
    """The example with digital silence or faint noise around it: streams begin before speech and end behind it."""

    def quiet(at_most: int) -> Tensor:
        size = MEL_BANDS, rng.randint(0, at_most)
        if rng.random() < 0.5:
            return torch.full(size, SILENCE)
        return (rng.uniform(SILENCE, SILENCE / 1.5) + torch.randn(size)).clamp(min=SILENCE)

    return Example(torch.cat([quiet(32), example.features.float(), quiet(64)], dim=1), example.tokens)


def collate(examples: list[Example]) -> Batch:
    """Pad features and tokens with zeros."""

    def padded(rows: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    return Batch(
        features=padded([e.features.float().T for e in examples]).transpose(1, 2),
        frames=torch.tensor([e.frames for e in examples]),
        tokens=padded([torch.tensor(e.tokens) for e in examples]),
        lengths=torch.tensor([len(e.tokens) for e in examples]),
    )


def endless_batches(spoken: list[Example], settings: Settings, rng: random.Random) -> Iterator[Batch]:
    """Batches of about equal padded duration, of utterances of about equal length, for ever."""
    limit, examples = settings.seconds_per_batch * FRAMES_PER_SECOND, spoken
    while True:
        if settings.shape.streaming:
            examples = [in_silence(example, rng) for example in spoken]
        # Jitter keeps the same utterances from always meeting in the same batch.
        by_length = sorted(examples, key=lambda e: e.frames + rng.uniform(-20, 20))
        groups: list[list[Example]] = [[]]
        for example in by_length:
            longest = max(e.frames for e in [*groups[-1], example])
            if groups[-1] and longest * (len(groups[-1]) + 1) > limit:
                groups.append([])
            groups[-1].append(example)
        rng.shuffle(groups)
        yield from map(collate, groups)


def learning_rate(step: int, progress: float, settings: Settings) -> float:
    """Linear warm-up, and a half cosine down to 2 % of the peak; `progress` is the share that is done."""
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.learning_rate * min(1, (step + 1) / settings.warm_up_steps) * (0.98 * cosine + 0.02)


def ctc_loss(model: ASRModel, batch: Batch) -> Tensor:
    """CTC loss per token; `batch.features` are encoder outputs."""
    log_probs = model.ctc_decoder(encoder_output=batch.features).transpose(0, 1)
    blank = log_probs.shape[-1] - 1
    loss = torch.nn.functional.ctc_loss(
        log_probs, batch.tokens, batch.frames, batch.lengths, blank, "sum", zero_infinity=True
    )
    return loss / batch.lengths.sum()


def transducer_loss(model: ASRModel, batch: Batch, loss: Callable[..., Tensor]) -> Tensor:
    """Transducer loss per token; `batch.features` are encoder outputs."""
    predicted, _, _ = model.decoder(targets=batch.tokens, target_length=batch.lengths)
    encoded = batch.features[:, :, : int(batch.frames.max())]
    logits = model.joint(encoder_outputs=encoded, decoder_outputs=predicted)
    return loss(logits, batch.tokens, batch.frames, batch.lengths).sum() / batch.lengths.sum()


def losses(heads: dict[str, ASRModel], batch: Batch, transducers: bool) -> dict[str, Tensor]:
    """The loss of the shared CTC head, and of every transducer head on its part of the batch."""
    first, *_ = heads.values()
    augmented = first.spec_augmentation(input_spec=batch.features, length=batch.frames)
    encoded, frames = first.encoder(audio_signal=augmented, length=batch.frames)
    batch = Batch(encoded, frames, batch.tokens, batch.lengths)
    parts = {"CTC": ctc_loss(first, batch)}
    if transducers and len(frames) >= len(heads):
        offsets = random.sample(range(len(heads)), len(heads))
        for offset, (kind, model) in zip(offsets, heads.items(), strict=True):
            loss = tdt_loss_with_durations if kind == "hybrid_tdt" else rnnt_loss
            parts[kind] = transducer_loss(model, batch.rows(slice(offset, None, len(heads))), loss)
    return parts


def tdt_loss_with_durations(*arguments: Tensor) -> Tensor:
    """TDT loss with the durations and sigma of our models."""
    return tdt_loss(*arguments, DURATIONS, TDT_SIGMA)


def total(parts: dict[str, Tensor]) -> Tensor:
    """The loss to minimise: 0.4 of CTC and 0.6 of the transducers' mean, or CTC alone."""
    ctc, *transducers = parts.values()
    return 0.4 * ctc + 0.6 * sum(transducers) / len(transducers) if transducers else ctc


def make_optimizer(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only."""
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 1e-2},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98))


def train(manifests: list[Path], tokenizer: Path, weights: Path, settings: Settings) -> None:
    """Train on manifests and save the weights of all hybrid models, now and then and at the end.

    With `settings.resume` they start as they were saved, the optimiser anew.
    """
    random.seed(settings.seed)
    torch.manual_seed(settings.seed)
    torch.set_flush_denormal(True)
    heads = build_sharing_encoder(tokenizer, settings.shape)
    first = next(iter(heads.values()))
    examples = [e for manifest in manifests for e in load_examples(manifest, first) if e.fits_ctc()]
    if settings.resume:
        for kind, state in torch.load(weights, map_location="cpu").items():
            heads[kind].load_state_dict(state)
    models = torch.nn.ModuleList(heads.values()).train()
    parameters = list(models.parameters())
    print(f"{len(examples)} utterances, {sum(p.numel() for p in parameters)} parameters")

    optimizer = make_optimizer(parameters)
    batches = endless_batches(examples, settings, random.Random(settings.seed))
    started = time.monotonic()
    for step in range(settings.steps):
        minutes = (time.monotonic() - started) / 60
        progress = max(step / settings.steps, minutes / settings.minutes)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, min(1, progress), settings)
        parts = losses(heads, next(batches), transducers=progress >= settings.ctc_only)
        optimizer.zero_grad()
        total(parts).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        last = progress >= 1 or step + 1 == settings.steps
        if (step + 1) % settings.log_every == 0 or last:
            report = ", ".join(f"{name} {value.item():.3f}" for name, value in parts.items())
            print(f"step {step + 1}: {report} ({minutes:.1f} min)", flush=True)
        if (step + 1) % settings.save_every == 0 or last:
            torch.save({kind: model.state_dict() for kind, model in heads.items()}, weights)
        if last:
            break
