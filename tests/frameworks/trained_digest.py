"""What a rank of a training program says at its end, in one line of JSON."""

import hashlib
import json
import sys

import torch.distributed as dist


def print_digest(model, backend=None):
    """Print rank, back end and a digest of the parameters, bit by bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    found = {
        "rank": dist.get_rank(),
        "backend": backend or dist.get_backend(),
        "digest": digest.hexdigest(),
    }
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
