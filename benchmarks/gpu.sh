#!/usr/bin/env bash
# Holds every CUDA kernel against the CPU, then measures the trainer with an 8B-shaped Qwen3 on one GPU: random weights,
# bfloat16, rank 32, 8x2048, 64x512 and 16 tenants. In under 10 minutes, without a network.
#
#   benchmarks/gpu.sh                                  on the first CUDA device
#   benchmarks/gpu.sh --device cpu --quick             the same steps with a tiny model, to see that they work
#
# What comes out lies in --out (default: gpu-results): kernels.txt, gpu.json and gpu.txt, and gpu-plain.json and
# gpu-plain.txt for 16 tenants without any kernel of our choice.
set -euo pipefail
cd "$(dirname "$0")/.."

device=cuda
quick=
out=gpu-results
python=python
while (($#)); do
    case $1 in
        --device) device=${2:?--device needs a value}; shift ;;
        --out) out=${2:?--out needs a value}; shift ;;
        --python) python=${2:?--python needs a value}; shift ;;
        --quick) quick=1 ;;
        *) echo "gpu.sh: $1 is none of --device cuda|cpu, --quick, --out FOLDER, --python PROGRAM" >&2; exit 2 ;;
    esac
    shift
done
if [[ $device != cpu && $device != cuda ]]; then
    echo "gpu.sh: --device $device is neither cuda nor cpu" >&2
    exit 2
fi
if [[ $device == cuda ]] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu.sh: torch finds no CUDA device; --device cpu --quick shows that the script works" >&2
    exit 1
fi
mkdir -p "$out"

if [[ $quick ]]; then
    model=qwen3-tiny shapes=2x64,8x16 max_tokens=256 budget_s=2
else
    # Activations of 8B take some 5 MB a token, next to 17 GB of weights.
    gb=$("$python" -c 'import torch; print(int(torch.cuda.mem_get_info()[1] / 1e9) if torch.cuda.is_available() else 0)')
    model=qwen3-8b shapes=8x2048,64x512 max_tokens=$((gb > 120 ? 16384 : 8192)) budget_s=20
fi

measure() { # NAME SECONDS ARGUMENTS...: a table and a JSON file, within so many seconds
    local name=$1 seconds=$2
    shift 2
    timeout --signal INT --kill-after 10 "$seconds" "$python" -m benchmarks trainer \
        --model-shape "$model" --device "$device" --dtype bfloat16 --rank 32 --shapes "$shapes" --adapters 16 \
        --max-tokens "$max_tokens" --budget-s "$budget_s" --json "$out/$name.json" "$@" | tee "$out/$name.txt"
}

failed=0
# A wrong kernel makes its time worthless, but the other figures may still say something: so the script goes on.
timeout --signal INT --kill-after 10 150 "$python" -m pytest -m gpu tests/gpu -q -rs -p no:cacheprovider |
    tee "$out/kernels.txt" || failed=1
measure gpu 290 --only throughput co_batching optimizer_step || failed=1
measure gpu-plain 120 --only co_batching --kernels plain || failed=1
exit $failed
