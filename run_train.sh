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
options=(--job.config_file "${CONFIG_FILE:-$here/train_configs/llama3_debug.toml}" "$@")
[[ ${COMM_MODE:-default} == default ]] || options+=(--comm.mode "$COMM_MODE")
exec python -m torchtitan_graph.launch "${options[@]}"
