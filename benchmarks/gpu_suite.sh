#!/usr/bin/env bash
# Everything that needs a GPU, in pieces of at most eight minutes each, without network.
#
#   gpu_suite.sh list            the pieces, and what became of them
#   gpu_suite.sh check           what is missing here, and the lines that fetch it where there is a network
#   gpu_suite.sh carry PACKAGE...  the lines that fetch these wheels, for WHEELS_FOR (such as 3.12; default:
#                                this Python)
#   gpu_suite.sh setup [WHEELS]  install wheels from a folder (default .whl) and build the package, offline
#   gpu_suite.sh run PIECE...    run pieces; `next` is the first not tried, or else cut off; `all` every
#                                one that is not done
#   gpu_suite.sh pack FOLDER     copy what was measured, flat, to bring it back from another machine
#
# A piece that is done is not run again; one that was cut off goes on where it was where it can (the
# searches keep every try). State, logs and results are in runs/gpu_suite; carry that folder to go on
# elsewhere. Pages for the repository: rerun a join with --save, or copy results/*.md and *.json.
#
#   STRONGHOLD_GPU_STATE   another folder for all of it
#   PIECE_S                seconds that a piece may take (default 480)
#   TOTAL_S                seconds that all pieces of one command may take (default: no limit); a piece
#                          gets what is left, and none begins with less than 30
#   HOST_MEMORY            cap on every method's host memory, as 100GB (default: what the machine has);
#                          where the memory of a virtual machine grows as it is used, say what it can be
#   STRONGHOLD_COMMIT      the commit that results name, where the tree comes without its history
#   PYTHON                 the interpreter (default: .venv's, else python3)
#   REHEARSAL              1: tiny models, and without a GPU the pretended device (tests/pretended), in
#                          runs/gpu_rehearsal: shows mistakes of this script, and nothing else
#   DEADLOCK_S             seconds after which a test on the GPU shows its stacks and is ended (default 60)
#
# A first half hour on a GPU that is lent for ten minutes at a time, each time bare. Before it .whl is
# filled with what `carry` names: an image made for torch lacks deepspeed, hjson, pydantic, pydantic-core,
# annotated-types and typing-inspection, and its typing-extensions may be old. Each command has TOTAL_S=420,
# HOST_MEMORY and STRONGHOLD_COMMIT set, and ends in `pack`:
#   1  setup; run smoke tests-training tests-device tests-kernels    what works at all, then to the bit
#      What fails is mended before the next, with the logs of smoke at hand.
#   2  setup; run smoke tests-rest doctor agree fits    updates on the GPU, files, rates, losses
#   3  setup; run compare-3b-24gb-stronghold compare-3b-24gb-superoffload-param
#      compare-3b-24gb-zero-offload reference-3b table-3b-24gb trace    against whom, and where the time goes
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

# DeepSpeed's kernels are compiled for the machine's own instructions: each machine, compiler and torch has
# a folder, and what is compiled for this one is what lies there. It is not packed.
compiled_for() {
  { grep -m2 -E '^(model name|flags)' /proc/cpuinfo; ${CXX:-c++} --version | head -n1; "$PYTHON" --version
    "$PYTHON" -c 'from importlib.metadata import version; print(version("torch"), version("deepspeed"))'; } 2>&1 | cksum | tr ' ' -
}

# import name = what pip calls it. Torch is taken as it is.
NEEDED="deepspeed=deepspeed hjson=hjson pydantic=pydantic pydantic_core=pydantic-core
  annotated_types=annotated-types typing_inspection=typing-inspection
  typing_extensions=typing-extensions cpuinfo=py-cpuinfo msgpack=msgpack einops=einops
  psutil=psutil tqdm=tqdm packaging=packaging numpy=numpy matplotlib=matplotlib
  safetensors=safetensors ninja=ninja cmake=cmake scikit_build_core=scikit-build-core
  pathspec=pathspec pytest=pytest"
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
STEP="--seq $LENGTH --batch 8 --steps 5 --warmup 3 --precision bf16 --activations recompute --lr 1e-4"
if [ -n "${HOST_MEMORY:-}" ]; then STEP="$STEP --host-memory $HOST_MEMORY"; fi
PEERS="zero-offload zero-infinity superoffload superoffload-param fsdp2-offload l2l plain stronghold"

# -- pieces, in the order of what is wanted first ---------------------------------------------------
pieces() {
  echo "smoke"
  echo "tests-training"
  echo "tests-device"
  echo "tests-kernels"
  echo "tests-rest"
  echo "doctor"
  echo "compile"
  echo "agree"
  echo "fits"
  local size cap method
  for size in 3b 8b; do
    local made=""
    for cap in 24 80; do
      for method in stronghold zero-offload zero-infinity superoffload superoffload-param fsdp2-offload l2l plain; do
        echo "compare-$size-${cap}gb-$method"
      done
      if [ -z "$made" ]; then echo "reference-$size"; fi
      made=1
      echo "table-$size-${cap}gb"
    done
  done
  echo "limits-3b"
  echo "tokens-ours"
  echo "tokens-peers"
  echo "trace"
  for method in stronghold zero-infinity zero-offload superoffload-param fsdp2-offload l2l plain; do
    echo "largest-$method"
  done
  echo "window"
}

compiled() { [ -f "$TORCH_EXTENSIONS_DIR/compiled" ]; }

# DeepSpeed compiles its kernels at first use: before any piece that needs them, so that no measured process
# does.
piece() {
  local name="$1"
  export TORCH_EXTENSIONS_DIR="$PWD/build/torch_extensions/$(compiled_for)"
  mkdir -p "$TORCH_EXTENSIONS_DIR"
  if [ -n "${REHEARSAL:-}" ] && "$PYTHON" -c 'import sys, torch; sys.exit(torch.cuda.is_available())'; then
    export STRONGHOLD_PRETENDED=1 DS_ACCELERATOR=cuda PYTHONPATH="$PWD/tests/pretended/site:$PYTHONPATH"
  fi
  case "$name" in
    # A compiler that was stopped leaves torch's lock, for which the next would wait for ever.
    compile) find "$TORCH_EXTENSIONS_DIR" -name lock -delete
      timeout "$((${LIMIT_S:-480} * 3 / 4))" "$PYTHON" -c 'from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()' &&
      touch "$TORCH_EXTENSIONS_DIR/compiled" ;;
    agree | tokens-peers | compare-*-zero-* | compare-*-superoffload* | largest-zero-* | largest-superoffload*)
      compiled || piece compile || echo "gpu_suite: without DeepSpeed's kernels" ;;&
    doctor) "$PYTHON" -m stronghold.cli doctor --json "$RESULTS/doctor.json" ;;
    smoke) "$PYTHON" benchmarks/smoke.py --logs "$STATE/smoke" ;;
    # One after the other: they look at what the device does meanwhile.
    tests-device) gpu_tests tests/gpu/test_device_cuda.py tests/gpu/test_activations_cuda.py tests/units/test_device.py ;;
    tests-kernels) side_by_side tests/gpu/test_kernels_cuda.py ;;
    tests-training) side_by_side tests/gpu/test_training_cuda.py tests/gpu/test_checkpoint_cuda.py ;;
    tests-rest) side_by_side tests/gpu/test_residents_cuda.py tests/gpu/test_nvme_cuda.py tests/gpu/test_doctor_cuda.py ;;
    agree) "$PYTHON" benchmarks/compare.py --method plain,l2l,zero-offload,zero-infinity,superoffload,fsdp2-offload,stronghold \
      --layers 8 --hidden 512 --heads 8 --seq $((LENGTH / 4)) --batch 8 --precision bf16 --steps 20 $(each 6) \
      --json "$RESULTS/agree.json" ;;
    # Where the model fits: every block stays on the GPU with its optimizer.
    fits) "$PYTHON" benchmarks/compare.py --method plain,stronghold $(model 1b) $STEP --activations keep --batch 4 $(each 4) \
      --section '{"resident_layers": "all", "resident_updates": "gpu"}' --json "$RESULTS/fits.json" ;;
    reference-*) reference "${name#reference-}" ;;
    compare-*) compare_one "${name#compare-}" ;;
    table-*) table "${name#table-}" ;;
    limits-3b) "$PYTHON" benchmarks/limits.py --method plain,stronghold $(model 3b) $STEP --batch 16 $(each 4) \
      --json "$RESULTS/limits-3b.json" ;;
    tokens-ours) tokens plain,stronghold $(each 8) ;;
    tokens-peers) tokens superoffload,fsdp2-offload --sweep 4,16 $(each 6) ;;
    trace) trace ;;
    largest-*) largest "${name#largest-}" ;;
    window) "$PYTHON" benchmarks/case5_window.py --output "$RESULTS" $(model 3b) $STEP --sweep 2,3,4,8,16 $(each 5) ;;
    *) echo "gpu_suite: no piece $name; see: gpu_suite.sh list" >&2; return 2 ;;
  esac
}

# The seconds that one of so many runs of a piece may take: one that hangs leaves time for the others,
# and a tenth is left to write what was measured.
each() { echo "--timeout $((${LIMIT_S:-480} * 9 / 10 / $1))"; }

# A test that hangs shows its stacks and ends its process; xdist goes on with another.
gpu_tests() {
  local pretended=()
  if [ -n "${STRONGHOLD_PRETENDED:-}" ]; then pretended=(-p tests.pretended.plugin); fi
  env -u STRONGHOLD_PRETENDED "$PYTHON" -m pytest -v -m gpu -p no:cacheprovider --tb=short --durations=5 --maxfail=8 \
    -o "faulthandler_timeout=${DEADLOCK_S:-60}" -o faulthandler_exit_on_timeout=true \
    ${pretended[@]+"${pretended[@]}"} "$@"
}

side_by_side() {  # in processes that share the GPU, where pytest can
  local workers=()
  if "$PYTHON" -c 'import xdist' 2>/dev/null; then workers=(-n "$(($(nproc) / 4 + 1))"); fi
  gpu_tests ${workers[@]+"${workers[@]}"} "$@"
}

# The reference is made once per model, without caps; l2l stands in where plain does not fit at all.
reference() {
  "$PYTHON" benchmarks/compare.py --method plain,l2l $(model "$1") $STEP $(each 3) --json "$RESULTS/reference-$1.json"
}

compare_one() {  # SIZE-CAPgb-METHOD
  local size="${1%%-*}" rest="${1#*-}"
  local cap="${rest%%gb-*}" method="${rest#*gb-}" kept=(--no-reference)  # the table judges it
  rm -f "$RESULTS/compare-$1.json"
  if [ -f "$RESULTS/reference-$size.json" ]; then kept=(--reference "$RESULTS/reference-$size.json"); fi
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
    --seq "$LENGTH" --steps 3 --warmup 2 --precision bf16 --activations recompute --sweep 1,2,4,8,16 "$@"
}

trace() {
  "$PYTHON" benchmarks/compare.py --method stronghold $(model 3b) $STEP --steps 2 --gpu-memory 24GB $(each 1) \
    --no-reference --trace "$RESULTS/trace.json" --json "$RESULTS/trace-run.json"
  "$PYTHON" -m stronghold.cli trace "$RESULTS/trace.json" -o "$RESULTS/trace.png"
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

run_piece() {
  local name="$1" begun="$SECONDS" code=0 limit="$PIECE_S"
  pieces | grep -x -- "$name" >/dev/null || { echo "gpu_suite: no piece $name; see: gpu_suite.sh list" >&2; return 2; }
  if [ -f "$STATE/$name.done" ] && [ "$name" != compile ]; then echo "gpu_suite: $name is done already"; return 0; fi
  if [ -n "${TOTAL_S:-}" ]; then
    if [ "$((TOTAL_S - SECONDS))" -lt 30 ]; then echo "gpu_suite: $name: no time is left for it"; return 0; fi
    if [ "$((TOTAL_S - SECONDS))" -lt "$limit" ]; then limit="$((TOTAL_S - SECONDS))"; fi
  fi
  mkdir -p "$RESULTS"
  rm -f "$STATE/$name.failed"
  echo "gpu_suite: $name, $limit s at most"
  # A process of its own, so that timeout can end it and everything that it started.
  LIMIT_S="$limit" timeout --kill-after=10 "$limit" bash benchmarks/gpu_suite.sh _piece "$name" 2>&1 | tee "$STATE/$name.log" || code=$?
  if [ "$code" -eq 0 ]; then
    echo "done in $((SECONDS - begun)) s" >"$STATE/$name.done"
  elif [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then
    echo "cut off after $((SECONDS - begun)) s; run it again to go on" >"$STATE/$name.failed"
  else
    echo "failed with status $code, see $STATE/$name.log" >"$STATE/$name.failed"
  fi
  echo "gpu_suite: $name: $(status_of "$name")"
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

check() {
  local missing=() compiler="" PROBLEM
  PROBLEM="$(mktemp)"
  "$PYTHON" - <<'PY' || return 1
import sys
try:
    import torch
except ImportError:
    sys.exit(f"check: {sys.executable} has no torch: name another with PYTHON=")
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "NO GPU"
print(f"check: python {sys.version.split()[0]}, torch {torch.__version__}, CUDA {torch.version.cuda}, {gpu}")
try:
    from stronghold import native
    print("check: kernels for", native.isa())
except Exception:
    print("check: stronghold's kernels are not built: gpu_suite.sh setup")
with open("/proc/meminfo") as lines:
    sizes = dict(line.split(":") for line in lines)
total, left = (int(sizes[name].split()[0]) / 2**20 for name in ("MemTotal", "MemAvailable"))
print(f"check: {total:.1f} GiB of memory, {left:.1f} available")
PY
  mapfile -t missing < <("$PYTHON" - $NEEDED <<'PY'
import importlib.util, sys
from importlib.metadata import version
for module, package in (word.split("=") for word in sys.argv[1:]):
    missing = importlib.util.find_spec(module) is None
    if module == "typing_extensions" and not missing:  # pydantic's: 4.16 or later
        missing = [int(n) for n in version(module).split(".")[:2]] < [4, 16]
    if missing:
        print(package)
PY
  )
  for compiler in ${CXX:-g++ c++ clang++} none; do command -v "$compiler" >/dev/null && break; done
  if [ "$compiler" = none ]; then echo "check: no C++ compiler, for stronghold's and DeepSpeed's kernels: install g++"; fi
  command -v nvcc >/dev/null || echo "check: no nvcc: DeepSpeed's CPU Adam wants a CUDA toolkit of torch's version"
  if [ "${#missing[@]}" -gt 0 ]; then
    echo "check: missing: ${missing[*]}"
    echo "check: where there is a network, in this repository:"
    carry_lines "${missing[@]}"
    return 1
  fi
  if [ "$compiler" = none ]; then return 1; fi
  "$PYTHON" -c 'import deepspeed, stronghold' >"$PROBLEM" 2>&1 ||
    { echo "check: importing them fails:"; tail -n 5 "$PROBLEM"; return 1; }
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
  timeout --kill-after=10 "${TOTAL_S:-$PIECE_S}" bash benchmarks/gpu_suite.sh _setup "$@"
}

setup_here() {
  local wheels="${1:-.whl}" found=()
  shopt -s nullglob
  found=("$wheels"/*.whl)
  if [ "${#found[@]}" -gt 0 ]; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile "${found[@]}" ||
      "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$SITE" "${found[@]}"
  fi
  "$PYTHON" -m pip install -q --no-index --no-deps --no-build-isolation -e . || build_aside
  check
}

# The package is used from this folder, with its kernels in it; aside is what pip says of it.
build_aside() {
  "$PYTHON" -m pip install -q --no-index --no-deps --no-build-isolation --upgrade --target "$SITE" .
  mkdir -p stronghold/_native
  cp "$SITE/stronghold/_native/libstronghold.so" stronghold/_native/
}

pack() {
  [ $# -eq 1 ] || { echo "gpu_suite: pack FOLDER" >&2; return 2; }
  mkdir -p "$1"
  timeout 300 tar -C "$(dirname "$STATE")" -czf "$1/gpu_suite.tgz" --exclude=matplotlib --exclude=site "$(basename "$STATE")"
  echo "gpu_suite: $1/gpu_suite.tgz; unpack it in runs/ to go on"
}

case "${1:-}" in
  list | check | carry | setup | pack | run) verb="$1"; shift; "$verb" "$@" ;;
  _piece) piece "$2" ;;
  _setup) shift; setup_here "$@" ;;
  *) sed -n '2,27p' benchmarks/gpu_suite.sh | sed 's/^# \{0,1\}//' >&2; exit 2 ;;
esac
