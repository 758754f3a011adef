#!/usr/bin/env bash
# Train on this machine:
#
#     NGPU=2 CONFIG_FILE=train_configs/llama3_debug.toml ./run_train.sh [--table.key value ...]
#
# NGPU         processes, one per GPU (default: the GPUs there are, else 2 on the CPU)
# CONFIG_FILE  a TOML file (default: train_configs/llama3_debug.toml beside this script)
# LOG_RANK     the ranks whose output is shown, comma-separated (default: 0, with a progress bar on a terminal)
# COMM_MODE    fake_backend: a dry run as rank 0 of NGPU, in one process
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
CONFIG_FILE=${CONFIG_FILE:-$here/train_configs/llama3_debug.toml}
LOG_RANK=${LOG_RANK:-0}
COMM_MODE=${COMM_MODE:-default}
NGPU=${NGPU:-$(python -c "import torch; print(torch.cuda.device_count() or 2)")}
export NGPU

train=(-m torchtitan_graph.train --job.config_file "$CONFIG_FILE" "$@")
if [[ $COMM_MODE != default ]]; then
    exec python "${train[@]}" --comm.mode "$COMM_MODE"
fi

if [[ -z ${OMP_NUM_THREADS:-} ]]; then # torchrun's own default is one thread
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    export OMP_NUM_THREADS=$((cores > NGPU ? cores / NGPU : 1))
fi
# A worker that torchrun restarts would find its predecessor's addresses in a store shared with torchrun.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}

# A name of its own, by which a restarted worker knows the lock of the attempt before it.
export PET_RDZV_ID=${PET_RDZV_ID:-$(uname -n).$$}

# On a terminal rank 0 has it to itself, for its progress bar. (--redirects takes ranks of one digit.)
if [[ -t 2 && $LOG_RANK == 0 && $NGPU =~ ^([1-9]|10)$ ]]; then
    output=0:0
    for ((rank = 1; rank < NGPU; rank++)); do output+=,$rank:3; done
    output=(--redirects "$output")
else
    output=(--tee 3 --local_ranks_filter "$LOG_RANK")
fi

# torchrun's rendezvous is a temporary file (which it leaves behind): its usual store would listen on every address of
# the machine. It notes there that it is alive, once a minute (every 5 s would fill some 20 MB a day).
rendezvous=$(mktemp -t torchrun.XXXXXX)
exec torchrun --nproc_per_node "$NGPU" --rdzv_backend c10d --rdzv_endpoint "$rendezvous" \
    --rdzv_conf store_type=file,keep_alive_interval=60 --local_addr 127.0.0.1 \
    --role rank "${output[@]}" "${train[@]}"
