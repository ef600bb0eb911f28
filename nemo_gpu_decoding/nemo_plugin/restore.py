"""Find and restore NeMo models, for the command line and the live server."""

import logging
import tarfile
from typing import Any

import torch
from omegaconf import DictConfig

from nemo_gpu_decoding.extras import require
from nemo_gpu_decoding.nemo_plugin.register import register
from nemo_gpu_decoding.plain_text import path_of


def check_model_file(name: str) -> None:
    """Raise a ValueError if a model's name looks like a .nemo file that does not exist or is no archive."""
    is_file = path_of(name).is_file()
    if name.endswith(".nemo") and not is_file:
        raise ValueError(f"model={name} is no file here")
    if is_file and not tarfile.is_tarfile(path_of(name)):
        raise ValueError(f"model={name} is no NeMo model: a .nemo file is a tar archive")


def usable_device(name: str) -> torch.device:
    """Return the torch device that an option names; "auto" means a GPU if the machine has one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device is {name!r}, expected auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def import_nemo(verbose: bool) -> None:
    """Import NeMo (about ten seconds) and register the strategies.

    Without `verbose`, messages of NeMo below ERROR are hidden, because transcripts are printed on the terminal.
    """
    if not verbose:
        logging.getLogger("nv_one_logger").setLevel(logging.ERROR)
        # NeMo changes its log level while it transcribes, so its logger gets a filter instead
        nemo_logger = logging.getLogger("nemo_logger")
        if _is_error not in nemo_logger.filters:
            nemo_logger.addFilter(_is_error)
    require("nemo")
    import nemo.collections.asr.models  # noqa: F401

    register()


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def restore(name: str, **options: Any) -> Any:
    """Return a model, or its config, from a .nemo file or from the name of a pretrained model.

    Args:
        options: options of NeMo's `restore_from` and `from_pretrained`.

    Raises:
        ValueError: the model cannot be fetched or restored.
    """
    from nemo.collections.asr.models import ASRModel

    if not path_of(name).is_file():
        try:
            return ASRModel.from_pretrained(name, **options)
        except OSError as error:  # unknown names and network errors alike
            raise ValueError(f"model={name} is no file here, and NeMo cannot fetch it: {error}") from error
    try:
        return ASRModel.restore_from(str(path_of(name)), **options)
    except Exception as error:  # NeMo does not check the parts of the archive
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"model={name} cannot be restored ({what}); if the file is damaged, copy it again") from error


def model_config(name: str) -> DictConfig:
    """Return the config of a .nemo file or of a pretrained model."""
    return restore(name, return_config=True)


def heads_of(config: DictConfig) -> list[str]:
    """Return the names of a model's heads: "ctc", "rnnt" (RNN-T and TDT), or both."""
    if "aux_ctc" in config:
        return ["ctc", "rnnt"]
    return ["rnnt"] if "joint" in config else ["ctc"]


def default_head(name: str, *, verbose: bool = False) -> str:
    """Return the head that decodes if no strategy is given: "ctc" if the model has a CTC head, else "rnnt"."""
    check_model_file(name)
    import_nemo(verbose)
    return heads_of(model_config(name))[0]
