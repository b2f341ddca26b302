POPLAR_ENGINE_OPTIONS='{"target.hostSyncTimeout": "3000", "target.deterministicWorkers":"portable", "opt.enableMultiAccessCopies":"false"}' \
poprun -v --host xxx.xxx.xxx.1,xxx.xxx.xxx.2,xxx.xxx.xxx.3,xxx.xxx.xxx.4 --numa-aware=yes --vipu-server-host=xxx.xxx.xxx.xxx \
--vipu-partition=pod64_partition_name --reset-partition=no --update-partition=yes --mpi-global-args="--tag-output \
--mca btl_tcp_if_include xxx.xxx.xxx.0/16 --mca oob_tcp_if_include xxx.xxx.xxx.0/16" --mpi-local-args="-x LD_LIBRARY_PATH -x PATH -x PYTHONPATH \
-x TF_CPP_VMODULE=poplar_compiler=1 -x IPUOF_VIPU_API_TIMEOUT=300 -x TF_POPLAR_FLAGS=--executable_cache_path=$WORKSPACE/exec_cache -x POPLAR_ENGINE_OPTIONS" \
--num-replicas=64 --num-instances=32 --ipus-per-replica 1 python3 $WORKSPACE/examples/applications/tensorflow/cnns/training/train.py --config mk2_resnet50_mlperf_pod64_lars --data-dir your_dataset_path
