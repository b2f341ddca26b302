python main.py --batch-size 64 --precision 32.32 --gradient-accumulation 3 --epochs 1
python main.py --batch-size 64 --precision 16.16 --gradient-accumulation 3
python main.py --batch-size 64 --precision 16.16 --gradient-accumulation 8
python main.py --batch-size 64 --precision 16.16 --gradient-accumulation 8 --device-iteration 4
python main.py --batch-size 64 --precision 16.16 --gradient-accumulation 8 \
    --device-iteration 4 --eight-bit-io
python main.py --batch-size 64 --precision 16.16 --gradient-accumulation 8 \
    --device-iteration 4 --eight-bit-io --async-dataloader
