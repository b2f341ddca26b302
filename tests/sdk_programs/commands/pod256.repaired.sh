POPLAR_ENGINE_OPTIONS='{"target.hostSyncTimeout": "3000", "target.deterministicWorkers":"portable", "opt.enableMultiAccessCopies":"false"}' poprun -v --host \
xxx.xxx.1.1,xxx.xxx.1.2,xxx.xxx.1.3,xxx.xxx.1.4,xxx.xxx.2.1,xxx.xxx.2.2,xxx.xxx.2.3,xxx.xxx.2.4,\
xxx.xxx.3.1,xxx.xxx.3.2,xxx.xxx.3.3,xxx.xxx.3.4,xxx.xxx.4.1,xxx.xxx.4.2,xxx.xxx.4.3,xxx.xxx.4.4 \
--numa-aware=yes --vipu-server-host=xxx.xxx.xxx.xxx --vipu-server-timeout=300 --vipu-partition=pod128_partition_name \
--vipu-cluster=pod128_cluster_name --reset-partition=no --update-partition=yes --mpi-global-args="--tag-output \
--allow-run-as-root --mca oob_tcp_if_include xxx.xxx.0.0/16 --mca btl_tcp_if_include xxx.xxx.0.0/16" \
--mpi-local-args="-x LD_LIBRARY_PATH -x TF_CPP_VMODULE=poplar_compiler=1 -x PATH -x PYTHONPATH \
-x IPUOF_VIPU_API_TIMEOUT=600 -x POPLAR_ENGINE_OPTIONS -x TF_POPLAR_FLAGS" --ipus-per-replica 1 --num-replicas=256 --num-instances=128 \
python3 train.py --config mk2_resnet50_mlperf_pod256_lars --data-dir your_dataset_path
