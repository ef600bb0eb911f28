#!/usr/bin/env bash
# All that a session with a GPU wants to know, in one command and under ten minutes; see README.md here.
#
#   bash scripts/gpu_host/run.sh [stages.py's arguments]
#
# WHEELS  folder with the wheels that pack.py fetched (.whl); nothing is installed where it does not exist
# OUT     folder for results (build/gpu_host)
# PYTHON  the interpreter that has torch (python3)
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
# compiled code and made-up LMs are shared by the stages
export NEMO_GPU_DECODING_CACHE="${NEMO_GPU_DECODING_CACHE:-$scratch/cache}"
export XDG_CACHE_HOME="${XDG_CACHE_HOME:-$scratch/cache}"
export PYTHONUNBUFFERED=1
"$PYTHON" scripts/gpu_host/stages.py --out "$OUT" --started "$started" "$@"
