"""Read the options of flexctc_beam, alsd_pp and aes_pp in NeMo's `beam` section.

CTC has the keys of NeMo's `beam_batch`; transducers have those of `malsd_batch` and `maes_batch`. This package adds
`source_lm_model` and `source_lm_alpha` (density ratio), `lm_pool` and `lm_pool_alpha` (LMs that requests name),
`allowed_*` (language lock) and `grammar`.
"""

from dataclasses import replace
from typing import Any

from nemo.utils import logging
from omegaconf import DictConfig

from nemo_gpu_decoding.nemo_plugin.section import AllowedOptions, FusionOptions, NoEffect, Options, Section, Values
from nemo_gpu_decoding.schema import defaults_of
from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.transducer.config import AESConfig, ALSDConfig, TransducerConfig

MORE = defaults_of(FusionOptions, AllowedOptions) | {"n_best": None, "source_lm_alpha": None}
MORE |= {"lm_pool": None, "lm_pool_alpha": None, "confidence_map": None}  # of word confidence, as tune writes it

FLEXCTC = Section(
    "flexctc_beam", "ctc", "beam", FlexCTCConfig, MORE,
    foreign={"flashlight_cfg": "strategy 'flashlight'", "pyctcdecode_cfg": "strategy 'pyctcdecode'"},
    counterparts={
        "flashlight_cfg.boost_path": "boosting_tree.key_phrases_file",
        "pyctcdecode_cfg.hotwords": "boosting_tree.key_phrases_list",
        "pyctcdecode_cfg.hotword_weight": "boosting_tree_alpha",
    },
)  # fmt: skip
DEPRECATED = {"beam_alpha": "ngram_lm_alpha", "kenlm_path": "ngram_lm_model"}

# NeMo keys without effect on these transducer searches, with the accepted values: NeMo's defaults, those of
# its model configs, and those of eval_beamsearch_ngram_transducer.py (zeros for unused keys, prefix alpha 2)
UNUSED: dict[str, tuple[Any, ...]] = {
    "tsd_max_sym_exp_per_step": (50,),
    "tsd_max_sym_exp": (10, 50),
    "alsd_max_target_len": (1.0, 2.0),
    "nsc_max_timesteps_expansion": (1,),
    "nsc_prefix_alpha": (1,),
    "language_model": (None,),
    "maes_prefix_alpha": (1, 0, 2),
    "hat_subtract_ilm": (False,),
    "hat_ilm_weight": (0.0,),
}
OTHERS: dict[str, dict[str, tuple[Any, ...]]] = {  # keys of the other search
    "alsd_pp": {"maes_num_steps": (2,), "maes_expansion_beta": (2,), "maes_expansion_gamma": (2.3, 0)},
    "aes_pp": {"max_symbols": (None, 10), "max_symbols_per_step": (None, 10)},
}


def _transducer(strategy: str, search: type[TransducerConfig]) -> Section:
    reason = f"has no effect with '{strategy}'"
    unused = UNUSED | OTHERS[strategy]
    return Section(
        strategy, "rnnt", "beam", search, MORE,
        undeclared=("max_symbols", "tsd_max_sym_exp", "compute_timestamps"),
        optional=("blank_lm_score_mode", "pruning_mode", "allow_cuda_graphs"),
        unused={key: NoEffect(neutral, reason) for key, neutral in unused.items()},
    )  # fmt: skip


TRANSDUCERS = {"alsd_pp": _transducer("alsd_pp", ALSDConfig), "aes_pp": _transducer("aes_pp", AESConfig)}


def read_flexctc(cfg: DictConfig) -> Options[FlexCTCConfig]:
    """Return the checked options of flexctc_beam.

    Raises:
        ValueError: a key of `beam` is unknown, has no effect on flexctc_beam or has an invalid value; the
            message has the key and the valid ones.
        FileNotFoundError: an LM or the phrase file is no file.
    """
    beam = FLEXCTC.read(cfg)
    beam.flag("allow_cuda_graphs")
    given = {new: beam[old] for old, new in DEPRECATED.items() if beam[old] is not None}
    for old, new in DEPRECATED.items():
        if new in given:  # old names win over new ones, as in NeMo
            logging.warning(f"`beam.{old}` is deprecated, please use `beam.{new}` instead.")
    beam = replace(beam, entries={**beam.entries, **given})
    options = _options(beam, FlexCTCConfig)
    alignments = cfg.get("preserve_alignments")
    if options.search.merge == "prefix" and (beam["preserve_alignments"] if alignments is None else alignments):
        raise ValueError(
            "preserve_alignments is true with beam.merge=prefix, which sums over alignments and has "
            "none of its own; expected beam.merge=max or sum"
        )
    return options


def read_alsd(cfg: DictConfig) -> Options[ALSDConfig]:
    """Return the checked options of alsd_pp; raise as `read_flexctc`, and a ValueError for a multi-blank model."""
    beam = _read_transducer(cfg, "alsd_pp")
    # NeMo's dataclass has `max_symbols_per_step`, its decoders read `max_symbols`: accept both
    default, declared = ALSDConfig.max_symbols, beam["max_symbols_per_step"]
    read = beam.entries.get("max_symbols")
    if read is None:
        read = default if declared is None else declared
    elif declared not in (None, default, read):
        note = f"and beam.max_symbols_per_step is {declared}"
        raise beam.error("max_symbols", "one of them, or equal values", note)
    return _options(replace(beam, entries={**beam.entries, "max_symbols": read}), ALSDConfig)


def read_aes(cfg: DictConfig) -> Options[AESConfig]:
    """Return the checked options of aes_pp; raise the errors of `read_alsd`."""
    beam = _read_transducer(cfg, "aes_pp")
    if beam["maes_expansion_gamma"] == 0:
        script = "eval_beamsearch_ngram_transducer.py writes 0 unless decoding_strategy=maes"
        raise beam.error("maes_expansion_gamma", f"a number > 0 (or inf); {script}")
    return _options(beam, AESConfig)


def _read_transducer(cfg: DictConfig, strategy: str) -> Values:
    if cfg.get("big_blank_durations"):
        raise ValueError(
            f"big_blank_durations is {list(cfg.big_blank_durations)}, expected none: {strategy} decodes "
            "RNN-T and TDT models, not multi-blank ones"
        )
    return TRANSDUCERS[strategy].read(cfg)


def _options(beam: Values, search: Any) -> Options[Any]:
    n_best, return_best = beam.n_best(), beam.flag("return_best_hypothesis")
    return Options(beam.config(search, n_best=n_best), n_best, return_best, beam.fusion(), beam.confidence_map())
