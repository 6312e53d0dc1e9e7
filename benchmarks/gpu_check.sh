#!/usr/bin/env bash
# Everything that a GPU must show, in a few minutes: build, tests, sanitizers, figures.
#
#   benchmarks/gpu_check.sh [folder for logs and JSON]     STAGES="build tests memcheck racecheck engine …" PARTS=6
#
# Tests run in PARTS processes beside memcheck (they do not time anything). Racecheck runs alone, because tests beside
# it found the memory of the card taken, and so do benchmarks. References of tests run on the CPU: with a thread for
# every core in each process they would wait for each other, so each has two.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:-results/gpu}" && cd "${1:-results/gpu}" && pwd)
stages=" ${STAGES:-build tests memcheck racecheck engine fp8 attention ops beams structured http two_stage start} "
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:${PYTHONPATH:-}"
python=${PYTHON:-python3}
failed=0

has() { [[ $stages == *" $1 "* ]]; }
report() { echo "== $1: $2"; tail -n "${3:-12}" "$out/$1.log"; }
check() { # name, lines to show, command…
  local name=$1 lines=$2; shift 2
  if "$@" > "$out/$name.log" 2>&1; then report "$name" ok "$lines"; else report "$name" "FAILED ($?)" 40; return 1; fi
}
# Small cases of every kernel.
sanitized=(
  "tests/gpu/test_attention.py::test_small"
  "tests/gpu/test_attention.py::test_no_rows"
  "tests/gpu/test_shared_prefix.py::test_small"
  "tests/gpu/test_shared_prefix.py::test_many_tails_beside_others[{}-64]"
  "tests/gpu/test_single_token.py::test_small"
  "tests/gpu/test_sampling.py::test_vocabulary_sizes[1025]"
  "tests/gpu/test_model_drafts.py::test_guesses_are_the_cpus_and_change_no_row[0]"
  "tests/gpu/test_sampling.py::test_logprobs_of_broken_padded_and_masked_rows"
  "tests/gpu/test_images.py::test_windows_are_turned_and_attended_to[lengths0]"
  "tests/gpu/test_ops.py::test_parts_of_prepare_qkv"
  "tests/gpu/test_ops.py::test_rotation_of_heads_that_no_warp_divides[80-7-3-dtype1]"
  "tests/gpu/test_ops.py::test_hidden_tap"
  "tests/gpu/test_ops.py::test_embedding"
  "tests/gpu/test_skinny_linear.py::test_results_stay_in_their_rows"
  "tests/gpu/test_skinny_linear.py::test_hidden_tap_of_a_normed_product"
  "tests/gpu/test_skinny_chain.py::test_chain[False-1-sizes0]"
  "tests/gpu/test_skinny_chain.py::test_chain[True-4-sizes1]"
  "tests/gpu/test_quantised.py::test_chain[False-1-sizes0]"
  "tests/gpu/test_quantised.py::test_chain[True-4-sizes1]"
  "tests/gpu/test_quantised.py::test_products_of_few_rows[1-16-512]"
  "tests/gpu/test_quantised.py::test_products_of_few_rows[4-1024-1536]"
  "tests/gpu/test_quantised.py::test_rows_of_zeros_and_of_no_numbers"
  "tests/gpu/test_quantised.py::test_norms_that_round[1-64-False]"
  "tests/gpu/test_quantised.py::test_norms_that_round[64-1024-True]"
  "tests/gpu/test_tile_linear.py::test_small"
  "tests/gpu/test_tile_linear.py::test_normed_products[8-256-16]"
  "tests/gpu/test_tile_linear.py::test_normed_products[1000-640-64]"
  "tests/gpu/test_tile_linear.py::test_what_is_left_for_a_norm[1000-640-16-1.0]"
  "tests/gpu/test_tile_linear.py::test_what_is_left_for_a_norm[8-256-33-0.0]"
  "tests/gpu/test_tile_linear.py::test_the_tap_sees_rows_before_their_norm[8-256-5]"
  "tests/gpu/test_tile_linear.py::test_tiles_of_every_size[0-64-6]"
  "tests/gpu/test_tile_linear.py::test_tiles_of_every_size[3-64-3]"
  "tests/gpu/test_int4.py::test_chain[False-1-sizes0]"
  "tests/gpu/test_int4.py::test_chain[True-4-sizes0]"
  "tests/gpu/test_int4.py::test_products[1-8-1024]"
  "tests/gpu/test_int4.py::test_products[5-8-1024]"
  "tests/gpu/test_int4.py::test_products[31-1024-3072]"
  "tests/gpu/test_int4.py::test_every_code_with_every_zero"
  "tests/gpu/test_fine.py::test_chain[offset4-sizes0]"
  "tests/gpu/test_fine.py::test_chain[float8-sizes0]"
  "tests/gpu/test_fine.py::test_products[scaled8-256-736]"
  "tests/gpu/test_fine.py::test_products[offset8-130-64]"
  "tests/gpu/test_fine.py::test_experts[float4-shape0]"
  "tests/gpu/test_skinny_chain_deltas.py::test_chain[sizes0-1-16]"
  "tests/gpu/test_skinny_chain_deltas.py::test_chain[sizes1-4-64]"
  "tests/gpu/test_lora.py::test_rows_get_what_their_slot_adds[2]"
  "tests/gpu/test_lora.py::test_rows_get_what_their_slot_adds[17]"
  "tests/gpu/test_lora.py::test_float32_and_odd_sizes[dtype0]"
  "tests/gpu/test_lora_experts.py::test_tiles_hold_every_pair_once[5]"
  "tests/gpu/test_lora_experts.py::test_products_of_experts_get_what_their_slots_add[dtype0-9]"
  "tests/gpu/test_speculation.py::test_the_tokens_of_the_cpus_sampler[0-False]"
  "tests/gpu/test_speculation.py::test_the_tokens_of_the_cpus_sampler[1-True]"
  "tests/gpu/test_experts.py::test_small"
  "tests/gpu/test_skinny_chain_experts.py::test_chain[renormalised-sizes0]"
  "tests/gpu/test_skinny_chain_experts.py::test_chain[as they are-sizes1]"
  "tests/gpu/test_skinny_chain_experts.py::test_foresight_changes_no_bit[True-sizes0]"
  "tests/gpu/test_delta_net.py::test_against_the_slow_reference[published-5-dtype1]"
  "tests/gpu/test_delta_net.py::test_against_the_slow_reference[published-70-dtype0]"
  "tests/gpu/test_delta_net.py::test_against_the_slow_reference[odd-5-dtype0]"
  "tests/gpu/test_delta_net.py::test_one_token_at_a_time_changes_no_bit[published-dtype1]"
  "tests/gpu/test_masks.py::test_rows_that_are_skipped_or_closed"
  "tests/gpu/test_following_beams.py::test_they_are_those_of_the_host[0-1]"
  "tests/gpu/test_following_beams.py::test_they_are_those_of_the_host[3-3]"
  "tests/gpu/test_fp8_cache.py::test_small"
)
# Racecheck ends launches whose blocks wait for those of other clusters, and takes minutes for all features of samplers.
memchecked=("tests/gpu/test_row_stack.py::test_small" "tests/gpu/test_sampling.py::test_features")
sanitize() { # tool
  local cases=("${sanitized[@]}")
  [[ $1 == memcheck ]] && cases+=("${memchecked[@]}")
  OMP_NUM_THREADS=2 PYTORCH_NO_CUDA_MEMORY_CACHING=1 check "$1" 3 compute-sanitizer --tool "$1" --kernel-regex kns=bequest \
    --error-exitcode 9 --print-limit 5 "$python" -m pytest -m gpu -q -p no:cacheprovider --timeout 100 "${cases[@]}"
}

if has names; then # without a GPU: whether the cases above are still called so
  check names 1 "$python" -m pytest -m gpu -q -p no:cacheprovider --collect-only "${sanitized[@]}" \
    "${memchecked[@]}" || exit 1
fi
if has build; then
  check build 2 env BEQUEST_CUDA=on "$python" setup.py -q build_ext --inplace || exit 1
fi
jobs=()
if has tests; then
  for part in $(seq "${PARTS:-6}"); do
    OMP_NUM_THREADS=2 check "tests.$part" 6 "$python" -m pytest -m gpu tests/gpu --part "$part/${PARTS:-6}" -q \
      -p no:cacheprovider --timeout 120 --durations=3 & jobs+=($!)
  done
fi
if has memcheck; then
  sanitize memcheck & jobs+=($!)
fi
for job in "${jobs[@]}"; do wait "$job" || failed=1; done
has racecheck && { sanitize racecheck || failed=1; }
has engine && { check engine 40 "$python" -m benchmarks.gpu_engine --json "$out/engine.json" || failed=1; }
has fp8 && { check fp8 4 "$python" -m benchmarks.gpu_engine --shapes llama-3.1-8b --kv-cache-dtype fp8 --load-only || failed=1; }
has http && { check http 6 "$python" -m benchmarks.http_load --json "$out/http.json" || failed=1; }
has two_stage && { check two_stage 40 "$python" -m benchmarks.gpu_two_stage --json "$out" || failed=1; }
has attention && { check attention 48 "$python" -m benchmarks.gpu_attention --json "$out/attention.json" || failed=1; }
has ops && { check ops 40 "$python" -m benchmarks.gpu_ops --json "$out/ops.json" || failed=1; }
has beams && { check beams 8 "$python" -m benchmarks.beams_http --shape qwen3-0.6b || failed=1; }
has structured && { check structured 6 "$python" -m benchmarks.structured --shape qwen3-0.6b || failed=1; }
has start && { check start 4 "$python" -m benchmarks.start_up || failed=1; }
exit $failed
