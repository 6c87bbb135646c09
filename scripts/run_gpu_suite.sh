#!/usr/bin/env bash
# All measurements for one accelerator, unattended, in under 20 minutes and
# without the network. The tables are printed at the end.
#
#   bash scripts/run_gpu_suite.sh [--reduced] OUT [prompts.jsonl]
#
# OUT: folder for JSON, tables, pictures and logs. Prompts: default a dozen of
# models/demo. --reduced: the same steps at a size for a CPU, some minutes.
# PYTHON=...: the interpreter, if it is not the first in the path.
set -uo pipefail

reduced=0
if [[ "${1:-}" == --reduced ]]; then
  reduced=1
  shift
fi
if (($# < 1 || $# > 2)); then
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
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
  deadline=$((SECONDS + 1140))
  large=(--width_factor=4 --layers=36)
  xl=(--width_factor=5 --layers=48)
  # One bucket of prompt lengths, because compiling takes most of the time.
  common=(--prompt_bucket=128 --max_seconds=40)
  best='staged'
  arms="plain,chain,tree,$best,staged(num_nodes=32)"
  few="plain,chain,$best"
  sweep='plain,chain(num_draft_tokens=2|8),tree(num_nodes=16|32,rounds=3)'
  batch=8
  widths=1,2,4,8,16,32,64,128
fi
peer=none
"$python" -c 'import torch' 2> /dev/null && peer=transformers

failed=()
steps=()

# A step that fails or runs out of time does not stop the others.
step() {
  local name=$1
  shift
  local left=$((deadline - SECONDS))
  steps+=("$name")
  if ((left < 10)); then
    failed+=("$name (no time left)")
    return
  fi
  echo "== $name ($((left / 60)) minutes left)"
  timeout "$left" "$python" "$@" > "$out/$name.log" 2> "$out/$name.err" ||
    failed+=("$name (exit $?)")
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

# The most important steps first, in case time runs out.
benchmark large_greedy --target="$large_target" --dtype=bfloat16 \
  --arms="$arms" --peer="$peer"
benchmark large_sampled --target="$large_target" --dtype=bfloat16 \
  --arms="$few" "${sampled[@]}"
benchmark demo_greedy --arms="$arms,plain:bfloat16,staged:bfloat16"
step forward_large "$here/measure.py" forward --target="$large_target" \
  --dtype=bfloat16 --sizes="$widths"
step expand_xl "$here/expand_model.py" --model=demo \
  --output="$models/gpt2-xl-shape" --dtype=bfloat16 "${xl[@]}"
benchmark xl_greedy --target="$models/gpt2-xl-shape" --dtype=bfloat16 \
  --arms="$few"
benchmark xl_sampled --target="$models/gpt2-xl-shape" --dtype=bfloat16 \
  --arms="plain,$best" "${sampled[@]}"
benchmark large_batch --target="$large_target" --dtype=bfloat16 \
  --arms="plain,$best" --batch_sizes="1,$batch"
step lossless "$here/check_lossless.py" --prompt_file="$prompts" \
  --num_prompts=2 --max_new_tokens=32 --batch_sizes=1
benchmark large_sweep --target="$large_target" --dtype=bfloat16 --arms="$sweep"

echo
echo "Done in $((SECONDS / 60)) minutes; files are in $out."
for name in "${steps[@]}"; do
  if [[ -s "$out/$name.log" ]]; then
    printf '\n## %s\n\n' "$name"
    cat "$out/$name.log"
  fi
done
if ((${#failed[@]})); then
  printf '\nfailed: %s' "${failed[0]}"
  ((${#failed[@]} > 1)) && printf ', %s' "${failed[@]:1}"
  printf '; see the .err files\n'
  exit 1
fi
