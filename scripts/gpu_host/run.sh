#!/usr/bin/env bash
# All measurements of a GPU session in one command, in less than ten minutes; see README.md in this folder.
#
#   bash scripts/gpu_host/run.sh [stages.py's arguments]
#
# WHEELS  folder with the wheels of pack.py (.whl); if it does not exist, nothing is installed
# OUT     folder for results (build/gpu_host); a host that copies a folder back may have set it
# PYTHON  interpreter with torch (python3)
#
# Installed wheels, compiled code, graphs and LMs stay in build/gpu_host_cache for the next call.
set -uo pipefail
cd "$(dirname "$0")/../.."
export OUT="${OUT:-build/gpu_host}" PYTHON="${PYTHON:-python3}"
wheels="${WHEELS:-.whl}"
mkdir -p "$OUT"
started=$(date +%s)
cache="$PWD/build/gpu_host_cache"
if [[ " $* " != *" --dry-run "* ]] && compgen -G "$wheels/*.whl" >/dev/null; then
  site="$cache/site-$( (cd "$wheels" && ls -l --time-style=+ ./*.whl) | md5sum | cut -c1-12)"
  if [[ ! -e "$site/complete" ]]; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" \
      "$wheels"/*.whl && touch "$site/complete" \
      || echo "the wheels of $wheels can't be installed, going on without" >&2
  fi
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# all stages share compiled code and artificial LMs
export NEMO_GPU_DECODING_CACHE="${NEMO_GPU_DECODING_CACHE:-$cache}"
export XDG_CACHE_HOME="${XDG_CACHE_HOME:-$cache}"
export PYTHONUNBUFFERED=1
"$PYTHON" scripts/gpu_host/stages.py --out "$OUT" --started "$started" "$@"
