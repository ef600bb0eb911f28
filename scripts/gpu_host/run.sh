#!/usr/bin/env bash
# All measurements of a GPU session in one command, in less than ten minutes; see README.md in this folder.
#
#   bash scripts/gpu_host/run.sh [stages.py's arguments]
#
# WHEELS  folder with the wheels of pack.py (.whl); if it does not exist, nothing is installed
# OUT     folder for results (build/gpu_host)
# PYTHON  interpreter with torch (python3)
set -uo pipefail
cd "$(dirname "$0")/../.."
export OUT="${OUT:-build/gpu_host}" PYTHON="${PYTHON:-python3}"
wheels="${WHEELS:-.whl}"
mkdir -p "$OUT"
started=$(date +%s)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if [[ " $* " != *" --dry-run "* ]] && compgen -G "$wheels/*.whl" >/dev/null; then
  site="$scratch/site"
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" \
    "$wheels"/*.whl || echo "the wheels of $wheels can't be installed, going on without" >&2
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# all stages share compiled code and artificial LMs
export NEMO_GPU_DECODING_CACHE="${NEMO_GPU_DECODING_CACHE:-$scratch/cache}"
export XDG_CACHE_HOME="${XDG_CACHE_HOME:-$scratch/cache}"
export PYTHONUNBUFFERED=1
"$PYTHON" scripts/gpu_host/stages.py --out "$OUT" --started "$started" "$@"
