#!/usr/bin/env bash
# Create a virtual environment with this package (editable) and NeMo.
#   EXTRAS  extras of pyproject.toml, in addition to that of CUDA; the default is all that tests and benchmarks need
#   VENV    folder of the environment
#   PYTHON  interpreter of the environment; "auto": the first supported one on the PATH
#   TORCH   arguments of `pip install` for torch; "auto": chosen by choose_torch.py
#   NEMO    requirement for NeMo; "": the range of pyproject.toml
set -euo pipefail
cd "$(dirname "$0")/.."
VENV="${VENV:-.venv}" PYTHON="${PYTHON:-auto}" TORCH="${TORCH:-auto}" NEMO="${NEMO:-}"
EXTRAS="${EXTRAS:-nemo,wfst,serve,cluster,dev,bench,docs}"

fail() { printf 'make setup: %s\n' "$*" >&2; exit 1; }
supported() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

if [ ! -x "$VENV/bin/python" ]; then
  if [ "$PYTHON" = auto ]; then
    for PYTHON in python3 python3.12 python3.13 python3.11 python3.10 none; do
      supported "$PYTHON" && break
    done
    [ "$PYTHON" != none ] || fail "no Python 3.10 .. 3.13 on the PATH. Name one: make setup PYTHON=/path/to/python3.12"
  else
    supported "$PYTHON" || fail "PYTHON=$PYTHON does not run or is not Python 3.10 .. 3.13"
  fi
  echo "make setup: creating $VENV with $("$PYTHON" --version)"
  "$PYTHON" -m venv "$VENV" || fail "'$PYTHON -m venv' failed; on Debian and Ubuntu: apt install python3-venv"
fi

python="$VENV/bin/python"
if [ "$TORCH" = auto ]; then
  TORCH="$("$python" scripts/choose_torch.py)" || exit 1
fi
echo "make setup: installing $TORCH"
# -qq: pip shows errors only. --no-compile: modules are compiled when they are imported.
# Unquoted on purpose: TORCH may carry options, as in TORCH="torch --index-url URL"
# shellcheck disable=SC2086
"$python" -m pip install -qq --no-compile $TORCH || fail "could not install '$TORCH'; choose another with make setup TORCH=..."

# later installations must not replace this torch
constraints="$VENV/torch-constraint.txt"
"$python" -c 'from importlib.metadata import version as v; print("torch==" + v("torch"))' > "$constraints"

# the tests compile kernels, with or without a GPU, by the NVRTC of torch's CUDA version
cuda="$("$python" -W ignore -c 'import torch; print("cuda12" if (torch.version.cuda or "").startswith("12") else "cuda13")')"

echo "make setup: installing NeMo and what belongs to $EXTRAS (a minute or three)"
requirements=(--editable ".[$EXTRAS,$cuda]")
if [ -n "$NEMO" ]; then requirements+=("$NEMO"); fi
"$python" -m pip install -qq --no-compile --constraint "$constraints" "${requirements[@]}" \
  || fail "pip failed, see above. A broken environment is repaired by: rm -rf $VENV && make setup"
if [[ ",$EXTRAS," = *,bench,* ]]; then
  # pyctcdecode, a peer in benchmarks, requires numpy < 2 but works with newer versions, which NeMo needs
  "$python" -m pip install -qq --no-compile --no-deps "pyctcdecode>=0.5" pygtrie || fail "could not install pyctcdecode"
fi
echo "make setup: done. Try: $VENV/bin/nemo-gpu-decoding doctor"
