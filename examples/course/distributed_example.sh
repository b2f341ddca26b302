#!/usr/bin/env bash
# Trains on two processes of this host: distributed_example.sh [ARGUMENTS OF distributed_example.py]
# Variables that are already set are kept: WORLD_SIZE=4 examples/course/distributed_example.sh
set -euo pipefail

refuse() { echo "distributed_example.sh: $1" >&2 && exit 2; }

python=${PYTHON:-python}
command -v "$python" > /dev/null || refuse "PYTHON=$python is no command: set PYTHON to a Python 3"
export MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} # where rank 0 listens, and all others come to
free_port='import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
export MASTER_PORT=${MASTER_PORT:-$("$python" -c "$free_port")}
export WORLD_SIZE=${WORLD_SIZE:-2}         # how many processes there are
[[ $WORLD_SIZE =~ ^[1-9][0-9]*$ ]] || refuse "WORLD_SIZE=$WORLD_SIZE: an integer from 1 on"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # threads of each; two processes share the cores

trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
for ((rank = 0; rank < WORLD_SIZE; rank++)); do
    # RANK is the number of the process, and LOCAL_RANK its number on this host.
    RANK=$rank LOCAL_RANK=$rank "$python" "$(dirname -- "$0")/distributed_example.py" "$@" &
done
for ((rank = 0; rank < WORLD_SIZE; rank++)); do
    wait -n # the first one that fails ends the others
done
