"""Found by Hydra, and so by NeMo: `import nemo.collections.asr` imports all packages in `hydra_plugins`.

That happens early in NeMo's own import, so nothing here may import NeMo; and an error in a Hydra plugin
stops every Hydra application of the environment, so nothing here may raise.
"""

import logging
import sys

try:
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    from nemo_gpu_decoding.nemo_plugin.register import register
    from nemo_gpu_decoding.presets import conf_folder

    class NemoGpuDecodingSearchPath(SearchPathPlugin):
        """Adds the presets: `+ctc_decoding=flexctc_beam` in any Hydra application; with NeMo also their types."""

        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            path = f"file://{conf_folder().as_posix()}"
            search_path.append(provider="nemo-gpu-decoding", path=path)
            if "nemo.collections.asr.models" in sys.modules:
                try:
                    from nemo_gpu_decoding.nemo_plugin.hydra_schemas import store_schemas

                    store_schemas()
                except Exception:
                    logging.getLogger(__name__).warning("presets of word graphs lack their types", exc_info=True)

    register()
except Exception:
    logging.getLogger(__name__).warning(
        "the decoding strategies of nemo-gpu-decoding are not available", exc_info=True
    )
