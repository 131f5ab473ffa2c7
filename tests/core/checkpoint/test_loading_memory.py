"""A model is read through its mapped files: beside what it becomes, one group of tensors is in memory at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from random_pairs import write_random_pair
from safetensors.torch import load_file, save_file

pytestmark = [pytest.mark.reference, pytest.mark.slow]

WEIGHTS = "model.safetensors"
# Private pages alone: those of the mapped file are the system's, which may drop them at any time.
MEASURED = """
import sys, threading
from pathlib import Path
import torch
from eagle3core.checkpoint import load_target
from eagle3core.weights import pack_checkpoints

def private():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

peak, done = [0], threading.Event()
def watch():
    while not done.is_set():
        peak[0] = max(peak[0], private())
        done.wait(0.0005)

torch.set_num_threads(1)
load_target(sys.argv[1], dtype=torch.float32, casts=False)  # what the first use of a library takes is not a model's
before = private()
watcher = threading.Thread(target=watch)
watcher.start()
checkpoint = load_target(sys.argv[1], dtype=torch.float32, casts=False)
read = peak[0] - before
packed, _ = pack_checkpoints(checkpoint, None, device=torch.device("cpu"), block=64, packs=False)
done.set()
watcher.join()
own = sum(tensor.numel() * tensor.element_size() for tensor in packed.own_tensors())
print(read, peak[0] - before, own, max(t.numel() * t.element_size() for t in packed.own_tensors()))
"""


def split_into(n: int, target: Path) -> None:
    """The target's one file as `n` shards with an index."""
    weights, index = load_file(target / WEIGHTS), target / f"{WEIGHTS}.index.json"
    shards = {name: f"model-{i % n + 1:05}-of-{n:05}.safetensors" for i, name in enumerate(sorted(weights))}
    for shard in set(shards.values()):
        save_file({name: weights[name] for name in weights if shards[name] == shard}, target / shard)
    (target / WEIGHTS).unlink()
    index.write_text(json.dumps({"weight_map": shards}))


@pytest.mark.parametrize("n_shards", [1, 3])
def test_reading_takes_one_group_of_tensors_beside_the_model(tmp_path: Path, n_shards: int) -> None:
    target, _ = write_random_pair(
        tmp_path, n_layers=3, hidden=512, ffn=8192, vocab=64, draft_vocab=None, taps=(0, 1), dtype=torch.bfloat16
    )
    if n_shards > 1:
        split_into(n_shards, target)
    # What is freed goes back to the system at once: by itself the allocator keeps some, how much depends on the moment.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(target)], capture_output=True, text=True, check=True, env=environment
    )
    read, peak, model, largest = map(int, done.stdout.split())
    assert largest == 2 * 8192 * 512 * 4, "gate and up of a layer, cast to fp32"
    assert read <= 0.5 * largest, "until they are packed, weights are pages of their files"
    assert peak - model <= 1.2 * largest
