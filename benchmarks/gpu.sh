#!/usr/bin/env bash
# Tests and measures Tinsmith on one GPU, in parts, each well under 10 minutes, without a network:
#
#   tests    tests/gpu: CUDA against the CPU, and the whole stack with a random model of the shape of Qwen3-0.6B
#   engine   the trainer alone with a model of the shape of Qwen3-8B: random weights, bfloat16, rank 32; 8x2048, 64x512,
#            16 tenants; tokens/s and the part of the measured bfloat16 peak
#   plain    16 tenants without any kernel of our choice
#   stack    `tinsmith up` through the SDK with the shape of Qwen3-0.6B: training, decoding, publishing
#   large    the main figures of `stack` with the shape of Qwen3-8B
#
#   benchmarks/gpu.sh                                  all of it on the first CUDA device
#   benchmarks/gpu.sh --only "tests stack"             some of it
#   benchmarks/gpu.sh --device cpu --quick             the same steps with a tiny model, to see that they work
#
# The results lie in --out (default: gpu-results), as PART.txt and PART.json. A part that fails does not stop the others.
set -euo pipefail
cd "$(dirname "$0")/.."

device=cuda
quick=
out=gpu-results
python=python
only="tests engine plain stack large"
while (($#)); do
    case $1 in
        --device) device=${2:?--device needs a value}; shift ;;
        --only) only=${2:?--only needs a value}; shift ;;
        --out) out=${2:?--out needs a value}; shift ;;
        --python) python=${2:?--python needs a value}; shift ;;
        --quick) quick=1 ;;
        *) echo "gpu.sh: $1 is none of --device cuda|cpu, --quick, --only PARTS, --out FOLDER, --python PROGRAM" >&2
           exit 2 ;;
    esac
    shift
done
if [[ $device != cpu && $device != cuda ]]; then
    echo "gpu.sh: --device $device is neither cuda nor cpu" >&2
    exit 2
fi
for part in $only; do
    if [[ " tests engine plain stack large " != *" $part "* ]]; then
        echo "gpu.sh: --only: $part is none of tests, engine, plain, stack, large" >&2
        exit 2
    fi
done
if [[ $device == cuda ]] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu.sh: torch finds no CUDA device; --device cpu --quick shows that the script works" >&2
    exit 1
fi
mkdir -p "$out"

if [[ $quick ]]; then
    engine_model=qwen3-tiny stack_model=qwen3-tiny shapes=2x64,8x16 max_tokens=256 budget_s=2
else
    # Activations of 8B take some 5 MB a token, next to 17 GB of weights.
    gb=$("$python" -c 'import torch; print(int(torch.cuda.mem_get_info()[1] / 1e9) if torch.cuda.is_available() else 0)')
    engine_model=qwen3-8b stack_model=qwen3-0.6b shapes=8x2048,64x512 max_tokens=$((gb > 120 ? 16384 : 8192)) budget_s=8
fi

limited() { # PART SECONDS COMMAND...
    local part=$1 seconds=$2
    shift 2
    timeout --signal INT --kill-after 10 "$seconds" "$@" 2>&1 | tee "$out/$part.txt"
}

engine() { # PART SECONDS ARGUMENTS...
    local part=$1 seconds=$2
    shift 2
    limited "$part" "$seconds" "$python" -m benchmarks trainer --model-shape "$engine_model" --device "$device" \
        --dtype bfloat16 --rank 32 --shapes "$shapes" --adapters 16 --max-tokens "$max_tokens" \
        --budget-s "$budget_s" --json "$out/$part.json" "$@"
}

measure_tests() {
    limited tests 240 "$python" -m pytest -m gpu tests/gpu -q -rs --durations 8 -p no:cacheprovider
}

measure_engine() {
    engine engine 290 --only throughput co_batching optimizer_step
}

measure_plain() {
    engine plain 120 --only co_batching --kernels plain
}

stack() { # PART SECONDS MODEL FIGURES
    limited "$1" "$2" "$python" -m benchmarks service --size "$3" --no-baseline --repeats 5 --budget-s "$budget_s" \
        --only $4 --json "$out/$1.json"
}

measure_stack() {
    stack stack 200 "$stack_model" "request_overhead training_throughput pipelined_step sampling publishing rl_iteration four_adapters"
}

measure_large() {
    stack large 280 "$engine_model" "training_throughput sampling publishing rl_iteration"
}

failed=0
for part in $only; do
    "measure_$part" || failed=1
done
exit $failed
