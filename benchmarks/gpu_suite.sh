#!/usr/bin/env bash
# Everything that needs a GPU, in pieces of at most eight minutes each, without network.
#
#   gpu_suite.sh list            the pieces, and what became of them
#   gpu_suite.sh check           what is missing here, and the lines that fetch it where there is a network
#   gpu_suite.sh carry PACKAGE...  the lines that fetch these wheels, for WHEELS_FOR (such as 3.12; default:
#                                this Python)
#   gpu_suite.sh setup [WHEELS]  install wheels from a folder (default .whl) and build the kernels, offline
#   gpu_suite.sh run PIECE...    run pieces; `next` is the first not tried, or else cut off; `all` every
#                                one that is not done
#   gpu_suite.sh pack FOLDER     copy what was measured and what was compiled into two archives there
#   gpu_suite.sh call N FOLDER [WHEELS]  one of the three commands below: set-up and its pieces
#
# A piece that is done is not run again; one that was cut off goes on where it was where it can (the
# searches keep every try). State, logs, results and what was compiled are in runs/gpu_suite; carry that
# folder to go on elsewhere. Pages for the repository: rerun a join with --save, or copy results/*.md and
# *.json.
#
#   STRONGHOLD_GPU_STATE   another folder for all of it
#   PIECE_S                seconds that a piece may take (default 480)
#   DEADLINE               when everything must have ended, in seconds since 1970 as `date +%s` says it
#                          (default: never; in `call` CALL_S, 560, from its start). A piece gets what is
#                          left, and none begins with less than 30 seconds
#   PACK_TO                a folder: set-up and every piece end in `pack` there, so that a command that is
#                          killed loses the piece that runs, and no other
#   HOST_MEMORY            cap on every method's host memory, as 100GB (default: what the machine has);
#                          where the memory of a virtual machine grows as it is used, say what it can be
#   STRONGHOLD_COMMIT      the commit that results name, where the tree comes without its history
#   PYTHON                 the interpreter (default: .venv's, else python3)
#   REHEARSAL              1: tiny models, and without a GPU the pretended device (tests/pretended), in
#                          runs/gpu_rehearsal, and few tests: shows mistakes of this script, and nothing else
#   DEADLOCK_S             seconds after which a test on the GPU shows its stacks and is ended (default 60; 240
#                          in tests-shapes)
#
# A first half hour on a GPU that is lent for ten minutes at a time, each time bare. Before it .whl is
# filled with what `carry` names: an image made for torch lacks deepspeed, hjson, pydantic, pydantic-core,
# annotated-types and typing-inspection, its typing-extensions may be old, and its scikit-build-core too:
# carry that with pathspec in any case. The three commands are
#
#   HOST_MEMORY=115GB STRONGHOLD_COMMIT=... benchmarks/gpu_suite.sh call 1 "$FOLDER"    and so with 2 and 3
#
#   1  whether it works at all, then at a real size, how fast, where the GPU waits, and the first laws
#   2  the other laws, at real shapes too; losses beside each other; a model that fits
#   3  against whom
# After each, unpack both archives of FOLDER in runs/ and carry runs/gpu_suite and .whl to the next; what
# failed is mended before it. HOST_MEMORY: 7.3 B parameters take 92 GB, and torch some more.
# A first slow step is no mistake of this engine alone: the first `import torch`, the first touch of 45 GB in
# a machine whose memory grows, and Triton's compiler (which needs gcc and Python.h) all fall there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -n "${REHEARSAL:-}" ]; then STATE=runs/gpu_rehearsal; else STATE=runs/gpu_suite; fi
STATE="${STRONGHOLD_GPU_STATE:-$STATE}"
RESULTS="$STATE/results"
PIECE_S="${PIECE_S:-480}"
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; fi
fi
export PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0 MPLCONFIGDIR="$PWD/$STATE/matplotlib"

# Where the interpreter's own packages cannot be written, wheels are unpacked here.
case "$STATE" in /*) SITE="$STATE/site" ;; *) SITE="$PWD/$STATE/site" ;; esac
export PYTHONPATH="$PWD:$SITE${PYTHONPATH:+:$PYTHONPATH}"

# What is compiled travels with the state, and saves the next machine minutes. DeepSpeed's and Triton's
# kernels are made for one processor, compiler, Python and torch: each of these has a folder, so that no
# other machine takes them.
COMPILED="$STATE/compiled"
compiled_for() {
  { grep -m2 -E '^(model name|flags)' /proc/cpuinfo; ${CXX:-c++} --version | head -n1; "$PYTHON" --version
    "$PYTHON" -c 'from importlib.metadata import version; print(version("torch"), version("deepspeed"))' || true; } 2>&1 | cksum | tr ' ' -
}

# Stronghold's own kernels choose their instructions when they run: one folder for each source and compiler.
kernels_for() {
  { uname -m; ${CXX:-c++} --version | head -n1; find CMakeLists.txt kernels -type f | LC_ALL=C sort | xargs cat; } | cksum | tr ' ' -
}

# import name = what pip calls it, with the least version where it matters. Torch is taken as it is.
NEEDED="deepspeed=deepspeed>=0.19 hjson=hjson pydantic=pydantic>=2 pydantic_core=pydantic-core
  annotated_types=annotated-types typing_inspection=typing-inspection
  typing_extensions=typing-extensions>=4.16 cpuinfo=py-cpuinfo msgpack=msgpack einops=einops
  psutil=psutil tqdm=tqdm packaging=packaging numpy=numpy matplotlib=matplotlib
  safetensors=safetensors ninja=ninja pytest=pytest"
# What pip builds the kernels with. Without them cmake alone does it.
BUILDERS="scikit_build_core=scikit-build-core>=1.0 pathspec=pathspec cmake=cmake>=3.22"
SOURCE_ONLY=" deepspeed hjson "  # no wheel on the index for every version: build one instead

# -- models ---------------------------------------------------------------------------------------
model() {
  if [ -n "${REHEARSAL:-}" ]; then
    echo "--family llama --layers 4 --hidden 64 --heads 4 --kv-heads 2 --intermediate 128 --vocab 256"
    return
  fi
  case "$1" in
    1b) echo "--family llama --layers 16 --hidden 2048 --heads 32 --kv-heads 8 --intermediate 8192 --vocab 32768" ;;
    3b) echo "--family llama --layers 28 --hidden 3072 --heads 24 --kv-heads 8 --intermediate 8192 --vocab 32768" ;;
    8b) echo "--family llama --layers 32 --hidden 4096 --heads 32 --kv-heads 8 --intermediate 14336 --vocab 32768" ;;
    *) echo "gpu_suite: no model $1" >&2; return 2 ;;
  esac
}
LENGTH=2048
if [ -n "${REHEARSAL:-}" ]; then LENGTH=32; fi
# The plan is refined after step 3, and step 4 is the first with new buffers: five steps of warm-up.
STEP="--seq $LENGTH --batch 8 --steps 5 --warmup 5 --precision bf16 --activations recompute --lr 1e-4"
if [ -n "${HOST_MEMORY:-}" ]; then
  STEP="$STEP --host-memory $HOST_MEMORY"
  # For what has no such argument: the references, the tests, the doctor. In bytes.
  STRONGHOLD_HOST_MEMORY="$(numfmt --from=auto "${HOST_MEMORY%[Bb]}")"
  export STRONGHOLD_HOST_MEMORY
fi
PEERS="zero-offload zero-infinity superoffload superoffload-param fsdp2-offload l2l plain stronghold"

# -- pieces, in the order of what is wanted first ---------------------------------------------------
# What is wanted of each of three commands of ten minutes.
call_pieces() {
  case "$1" in
    1) echo "probe smoke compare-3b-24gb-stronghold trace reference-3b doctor tests-device tests-training" ;;
    2) echo "tests-training tests-kernels tests-rest agree fits tests-shapes quickstart" ;;
    3) echo "compare-3b-24gb-superoffload-param compare-3b-24gb-zero-offload compare-3b-80gb-stronghold" \
      "compare-3b-80gb-fsdp2-offload tokens-ours halves-3b table-3b-24gb table-3b-80gb" ;;
    *) echo "gpu_suite: no call $1, expected 1, 2 or 3" >&2; return 2 ;;
  esac
}

pieces() { { call_pieces 1; call_pieces 2; call_pieces 3; other_pieces; } | tr ' ' '\n' | awk '!seen[$0]++'; }

other_pieces() {
  local size cap method
  echo "compile"
  for size in 3b 8b; do
    for cap in 24 80; do
      for method in stronghold zero-offload zero-infinity superoffload superoffload-param fsdp2-offload l2l plain; do
        echo "compare-$size-${cap}gb-$method"
      done
    done
    echo "reference-$size halves-$size table-$size-24gb table-$size-80gb"
  done
  echo "limits-3b"
  echo "tokens-peers"
  for method in stronghold zero-infinity zero-offload superoffload-param fsdp2-offload l2l plain; do
    echo "largest-$method"
  done
  echo "window"
}

compiled() { [ -f "$TORCH_EXTENSIONS_DIR/compiled" ]; }

# 1 MB to carry instead of 50. Times stay, so that ninja has nothing to do where they are carried.
without_symbols() {
  if command -v strip >/dev/null; then
    find "$TORCH_EXTENSIONS_DIR" -name '*.[os]*' -type f -exec strip -p --strip-debug {} +
  fi
}

# DeepSpeed compiles its kernels at first use: before any piece that needs them, so that no measured process
# does.
piece() {
  local name="$1" here
  here="$COMPILED/$(compiled_for)"
  case "$here" in /*) ;; *) here="$PWD/$here" ;; esac
  export TORCH_EXTENSIONS_DIR="$here/torch_extensions" TRITON_CACHE_DIR="$here/triton"
  mkdir -p "$TORCH_EXTENSIONS_DIR" "$TRITON_CACHE_DIR"
  # Whoever is stopped while torch builds leaves its lock, for which the next would wait for ever.
  find "$TORCH_EXTENSIONS_DIR" -name lock -delete
  if [ -n "${REHEARSAL:-}" ] && "$PYTHON" -c 'import sys, torch; sys.exit(torch.cuda.is_available())'; then
    export STRONGHOLD_PRETENDED=1 DS_ACCELERATOR=cuda PYTHONPATH="$PWD/tests/pretended/site:$PYTHONPATH"
  fi
  case "$name" in
    compile) timeout "$((${LIMIT_S:-480} * 3 / 4))" "$PYTHON" -c 'from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()' &&
      without_symbols && touch "$TORCH_EXTENSIONS_DIR/compiled" ;;
    agree | tokens-peers | compare-*-zero-* | compare-*-superoffload* | largest-zero-* | largest-superoffload*)
      compiled || piece compile || echo "gpu_suite: without DeepSpeed's kernels" ;;&
    probe) probe ;;
    doctor) "$PYTHON" -m stronghold.tools.cli doctor --json "$RESULTS/doctor.json" ;;
    smoke) "$PYTHON" benchmarks/smoke.py ${REHEARSAL:+gpu step-fp32 comparison} --logs "$STATE/smoke" ;;
    # One after the other: they look at what the device does meanwhile.
    tests-device) gpu_tests tests/gpu/test_device_cuda.py tests/gpu/test_activations_cuda.py tests/units/test_device.py ;;
    tests-kernels) side_by_side tests/gpu/test_kernels_cuda.py ;;
    tests-training) side_by_side tests/gpu/test_training_cuda.py tests/gpu/test_checkpoint_cuda.py ;;
    tests-rest) side_by_side $(gpu_files | grep -v -E 'device|activations|kernels|training|checkpoint') ;;
    # Layers of real sizes, in whichever file: one test after the other, and with more patience.
    tests-shapes) CHOSEN="real_shapes" DEADLOCK_S="${DEADLOCK_S:-240}" gpu_tests $(gpu_files) ;;
    quickstart) quickstart ;;
    agree) "$PYTHON" benchmarks/compare.py --method plain,l2l,zero-offload,zero-infinity,superoffload,fsdp2-offload,stronghold \
      --layers 8 --hidden 512 --heads 8 --seq $((LENGTH / 4)) --batch 8 --precision bf16 --steps 20 $(each 6) \
      --json "$RESULTS/agree.json" ;;
    # Where the model fits: every block stays on the GPU with its optimizer.
    fits) "$PYTHON" benchmarks/compare.py --method plain,stronghold $(model 1b) $STEP --activations keep --batch 4 $(each 4) \
      --section '{"resident_layers": "all", "resident_updates": "gpu"}' --json "$RESULTS/fits.json" ;;
    reference-*) reference "${name#reference-}" ;;
    halves-*) "$PYTHON" benchmarks/compare.py --add-halves "$RESULTS/reference-${name#halves-}.json" $(each 1) ;;
    compare-*) compare_one "${name#compare-}" ;;
    table-*) table "${name#table-}" ;;
    limits-3b) "$PYTHON" benchmarks/limits.py --method plain,stronghold $(model 3b) $STEP --batch 16 $(each 4) \
      --json "$RESULTS/limits-3b.json" ;;
    tokens-ours) tokens plain,stronghold $(each 8) ;;
    tokens-peers) tokens superoffload,fsdp2-offload --sweep 4,16 $(each 6) ;;
    trace) draw_trace ;;
    largest-*) largest "${name#largest-}" ;;
    window) "$PYTHON" benchmarks/case5_window.py --output "$RESULTS" $(model 3b) $STEP --sweep 2,3,4,8,16 $(each 5) ;;
    *) echo "gpu_suite: no piece $name; see: gpu_suite.sh list" >&2; return 2 ;;
  esac
}

# The seconds that one of so many runs of a piece may take: one that hangs leaves time for the others,
# and a tenth is left to write what was measured.
each() { echo "--timeout $((${LIMIT_S:-480} * 9 / 10 / $1))"; }

# A test that hangs shows its stacks and ends its process; xdist goes on with another.
CHOSEN="not real_shapes"
if [ -n "${REHEARSAL:-}" ]; then CHOSEN="refused or torch.float16-torch.float16 or whole_cap or a_drain"; fi
gpu_tests() {
  local pretended=()
  if [ -n "${STRONGHOLD_PRETENDED:-}" ]; then pretended=(-p tests.pretended.plugin); fi
  env -u STRONGHOLD_PRETENDED "$PYTHON" -m pytest -v -m gpu -p no:cacheprovider --tb=short --durations=5 --maxfail=8 -k "$CHOSEN" \
    -o "faulthandler_timeout=${DEADLOCK_S:-60}" -o faulthandler_exit_on_timeout=true \
    ${pretended[@]+"${pretended[@]}"} "$@"
}

# But for what only the pretended device can show: no GPU's host refuses to pin on demand.
gpu_files() { ls tests/gpu/test_*.py | grep -v pinning; }

side_by_side() {  # in processes that share the GPU, where pytest can
  local workers=()
  if "$PYTHON" -c 'import xdist' 2>/dev/null; then workers=(-n "$(($(nproc) / 4 + 1))"); fi
  gpu_tests ${workers[@]+"${workers[@]}"} "$@"
}

# A first look at the machine. What is not there is left out.
probe() {
  local command
  for command in "date -u" "uname -a" "lscpu" "free -b" "ulimit -l" "df -h . /tmp /dev/shm" "nvidia-smi" "nvcc --version" \
    "${CXX:-c++} --version" "cmake --version" \
    "$PYTHON -c 'from importlib.metadata import distributions as found; print(*sorted({f\"{d.name}=={d.version}\" for d in found()}))'" \
    "$PYTHON -c 'import torch; print(torch.__version__, torch.version.cuda, torch.backends.cudnn.version())'"; do
    echo "\$ $command"
    timeout 30 bash -c "$command" 2>&1 || true
  done | tee "$RESULTS/probe.txt"
}

# As scripts/quickstart runs it.
quickstart() {
  local port steps=40
  if [ -n "${REHEARSAL:-}" ]; then steps=5; fi
  port="$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
  TOKENIZERS_PARALLELISM=false CUBLAS_WORKSPACE_CONFIG=:4096:8 "$PYTHON" -m deepspeed.launcher.runner --num_gpus 1 \
    --master_addr 127.0.0.1 --master_port "$port" scripts/quickstart.py --deepspeed_config configs/quickstart.json \
    --tiny --steps "$steps" --no-timing --output "$RESULTS/quickstart"
}

# The reference is made once per model, without caps; l2l stands in where plain does not fit at all. Its
# second run, which measures the bound on losses, is a piece of its own: halves-SIZE.
reference() {
  local methods=plain
  if [ "$1" = 8b ]; then methods=plain,l2l; fi
  "$PYTHON" benchmarks/compare.py --method "$methods" $(model "$1") $STEP --no-halves $(each 2) --json "$RESULTS/reference-$1.json"
}

compare_one() {  # SIZE-CAPgb-METHOD
  local size="${1%%-*}" rest="${1#*-}"
  local cap="${rest%%gb-*}" method="${rest#*gb-}" kept=(--no-reference)  # the table judges it
  rm -f "$RESULTS/compare-$1.json"
  if [ "$1" = 3b-24gb-stronghold ]; then kept+=(--trace "$RESULTS/trace.json"); fi
  if [ -f "$RESULTS/reference-$size.json" ]; then kept[0]="--reference=$RESULTS/reference-$size.json"; fi
  "$PYTHON" benchmarks/compare.py --method "$method" $(model "$size") $STEP --gpu-memory "${cap}GB" \
    "${kept[@]}" $(each 1) --json "$RESULTS/compare-$1.json" || [ -f "$RESULTS/compare-$1.json" ]  # wrong losses are a result
}

table() {  # SIZE-CAPgb
  local files=() kept=()
  for method in $PEERS; do
    if [ -f "$RESULTS/compare-$1-$method.json" ]; then files+=("$RESULTS/compare-$1-$method.json"); fi
  done
  if [ "${#files[@]}" -eq 0 ]; then echo "gpu_suite: no compare-$1-* has run" >&2; return 1; fi
  if [ -f "$RESULTS/reference-${1%%-*}.json" ]; then kept=(--reference "$RESULTS/reference-${1%%-*}.json"); fi
  "$PYTHON" benchmarks/compare.py --join "${files[@]}" ${kept[@]+"${kept[@]}"} --json "$RESULTS/table-$1.json" |
    tee "$RESULTS/table-$1.md"
}

tokens() {
  local methods="$1"
  shift
  "$PYTHON" benchmarks/case6_tokens.py --method "$methods" --output "$RESULTS/tokens-${methods%%,*}" $(model 3b) \
    --seq "$LENGTH" --steps 3 --warmup 5 --precision bf16 --activations recompute --sweep 1,2,4,8,16 "$@"
}

# Of the run that is compared at 3 B and 24 GB.
draw_trace() {
  if [ ! -f "$RESULTS/trace.json" ]; then echo "gpu_suite: no compare-3b-24gb-stronghold has run" >&2; return 1; fi
  "$PYTHON" -m stronghold.tools.cli trace "$RESULTS/trace.json" -o "$RESULTS/trace.png"
  gzip -f "$RESULTS/trace.json"
}

largest() {
  local sizes="--hidden 4096 --heads 32 --seq 1024" caps="--gpu-memory 24GB --host-memory ${HOST_MEMORY:-100GB}"
  if [ -n "${REHEARSAL:-}" ]; then
    sizes="--hidden 64 --heads 4 --seq 32 --vocab 256" caps="--gpu-memory 2MB --host-memory ${HOST_MEMORY:-8GB}"
  fi
  "$PYTHON" benchmarks/case1_largest.py --method "$1" --family gpt $sizes --batch 4 \
    --precision bf16 $caps --resolution 2 $(each 2) \
    --tries "$STATE/tries-$1.json" --output "$RESULTS/largest-$1"
}

# -- verbs ----------------------------------------------------------------------------------------
status_of() {
  if [ -f "$STATE/$1.done" ]; then cat "$STATE/$1.done"; elif [ -f "$STATE/$1.failed" ]; then cat "$STATE/$1.failed"; else echo "-"; fi
}

list() {
  local name
  for name in $(pieces); do printf '%-40s %s\n' "$name" "$(status_of "$name")"; done
}

# Seconds until the deadline, at most those of a piece. What comes before the first step at a real size
# leaves time for it.
left() {  # [PIECE]
  local seconds="$PIECE_S"
  case "${DEADLINE:+${1:-}}" in
    probe) seconds=60 ;;
    smoke) seconds=180 ;;
  esac
  if [ -n "${DEADLINE:-}" ] && [ "$((DEADLINE - $(date +%s)))" -lt "$seconds" ]; then seconds="$((DEADLINE - $(date +%s)))"; fi
  echo "$seconds"
}

# Runs a command for so many seconds, and writes down what it prints. A process that it leaves behind
# keeps the output open: nobody waits for it.
bounded() {  # SECONDS LOG COMMAND...
  local seconds="$1" log="$2" code=0 tee_pid
  shift 2
  exec 3> >(exec tee "$log")
  tee_pid="$!"
  timeout --kill-after=10 "$seconds" "$@" >&3 2>&1 3>&- || code=$?
  exec 3>&-
  timeout 2 tail --pid="$tee_pid" -f /dev/null || true
  return "$code"
}

pack_if_asked() { if [ -n "${PACK_TO:-}" ]; then pack "$PACK_TO" || echo "gpu_suite: pack failed"; fi; }

run_piece() {
  local name="$1" begun="$SECONDS" code=0 limit
  pieces | grep -x -- "$name" >/dev/null || { echo "gpu_suite: no piece $name; see: gpu_suite.sh list" >&2; return 2; }
  if [ -f "$STATE/$name.done" ] && [ "$name" != compile ]; then echo "gpu_suite: $name is done already"; return 0; fi
  limit="$(left "$name")"
  if [ -n "${DEADLINE:-}" ] && [ "$limit" -lt 30 ]; then echo "gpu_suite: $name: no time is left for it"; return 0; fi
  mkdir -p "$RESULTS"
  rm -f "$STATE/$name.failed"
  echo "gpu_suite: $name, $limit s at most"
  # A process of its own, so that timeout can end it and everything that it started.
  LIMIT_S="$limit" bounded "$limit" "$STATE/$name.log" bash benchmarks/gpu_suite.sh _piece "$name" || code=$?
  if [ "$code" -eq 0 ]; then
    echo "done in $((SECONDS - begun)) s" >"$STATE/$name.done"
  elif [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then
    echo "cut off after $((SECONDS - begun)) s; run it again to go on" >"$STATE/$name.failed"
  else
    echo "failed with status $code, see $STATE/$name.log" >"$STATE/$name.failed"
  fi
  echo "gpu_suite: $name: $(status_of "$name")"
  pack_if_asked
  return "$code"
}

next_piece() {
  local name
  for name in $(pieces); do
    if [ "$(status_of "$name")" = "-" ]; then echo "$name"; return; fi
  done
  for name in $(pieces); do
    if [[ "$(status_of "$name")" == cut* ]]; then echo "$name"; return; fi
  done
}

run() {
  [ $# -gt 0 ] || { echo "gpu_suite: run PIECE..., next or all" >&2; return 2; }
  local name worst=0
  for name in "$@"; do
    case "$name" in
      next) name="$(next_piece)"
        if [ -z "$name" ]; then echo "gpu_suite: nothing is left"; continue; fi
        run_piece "$name" || worst=$? ;;
      all) for one in $(pieces); do run_piece "$one" || worst=$?; done ;;
      *) run_piece "$name" || worst=$? ;;
    esac
  done
  return "$worst"
}

carry() { carry_lines "$@"; }

check() { check_packages && check_imports; }

# Before anything is built: what is here, and what is missing or too old.
check_packages() {
  local missing=() builders=() compiler=""
  "$PYTHON" - <<'PY' || return 1
import sys
try:
    import torch
except ImportError:
    sys.exit(f"check: {sys.executable} has no torch: name another with PYTHON=")
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "NO GPU"
print(f"check: python {sys.version.split()[0]}, torch {torch.__version__}, CUDA {torch.version.cuda}, {gpu}")
with open("/proc/meminfo") as lines:
    sizes = dict(line.split(":") for line in lines)
total, left = (int(sizes[name].split()[0]) / 2**20 for name in ("MemTotal", "MemAvailable"))
print(f"check: {total:.1f} GiB of memory, {left:.1f} available")
PY
  mapfile -t builders < <(lacking $BUILDERS)
  if [ "${#builders[@]}" -gt 0 ]; then
    echo "check: pip cannot build the kernels, cmake alone does it; missing or too old: ${builders[*]}"
    if [ -z "$(cmake_here)" ]; then missing+=(cmake); fi
  fi
  mapfile -t -O "${#missing[@]}" missing < <(lacking $NEEDED)
  for compiler in ${CXX:-g++ c++ clang++} none; do command -v "$compiler" >/dev/null && break; done
  if [ "$compiler" = none ]; then echo "check: no C++ compiler, for stronghold's and DeepSpeed's kernels: install g++"; fi
  if [ "${#missing[@]}" -gt 0 ]; then
    echo "check: missing or too old: ${missing[*]}"
    echo "check: where there is a network, in this repository:"
    carry_lines "${missing[@]}"
    return 1
  fi
  if [ "$compiler" = none ]; then return 1; fi
}

# Packages that are not here, or older than MODULE=PACKAGE>=VERSION asks for.
lacking() {
  "$PYTHON" - "$@" <<'PY'
import importlib.util, re, sys
from importlib.metadata import PackageNotFoundError, version

def numbers(text):
    return [int(n) for n in re.findall(r"\d+", text)[:3]]

for word in sys.argv[1:]:
    module, wanted = word.split("=", 1)
    package, _, least = wanted.partition(">=")
    missing = importlib.util.find_spec(module) is None
    if not missing and least:
        try:
            missing = numbers(version(package)) < numbers(least)
        except PackageNotFoundError:
            missing = True
    if missing:
        print(package)
PY
}

check_imports() {
  local problem
  "$PYTHON" - <<'PY' || return 1
import sys
from importlib.metadata import version
try:
    from stronghold import native
    print(f"check: stronghold {version('stronghold')}, kernels for {native.isa()}")
except Exception as error:
    sys.exit(f"check: stronghold's kernels are not built: gpu_suite.sh setup ({error})")
PY
  if ! problem="$("$PYTHON" -c 'import deepspeed, stronghold' 2>&1)"; then
    echo "check: importing them fails:"
    tail -n 5 <<<"$problem"
    return 1
  fi
  echo "check: everything is here"
}

# The lines that put what is missing into .whl, for the Python of this machine.
carry_lines() {
  local version platform="" name pin
  version="${WHEELS_FOR:-$("$PYTHON" -c 'import sys; print(f"{sys.version_info[0]}.{sys.version_info[1]}")')}"
  for name in 28 27 17; do platform="$platform --platform manylinux_2_${name}_$(uname -m)"; done
  platform="$platform --platform manylinux2014_$(uname -m) --platform any"
  for name in "$@"; do
    pin="$(grep -i -m1 "^$name==" constraints.txt | sed 's/ *;.*//' || true)"
    if [[ "$SOURCE_ONLY" == *" $name "* ]]; then
      echo "  DS_BUILD_OPS=0 DS_ACCELERATOR=cpu python3 -m pip wheel --no-deps --no-build-isolation -w .whl ${pin:-$name}"
    else
      echo "  python3 -m pip download --no-deps --only-binary=:all: --python-version $version --implementation cp$platform -d .whl ${pin:-$name}"
    fi
  done
}

setup() {
  local code=0
  if [ "$(left)" -le 0 ]; then echo "gpu_suite: set-up: no time is left for it"; return 1; fi
  mkdir -p "$STATE"
  bounded "$(left)" "$STATE/setup.log" bash benchmarks/gpu_suite.sh _setup "$@" || code=$?
  pack_if_asked
  return "$code"
}

setup_here() {
  local worst=0
  install_wheels "${1:-.whl}"
  check_packages || worst=1
  build_kernels
  check_imports || worst=1
  return "$worst"
}

install_wheels() {
  local found=() sources
  shopt -s nullglob
  found=("$1"/*.whl)
  if [ "${#found[@]}" -eq 0 ]; then return; fi
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile "${found[@]}" ||
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$SITE" "${found[@]}"
  # Ninja compares times, and would compile what was carried again for sources that were unpacked just now.
  for sources in "$1"/deepspeed-*.whl; do
    sources="$("$PYTHON" -c 'import importlib.util as i; print(i.find_spec("deepspeed").submodule_search_locations[0])')/ops"
    find "$sources" -type f -exec touch -d 2020-01-01 {} +
  done
}

# Stronghold's library, in the first way that works: as compiled before for this source and compiler; by
# pip; by pip into a folder, where the interpreter's own cannot be written; by cmake alone.
build_kernels() {
  local kept built="$LIBRARY"
  kept="$COMPILED/kernels-$(kernels_for)/libstronghold.so"
  rm -rf "$LIBRARY" "$SITE"/stronghold-*.dist-info
  if [ -f "$kept" ]; then
    mkdir -p "$(dirname "$LIBRARY")"
    cp "$kept" "$LIBRARY"
    name_package
    echo "setup: the kernels are those that were carried"
    return
  fi
  if [ -z "$(lacking $BUILDERS)" ] && build_with_pip; then
    built="$("$PYTHON" -c 'from stronghold import native; print(native._library_path())')"
    echo "setup: pip built the kernels"
  elif [ -z "$(lacking $BUILDERS)" ] && build_aside; then
    echo "setup: pip built the kernels, aside"
  else
    build_with_cmake
    name_package
    echo "setup: cmake alone built the kernels"
  fi
  mkdir -p "$(dirname "$kept")"
  cp "$built" "$kept.part"
  mv "$kept.part" "$kept"
}

LIBRARY=stronghold/_native/libstronghold.so  # beside the sources, where the package looks too

build_with_pip() { "$PYTHON" -m pip install -q --no-index --no-deps --no-build-isolation -e .; }

# The package is used from this folder, with its kernels in it; aside is what pip says of it.
build_aside() {
  "$PYTHON" -m pip install -q --no-index --no-deps --no-build-isolation --upgrade --target "$SITE" . &&
    mkdir -p "$(dirname "$LIBRARY")" && cp "$SITE/$LIBRARY" "$LIBRARY"
}

cmake_here() {
  if command -v cmake >/dev/null; then echo cmake; elif "$PYTHON" -m cmake --version >/dev/null 2>&1; then echo "$PYTHON -m cmake"; fi
}

build_with_cmake() {
  local cmake
  cmake="$(cmake_here)"
  rm -rf build/alone
  $cmake -S . -B build/alone -DCMAKE_BUILD_TYPE=Release
  $cmake --build build/alone --parallel "$(nproc)"
  mkdir -p "$(dirname "$LIBRARY")"
  cp build/alone/kernels/libstronghold.so "$LIBRARY"
}

# What pip would say of the package: its name and version, which checkpoints and the command ask for.
name_package() {
  local version
  version="$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)"
  mkdir -p "$SITE/stronghold-$version.dist-info"
  printf 'Metadata-Version: 2.1\nName: stronghold\nVersion: %s\n' "$version" >"$SITE/stronghold-$version.dist-info/METADATA"
}

# Two archives: what was measured, and what was compiled. Each is whole at every moment. The second is
# made again only when something new was compiled.
pack() {
  [ $# -eq 1 ] || { echo "gpu_suite: pack FOLDER" >&2; return 2; }
  local name
  name="$(basename "$STATE")"
  mkdir -p "$1" "$COMPILED"
  archive "$1/$name.tgz" --exclude="$name/matplotlib" --exclude="$name/site" --exclude="$name/compiled" "$name"
  if [ ! -f "$1/${name}_compiled.tgz" ] || [ -n "$(find "$COMPILED" -newer "$1/${name}_compiled.tgz" -print -quit)" ]; then
    archive "$1/${name}_compiled.tgz" "$name/compiled"
  fi
  echo "gpu_suite: packed into $1; unpack both archives in runs/ to go on"
}

archive() {  # FILE TAR'S WORDS
  local file="$1"
  shift
  timeout 120 tar --format=posix -C "$(dirname "$STATE")" -czf "$file.part" "$@"
  mv "$file.part" "$file"
  if [ "$(stat -c %s "$file")" -gt "$((15 << 20))" ]; then echo "gpu_suite: $file has more than 15 MiB: du -h $file"; fi
}

# One of the three commands of the first half hour.
call() {
  [ $# -ge 2 ] || { echo "gpu_suite: call N FOLDER [WHEELS]" >&2; return 2; }
  local wanted folder="$2" worst=0
  wanted="$(call_pieces "$1")"
  export DEADLINE="${DEADLINE:-$(($(date +%s) + ${CALL_S:-560}))}" PACK_TO="$folder"
  mkdir -p "$folder"
  exec > >(exec tee -a "$folder/console.log") 2>&1
  setup "${3:-.whl}" || worst=$?
  run $wanted || worst=$?
  list
  return "$worst"
}

case "${1:-}" in
  list | check | carry | setup | pack | run | call) verb="$1"; shift; "$verb" "$@" ;;
  _piece) piece "$2" ;;
  _setup) shift; setup_here "$@" ;;
  *) sed -n '2,17p' benchmarks/gpu_suite.sh | sed 's/^# \{0,1\}//' >&2; exit 2 ;;
esac
