#!/usr/bin/env bash
# All measurements for one accelerator, unattended, in under ten minutes and
# without the network, the most important first. Each step writes its table and
# files when it ends, so what is done is kept if the rest is cut off.
#
#   bash scripts/run_gpu_suite.sh [--reduced] OUT [prompts.jsonl]
#
# OUT: folder for JSON, tables and logs. Prompts: default a dozen of
# models/demo. --reduced: the same steps at a size for a CPU, some minutes.
# PYTHON=...: the interpreter, if it is not the first in the path.
# PEER=URL: a server that decodes, too, see docs/serving.md.
set -uo pipefail

reduced=0
if [[ "${1:-}" == --reduced ]]; then
  reduced=1
  shift
fi
if (($# < 1 || $# > 2)); then
  sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
prompts=${2:-$here/../models/demo/prompts.jsonl}
if [[ ! -r "$prompts" ]]; then
  echo "run_gpu_suite.sh: cannot read the prompts $prompts" >&2
  exit 2
fi
prompts=$(realpath "$prompts")
python=${PYTHON:-python}
export PYTHONPATH="$(dirname "$here")${PYTHONPATH:+:$PYTHONPATH}"
models=$(mktemp -d)
trap 'rm -rf "$models"' EXIT
# For the next run on this machine, or for one that is given the folder.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$out/programs}

# See docs/accelerators.md. A JAX that does not know them would not start.
library='--xla_gpu_enable_cublaslt=true --xla_gpu_enable_triton_gemm=false'
default_flags=${XLA_FLAGS:-}
if XLA_FLAGS="$default_flags $library" "$python" -c \
  'import jax; jax.devices()' > /dev/null 2>&1; then
  export XLA_FLAGS="$default_flags $library"
fi

if ((reduced)); then
  deadline=$((SECONDS + 3600))
  large=(--width_factor=1 --layers=8)
  xl=(--width_factor=2 --layers=6)
  common=(--num_prompts=3 --max_new_tokens=16 --max_seconds=20)
  best='staged(num_nodes=8,width=4)'
  arms="plain,$best"
  few="plain,$best"
  sweep='plain,tree(num_nodes=4|8,width=4,rounds=2)'
  batch=2
  widths=1,2,4
else
  deadline=$((SECONDS + 570))
  large=(--width_factor=4 --layers=36)
  xl=(--width_factor=5 --layers=48)
  # One bucket of prompt lengths, because compiling takes most of the time.
  common=(--prompt_bucket=128 --max_seconds=25)
  best='staged'
  arms="plain,chain,$best,staged(num_nodes=32),staged(cost_ratio=0)"
  few="plain,chain,$best"
  sweep='plain,chain(num_draft_tokens=2|8),tree(num_nodes=16|32,rounds=3)'
  batch=8
  widths=1,2,4,8,16,32,64,128
fi
peer=${PEER:+--peer=$PEER}

failed=()

# A step that fails or runs out of time does not stop the others.
step() {
  local name=$1
  shift
  local left=$((deadline - SECONDS))
  if ((left < 10)); then
    failed+=("$name (no time left)")
    return
  fi
  echo "== $name ($left seconds left)"
  timeout "$left" "$python" "$@" > "$out/$name.log" 2> "$out/$name.err" ||
    failed+=("$name (exit $?)")
  cat "$out/$name.log"
}

benchmark() {
  local name=$1
  shift
  step "$name" "$here/benchmark.py" --prompt_file="$prompts" "${common[@]}" \
    --output="$out/$name.json" "$@"
}

step expand_large "$here/expand_model.py" --model=demo \
  --output="$models/gpt2-large-shape" --dtype=bfloat16 "${large[@]}"
large_target="$models/gpt2-large-shape"
sampled=(--temperature=1 --top_k=50)
on_large=(--target="$large_target" --draft=demo --dtype=bfloat16)

step lossless "$here/check_lossless.py" --prompt_file="$prompts" \
  --num_prompts=2 --max_new_tokens=32 --batch_sizes=1
benchmark large_greedy "${on_large[@]}" --arms="$arms" $peer
benchmark large_sampled "${on_large[@]}" --arms="$few" "${sampled[@]}"
# With XLA's own products, which shows what those of the library gain.
ours=${XLA_FLAGS:-}
export XLA_FLAGS=$default_flags
benchmark large_greedy_xla "${on_large[@]}" --arms="$few"
export XLA_FLAGS=$ours
step forward_large "$here/measure.py" forward "${on_large[@]}" \
  --sizes="$widths"
step expand_xl "$here/expand_model.py" --model=demo \
  --output="$models/gpt2-xl-shape" --dtype=bfloat16 "${xl[@]}"
benchmark xl_greedy --target="$models/gpt2-xl-shape" --draft=demo \
  --dtype=bfloat16 --arms="$few"
benchmark large_batch "${on_large[@]}" --arms="plain,$best" \
  --batch_sizes="1,$batch"
benchmark demo_greedy --arms="$few,plain:bfloat16,staged:bfloat16"
benchmark large_sweep "${on_large[@]}" --arms="$sweep"

echo
echo "Done in $((SECONDS / 60)) minutes; files are in $out."
if ((${#failed[@]})); then
  printf '\nfailed: %s' "${failed[0]}"
  ((${#failed[@]} > 1)) && printf ', %s' "${failed[@]:1}"
  printf '; see the .err files\n'
  exit 1
fi
