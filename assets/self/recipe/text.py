"""What is said: office sentences from a small grammar, names from lists.

A sentence is drawn by expanding ``{sentence}`` in a context-free grammar until no slot is left.
There are two kinds of sentence:

* *plain* ones use only names that the recogniser meets in training;
* *name* ones hold at least one name from `SPOKEN`, which is never trained on and never in the
  language-model text.  Only a phrase list can repair those words.

`LISTED_ONLY` names are in the phrase list but never spoken.  They are there to catch a decoder
that boosts too hard.
"""

import random
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import sentencepiece

VOCABULARY_SIZE = 128

# Sentences per split: how many plain ones, and how many with a listed name.
PLAIN_AND_NAMED = {"test": (30, 30), "dev": (20, 20)}


def one_of(choices: str) -> tuple[str, ...]:
    """Split a comma-separated list."""
    return tuple(choices.split(", "))


class Names(NamedTuple):
    """Names by the role that they play in a sentence."""

    surname: tuple[str, ...]
    product: tuple[str, ...]
    city: tuple[str, ...]


# Listed for boosting, spoken in dev and test.
SPOKEN = Names(
    surname=one_of(
        "castellano, delacroix, fitzgerald, mcallister, montgomery, okonkwo, oyelaran, rutherford, "
        "takahashi, vandermeer, villanueva, yamamoto, zielinski"
    ),
    product=one_of("corvus, tempest, valkyrie"),
    city=one_of("chattanooga, saskatoon"),
)
# Listed for boosting, never spoken.
LISTED_ONLY = Names(
    surname=one_of("abernathy, baranov, hathaway, lindqvist, petrosyan, szymanski, wojcik"),
    product=one_of("halcyon, obsidian, pangolin, quasar, zephyr"),
    city=one_of("albuquerque, gdansk, ljubljana, reykjavik"),
)

Grammar = dict[str, tuple[str, ...]]

GRAMMAR: Grammar = {
    "sentence": (
        "schedule a {length} meeting with {person} {on_for} {day} at {time}",
        "please {do} the {adjective} {document} {why}",
        "send the {adjective} {document} to {person} before {time}",
        "what is the status of the {product} project in {city}",
        "order {number} {item} for the {place}",
        "{person} from {department} will fly to {city} {on_before} {day}",
        "tell {person} that {trouble} in the {place}",
        "the {department} team will {do} the {product} {document} {why}",
        "{trouble} and {person} is already {mood}",
        "book {number} {bookable} in {city} from {day} until {day}",
        "did {person} {do} the {document} for {product}",
        "move the {product} {event} to {day} {why}",
        "remind me to call {person} about the {adjective} {document}",
        "there are {number} {item} missing from the {place} in {city}",
        "{part} {number} of the {document} mentions {person} and {person}",
        "the {department} budget for {month} is {number} thousand dollars {how_far_off}",
    ),
    "person": ("{titled}",) * 7 + ("{first}",) * 3,
    "titled": one_of("{first} {surname}, mister {surname}, miss {surname}, doctor {surname}"),
    "day": one_of("{weekday}, next {weekday}, the {ordinal} of {month}, tomorrow, today"),
    "first": one_of(
        "anna, ben, carla, david, emma, frank, grace, henry, irene, jack, karen, liam, maria, "
        "nathan, olivia, peter, rachel, simon, teresa, victor, wendy"
    ),
    "surname": one_of(
        "adams, baker, carter, dawson, ellis, fletcher, graham, harrison, jenkins, keller, "
        "lambert, morgan, norton, osborne, parker, quinn, russell, sanders, turner, walker, young, "
        "bishop, chandler, donovan, everett, franklin, goodman, holloway, ingram, jordan, "
        "kendrick, lawson, maxwell, newman, patterson, ramsey, shepherd, thornton, vaughan, "
        "whitaker"
    ),
    "product": one_of("falcon, horizon, mercury, sapphire, compass, lantern, meridian, harbor, summit, orchid"),
    "city": one_of("boston, chicago, denver, london, paris, berlin, madrid, seattle, toronto, sydney, austin, dublin"),
    "weekday": one_of("monday, tuesday, wednesday, thursday, friday, saturday, sunday"),
    "month": one_of(
        "january, february, march, april, may, june, july, august, september, october, november, december"
    ),
    "time": one_of(
        "nine, ten, eleven, noon, one thirty, two, half past three, four fifteen, five, "
        "a quarter to six, seven in the evening, eight in the morning"
    ),
    "number": one_of(
        "two, three, four, five, six, seven, eight, nine, ten, twelve, fifteen, twenty, thirty, forty, fifty"
    ),
    "ordinal": one_of("first, second, third, fourth, fifth, tenth, twelfth, twentieth"),
    "document": one_of(
        "report, contract, budget, invoice, presentation, summary, proposal, schedule, draft, "
        "agenda, spreadsheet, checklist, press release, design document"
    ),
    "adjective": one_of(
        "final, quarterly, revised, annual, updated, preliminary, confidential, printed, signed, "
        "missing, old, detailed"
    ),
    "department": one_of(
        "marketing, engineering, finance, sales, legal, support, research, design, operations, security"
    ),
    "item": one_of(
        "laptops, chairs, monitors, notebooks, batteries, cameras, keyboards, cables, sandwiches, "
        "coffee cups, whiteboards, headphones"
    ),
    "place": one_of(
        "main office, warehouse, conference room, second floor, north building, training center, "
        "front desk, kitchen, parking garage, server room"
    ),
    "do": one_of("review, approve, print, forward, archive, translate, correct, finish, cancel, discuss"),
    "trouble": one_of(
        "the network is down, the printer is out of paper, the elevator is not working, "
        "the heating makes a strange noise, the password has expired, nobody answers the phone, "
        "the delivery is late again, the screen stays black, half of the lights are off, "
        "the door does not lock"
    ),
    "why": one_of(
        "because the client changed the deadline, since the numbers do not add up, "
        "before the board meets, after the holiday, as soon as possible, if there is enough time, "
        "unless the weather gets worse, while the team is travelling, when the auditors arrive, "
        "without telling anyone"
    ),
    "length": one_of("short, weekly, private, video"),
    "on_for": one_of("on, for"),
    "on_before": one_of("on, before"),
    "mood": one_of("angry, informed, on the way, looking for help"),
    "bookable": one_of("tickets, hotel rooms, seats"),
    "event": one_of("review, launch, demo, training"),
    "part": one_of("page, chapter, section, item"),
    "how_far_off": one_of("too high, too low, over the limit, below the estimate"),
}


def expand(symbol: str, grammar: Grammar, rng: random.Random) -> str:
    """Draw one text for a grammar symbol, filling the ``{slots}`` inside it from left to right."""
    if symbol == "coined":
        return coin(rng)
    choice = rng.choice(grammar[symbol])
    return re.sub(r"\{(\w+)\}", lambda slot: expand(slot[1], grammar, rng), choice)


def coin(rng: random.Random) -> str:
    """Invent a pronounceable name that is on no list, such as `brotson` or `chailey`."""
    onsets = one_of("b, br, c, ch, d, dr, f, fl, g, gr, h, j, k, l, m, n, p, qu, r, s, sh, st, t, tr, v, w, y, z")
    vowels = one_of("a, a, a, e, e, i, i, o, o, u, ai, ee, ia, oo, ar, or, er")
    codas = one_of("n, m, l, r, s, t, nd, ck, x, th, , , ")
    endings = one_of(
        "son, ton, ley, man, ford, well, berg, ova, ini, wick, dale, er, ington, ski, ano, ello, ez, moto, yama, "
        "ashi, escu, heim, nova, quist, enko, elli, worth, stein, ville, eau, eaux, ian, yan, ovich, uera, oga, oon, "
        "avik, ana, , , , "
    )
    while True:
        syllables = [rng.choice(onsets) + rng.choice(vowels) for _ in range(rng.choice((1, 2, 2, 3, 3)))]
        name = "".join(syllables) + rng.choice(codas) + rng.choice(endings)
        if 5 <= len(name) <= 13 and name not in phrases():
            return name


def with_coined(share: float) -> Grammar:
    """The grammar with a share (0 to 1) of the surnames, products and cities invented on the spot."""
    coined: Grammar = {}
    for role in Names._fields:
        known = GRAMMAR[role]
        coined[role] = known + ("{coined}",) * round(len(known) * share / (1 - share))
    return GRAMMAR | coined


def with_names(names: Names) -> Grammar:
    """The grammar with every surname, product and city taken from the given names."""
    return GRAMMAR | {"person": ("{titled}",)} | names._asdict()


def phrases() -> list[str]:
    """The phrase list for boosting: spoken names and distractors, sorted."""
    return sorted(name for group in (SPOKEN, LISTED_ONLY) for role in group for name in role)


def distinct(grammar: Grammar, rng: random.Random, seen: set[str]) -> Iterator[str]:
    """Endless stream of sentences not in `seen`; adds each one to it."""
    while True:
        sentence = expand("sentence", grammar, rng)
        if sentence not in seen:
            seen.add(sentence)
            yield sentence


def balanced(stream: Iterator[str], at_most: int = 3) -> Iterator[str]:
    """Only the sentences with a listed name, and none that uses a name too often."""
    listed = set(phrases())
    used: Counter[str] = Counter()
    for sentence in stream:
        names = [word for word in sentence.split() if word in listed]
        if names and all(used[name] < at_most for name in names):
            used.update(names)
            yield sentence


def take(stream: Iterator[str], count: int) -> list[str]:
    """The next `count` sentences of a stream."""
    return [next(stream) for _ in range(count)]


def draw_sentences(training: int, language_model: int, coined: float, seed: int) -> dict[str, list[str]]:
    """Draw all splits without a sentence in common: test, dev, train and lm (text only).

    Every split has its own random stream, so the size of one does not change another.
    """
    seen: set[str] = set()
    splits: dict[str, list[str]] = {}
    for split, (plain, named) in PLAIN_AND_NAMED.items():
        rng = random.Random(f"{seed} {split}")
        splits[split] = take(distinct(GRAMMAR, rng, seen), plain)
        splits[split] += take(balanced(distinct(with_names(SPOKEN), rng, seen)), named)
    for split, count in (("train", training), ("lm", language_model)):
        rng = random.Random(f"{seed} {split}")
        splits[split] = take(distinct(with_coined(coined), rng, seen), count)
    return splits


def train_tokenizer(sentences: list[str], folder: Path) -> None:
    """Train a byte-pair SentencePiece model and write the three files that NeMo looks for.

    Reading from memory rather than from a file keeps file names out of the model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "tokenizer.model", "wb") as model_file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model_file,
            vocab_size=VOCABULARY_SIZE,
            model_type="bpe",
            character_coverage=1.0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            unk_id=0,
            normalization_rule_name="identity",
            minloglevel=2,
        )
    tokenizer = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    pieces = [tokenizer.id_to_piece(i) for i in range(tokenizer.get_piece_size())]
    scores = [tokenizer.get_score(i) for i in range(len(pieces))]
    write_lines(folder / "vocab.txt", pieces[1:])
    rows = (f"{piece}\t{score:g}" for piece, score in zip(pieces, scores, strict=True))
    write_lines(folder / "tokenizer.vocab", list(rows))


def copy_tokenizer(model: Path, folder: Path) -> None:
    """Copy the three files of the tokenizer out of a .nemo file."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(model) as archive:
        for member in archive:
            name = member.name.rpartition("_")[2]
            if name in ("tokenizer.model", "tokenizer.vocab", "vocab.txt"):
                (folder / name).write_bytes(archive.extractfile(member).read())


def write_lines(path: Path, lines: list[str]) -> None:
    """Write lines to a UTF-8 text file, making its folder where needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_lines(path: Path) -> list[str]:
    """Read the lines of a UTF-8 text file."""
    return path.read_text(encoding="utf-8").splitlines()
