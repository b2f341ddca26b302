"""The environment variables that users may set, without the variables of options.

A second list names the variables that the processes of a job set for each other. A test checks that
each variable in the code is in one of the lists.
"""

from __future__ import annotations

__all__ = ["INTERNAL", "VARIABLES"]

# Where it counts -> variable -> meaning.
VARIABLES: dict[str, dict[str, str]] = {
    "The launcher": {
        "POPRUN_LOG_LEVEL": "`DEBUG` or `TRACE` stands for `-vv`, `INFO` for `-v`.",
        "POPRUN_LEASES": "Folder in which jobs keep the cores that they have, or `none`.",
        "POPRUN_PODS": "Folder of the pods. Unset: `~/.local/state/poprun-py/pods`.",
        "POPRUN_POD_TOKEN_FILE": "File with the token of a pod's server.",
        "IPUOF_VIPU_API_PARTITION_ID": "Partition to use, of `gc-info` and `gc-monitor` too.",
        "IPUOF_VIPU_API_HOST": "Host of the server that `--pod server` asks. Unset: `localhost`.",
        "IPUOF_VIPU_API_PORT": "Its port. Unset: 8090.",
        "IPUOF_LOG_LEVEL": "Passed on to the instances; nothing here reads it.",
        "VIPU_CLI_API_HOST": "Host of the pod's server, for `poprun-py-pod`.",
        "VIPU_CLI_API_PORT": "Its port.",
    },
    "Instances: collectives": {
        "POPDIST_HANG_TIMEOUT": "Seconds to wait for another instance; 0: for ever. Unset: 300.",
        "POPDIST_DETERMINISTIC": (
            "1: `Options.Emulator.deterministicReduction` is on by default, and reductions of "
            "floats have the same bits on any hosts."
        ),
        "POPDIST_GRADIENT_OVERLAP": (
            "1: reduce gradients while backward runs; 0: afterwards. Unset: between hosts, what "
            "measures faster in the first steps."
        ),
        "POPDIST_SHARED_MEMORY": "0: use MPI within a host too.",
        "POPDIST_SHARED_WEIGHTS": "0: every instance has and updates all weights for itself.",
        "POPDIST_SEPARATE_MODELS": (
            "1: instances that train without one another are meant to, and no warning says so."
        ),
        "POPDIST_NETWORK": "Interface or CIDR of the network between the hosts.",
    },
    "Instances: observation": {
        "POPDIST_COUNT_STEPS": (
            "`no`: the steps of torch's optimizers are not counted, and their loops not observed."
        ),
    },
    "Instances: PopTorch": {
        "POPTORCH_LOG_LEVEL": "Level of the log of `poptorch`. Unset: `WARN`.",
        "POPTORCH_CACHE_DIR": "Folder in which compiled executables are kept.",
        "POPTORCH_DEFAULT_OPTIONS": "Options of every `poptorch.Options()`, as JSON.",
        "POPTORCH_IPU_MODEL": "1: the IPU model in place of devices, as `useIpuModel(True)`.",
        "POPTORCH_IPU_MODEL_VERSION": "Which IPU that is: `ipu1`, `ipu2` or `ipu21`.",
        "POPTORCH_WAIT_FOR_IPU": "1: wait for devices that somebody else holds.",
        "POPDIST_IPU": "IPU whose memory and time models have: `mk1`, `mk2` or `bow`.",
        "POPDIST_IPU_MEMORY": "Of a model that is too large for it: `enforce`, `warn` or `off`.",
        "POPLAR_ENGINE_OPTIONS": (
            "JSON; `autoReport.*` writes profiles, `debug.floatPointOpException` stops at "
            "overflows; a warning names the keys that have no effect."
        ),
        "PVTI_OPTIONS": "JSON; `enable` and `directory` record a timeline of the process.",
        "IPUOF_VIPU_API_GCD_ID": "Of a partition with several GCDs, the one to use.",
        "IPUOF_VIPU_API_TIMEOUT": "Seconds of one request to a pod's server. Unset: 120.",
    },
    "Without effect, with a warning": {
        "IPUOF_CONFIG_PATH": "`IPUOF_VIPU_API_PARTITION_ID` names a partition.",
        "POPART_CACHE_DIR": "`POPTORCH_CACHE_DIR` keeps executables.",
        "POPART_LOG_LEVEL": "`POPTORCH_LOG_LEVEL` sets the level of the log.",
        "POPLAR_LOG_LEVEL": "As `POPART_LOG_LEVEL`.",
        "POPLAR_RUNTIME_OPTIONS": "Its options change hardware only.",
        "POPLIBS_LOG_LEVEL": "As `POPLAR_LOG_LEVEL`.",
        "TF_POPLAR_FLAGS": "Models are written in PyTorch.",
    },
}

# Set by the launcher for its instances, or between its processes.
INTERNAL = (
    *("POPDIST_CALL", "POPDIST_CALL_FILES", "POPDIST_CHECKPOINT_MEMORY"),
    *("POPDIST_DEBUGGER", "POPDIST_EXECUTABLE_CACHE_PATH", "POPDIST_HEARTBEAT"),
    *("POPDIST_JOB_FOLDER", "POPDIST_MEETING_PORT", "POPDIST_MEMORY_CHECKPOINTS"),
    "POPDIST_MPI_NETWORK",
    *("POPDIST_LOCAL_INSTANCE_INDEX", "POPDIST_NODE_DEVICE_ID", "POPDIST_NUM_IPUS_PER_REPLICA"),
    *("POPDIST_NUM_LOCAL_INSTANCES", "POPDIST_NUM_LOCAL_REPLICAS", "POPDIST_NUM_TOTAL_REPLICAS"),
    *("POPDIST_REPLICA_INDEX_OFFSET", "POPDIST_RESTART_COUNT", "POPDIST_RUN_FILES"),
    *(
        "POPDIST_SDK_COMMAND",
        "POPDIST_SDK_NAMES",
        "POPDIST_SECRET",
        "POPDIST_STACKS",
        "POPDIST_TIMELINE",
        "POPDIST_TORCH_BACKEND",
    ),
    *("POPDIST_UNIFORM_REPLICAS_PER_INSTANCE", "POPLAR_TARGET_OPTIONS"),
)
