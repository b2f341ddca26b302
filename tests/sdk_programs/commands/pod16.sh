POPLAR_ENGINE_OPTIONS='{"opt.enableMultiAccessCopies":"false"}' poprun -vv --mpi-global-args='--tag-output --allow-run-as-root' \
--mpi-local-args='-x POPLAR_ENGINE_OPTIONS' --ipus-per-replica 1 --numa-aware 1 \
--num-instances 8 --num-replicas 16 python train.py --config mk2_resnet50_mlperf_pod16_bs20 \
--data-dir your_dataset_path
