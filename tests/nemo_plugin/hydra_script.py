"""A Hydra application like NeMo's scripts. It imports nothing of ours; see test_installed.py.

    python hydra_script.py COMMAND_LINES.json

The file lists command lines, each a list of arguments. They are run one after the other, for starting a
process with NeMo takes long.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from nemo.collections.asr.models import ASRModel
from nemo.collections.asr.parts.submodules.ctc_decoding import CTCDecodingConfig
from nemo.core.config import hydra_runner


@dataclass
class Config:
    model_path: str = ""
    files: list[str] = field(default_factory=list)
    output: str = ""
    ctc_decoding: CTCDecodingConfig = field(default_factory=CTCDecodingConfig)


@hydra_runner(config_name="Config", schema=Config)
def main(cfg: Config) -> None:
    model = ASRModel.restore_from(cfg.model_path, map_location="cpu").eval()
    model.change_decoding_strategy(cfg.ctc_decoding)
    results = model.transcribe(list(cfg.files), verbose=False)
    decoder = type(model.decoding.decoding).__name__
    Path(cfg.output).write_text(json.dumps({"decoder": decoder, "texts": [r.text for r in results]}))


if __name__ == "__main__":
    for arguments in json.loads(Path(sys.argv[1]).read_text()):
        sys.argv[1:] = arguments
        main()
