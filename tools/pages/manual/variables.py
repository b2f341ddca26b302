"""The environment variables that users may set, without the variables of options.

A second list names the variables that the processes of a job set for each other. A test checks that
each variable in the code is in one of the lists.
"""

from __future__ import annotations

__all__ = ["INTERNAL", "VARIABLES"]

# Where it counts -> variable -> meaning.
VARIABLES: dict[str, dict[str, str]] = {
    "The launcher": {
        "POPRUN_LOG_LEVEL": "Log level of the launcher. `DEBUG` and `TRACE` mean `-vv`. `INFO` "
        "means `-v`.",
        "POPRUN_LEASES": "Folder of the files that record which job uses which cores. The value "
        "`none` switches these records off.",
        "POPRUN_PODS": "Folder that contains the pods. The default is "
        "`~/.local/state/poprun-py/pods`.",
        "POPRUN_POD_TOKEN_FILE": "File with the access token for a pod's server.",
        "IPUOF_VIPU_API_PARTITION_ID": "Name of the partition that a job, `gc-info` or "
        "`gc-monitor` uses.",
        "IPUOF_VIPU_API_HOST": "Host of the V-IPU server that `--pod server` uses. The default is "
        "`localhost`.",
        "IPUOF_VIPU_API_PORT": "Port of the V-IPU server that `--pod server` uses. The default is "
        "8090.",
        "IPUOF_LOG_LEVEL": "The launcher passes `IPUOF_LOG_LEVEL` to the instances. poprun-py does "
        "not read this variable.",
        "VIPU_CLI_API_HOST": "Host of the pod's server that `poprun-py-pod` contacts.",
        "VIPU_CLI_API_PORT": "Port of the pod's server that `poprun-py-pod` contacts.",
    },
    "Instances: collectives": {
        "POPDIST_HANG_TIMEOUT": (
            "Time in seconds that a collective waits for another instance. The value 0 means no "
            "limit. The default is 300."
        ),
        "POPDIST_DETERMINISTIC": (
            "The value 1 switches `Options.Emulator.deterministicReduction` on by default. With "
            "the value 1, reductions of floats also have the same bits on any hosts."
        ),
        "POPDIST_GRADIENT_OVERLAP": (
            "The value 1 reduces gradients during the backward pass. The value 0 reduces gradients "
            "after the backward pass. By default, a job on several hosts measures both ways in its "
            "first steps, and uses the faster way."
        ),
        "POPDIST_SHARED_MEMORY": (
            "The value 0 makes collectives use MPI between instances of one host, too, instead of "
            "shared memory."
        ),
        "POPDIST_SHARED_WEIGHTS": (
            "The value 0 makes every instance store and update all weights itself."
        ),
        "POPDIST_SEPARATE_MODELS": (
            "The value 1 switches off the warning about instances that train separate models."
        ),
        "POPDIST_NETWORK": (
            "Network interface, or subnet in CIDR notation, for the traffic between hosts."
        ),
    },
    "Instances: observation": {
        "POPDIST_COUNT_STEPS": (
            "The value `no` switches off the counting of the steps of torch's optimizers, and the "
            "observation of training loops."
        ),
    },
    "Instances: PopTorch": {
        "POPTORCH_LOG_LEVEL": "Log level of `poptorch`. The default is `WARN`.",
        "POPTORCH_CACHE_DIR": "Folder that stores compiled executables.",
        "POPTORCH_DEFAULT_OPTIONS": "Options of every `poptorch.Options()`, as a JSON object.",
        "POPTORCH_IPU_MODEL": (
            "The value 1 emulates the memory and the time of an IPU, as `useIpuModel(True)` does."
        ),
        "POPTORCH_IPU_MODEL_VERSION": (
            "IPU that `useIpuModel(True)` and `POPTORCH_IPU_MODEL` emulate: `ipu1`, `ipu2` or "
            "`ipu21`."
        ),
        "POPTORCH_WAIT_FOR_IPU": (
            "The value 1 makes a model wait for IPUs that another process uses."
        ),
        "POPDIST_IPU": (
            "IPU whose memory and speed are emulated for all models: `mk1`, `mk2` or `bow`."
        ),
        "POPDIST_IPU_MEMORY": (
            "Reaction to a model that is too large for the IPU's memory: `enforce` raises an "
            "error, `warn` logs a warning, and `off` does not check the memory."
        ),
        "POPLAR_ENGINE_OPTIONS": (
            "JSON object of engine options. Options `autoReport.*` write profiles, and "
            "`debug.floatPointOpException` raises an error at an overflow. A warning names the "
            "options that have no effect."
        ),
        "PVTI_OPTIONS": (
            "JSON object. The keys `enable` and `directory` record a timeline of the process."
        ),
        "IPUOF_VIPU_API_GCD_ID": (
            "Index of the GCD that the process uses, for a partition with several GCDs."
        ),
        "IPUOF_VIPU_API_TIMEOUT": (
            "Time limit of a request to a pod's server, in seconds. The default is 120."
        ),
    },
    "Without effect, with a warning": {
        "IPUOF_CONFIG_PATH": "Use `IPUOF_VIPU_API_PARTITION_ID` to name a partition.",
        "POPART_CACHE_DIR": "Use `POPTORCH_CACHE_DIR` to store compiled executables.",
        "POPART_LOG_LEVEL": "Use `POPTORCH_LOG_LEVEL` to set the log level.",
        "POPLAR_LOG_LEVEL": "Use `POPTORCH_LOG_LEVEL` to set the log level.",
        "POPLAR_RUNTIME_OPTIONS": "The options in `POPLAR_RUNTIME_OPTIONS` affect only real IPUs.",
        "POPLIBS_LOG_LEVEL": "Use `POPTORCH_LOG_LEVEL` to set the log level.",
        "TF_POPLAR_FLAGS": "`TF_POPLAR_FLAGS` is for TensorFlow. Models are written in PyTorch.",
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
