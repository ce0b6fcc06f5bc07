#!/usr/bin/env bash
# Train under torchrun, on one node or several.
#
#   launch/torchrun.sh --config configs/quickstart.yaml --nproc-per-node 2 [key=value ...]
#   # the same on every node of several:
#   launch/torchrun.sh --config C --nproc-per-node 8 --nnodes 2 --node-rank R --master-addr HOST [--master-port 29500]
#
# The configuration is checked before any process starts.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
python=${MEGATRON_GRPO_PYTHON:-$here/.venv/bin/python}
usage() { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit "${1:-2}"; }

fail() { echo "torchrun.sh: $1" >&2; exit 2; }

config='' nproc=1 nnodes=1 node_rank=0 master_addr='' master_port=29500 overrides=()
while [ $# -gt 0 ]; do
    case $1 in
        --config | --n* | --master-*) [ $# -gt 1 ] || fail "$1 needs a value" ;;
    esac
    case $1 in
        --config) config=$2; shift 2 ;;
        --nproc-per-node) nproc=$2; shift 2 ;;
        --nnodes) nnodes=$2; shift 2 ;;
        --node-rank) node_rank=$2; shift 2 ;;
        --master-addr) master_addr=$2; shift 2 ;;
        --master-port) master_port=$2; shift 2 ;;
        -h | --help) usage 0 ;;
        -*) echo "torchrun.sh: unknown option $1" >&2; usage ;;
        *) overrides+=("$1"); shift ;;
    esac
done
[ -n "$config" ] || { echo "torchrun.sh: --config is missing" >&2; usage; }
[ -x "$python" ] || fail "no $python; run 'make setup' first"
for number in "nproc-per-node $nproc" "nnodes $nnodes"; do
    [[ $number =~ \ [1-9][0-9]*$ ]] || fail "--$number: not a whole number above 0"
done

plan=(--config "$config" --world-size "$((nproc * nnodes))")
if [ "$nnodes" -gt 1 ]; then
    [ -n "$master_addr" ] || fail "--nnodes $nnodes needs --master-addr"
    rendezvous=(--nnodes "$nnodes" --node-rank "$node_rank" --master-addr "$master_addr" --master-port "$master_port")
    [ "$node_rank" != 0 ] || plan+=(--master-port "$master_port")
else
    rendezvous=(--standalone --nnodes 1)
fi
"$python" -m megatron_grpo plan "${plan[@]}" "${overrides[@]}"

# One thread per rank unless the user says otherwise: ranks and engines share the cores of a CPU machine.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" "$here/launch/elastic.py" \
    --nproc-per-node "$nproc" "${rendezvous[@]}" -m megatron_grpo train --config "$config" "${overrides[@]}"
