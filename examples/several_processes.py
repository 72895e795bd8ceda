"""Several processes with DistributedDataParallel or, with --shard, FSDP2. On one machine without GPUs:

torchrun --nproc-per-node 2 examples/several_processes.py
torchrun --nproc-per-node 2 examples/several_processes.py --shard
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import hesscale

dist.init_process_group()
rank, count = dist.get_rank(), dist.get_world_size()
if torch.cuda.is_available():
    torch.set_default_device(f"cuda:{rank % torch.cuda.device_count()}")

torch.manual_seed(0)  # the same data and network in every process
x = torch.randn(512, 8)
y = x[:, :4].argmax(1)
model: nn.Module = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
if "--shard" in sys.argv:
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
else:
    model = nn.parallel.DistributedDataParallel(model)

optimizer = hesscale.AdaHesScale(model.parameters(), lr=1e-2)
if isinstance(model, nn.parallel.DistributedDataParallel):  # sharded parameters need no line
    hesscale.distributed.synchronize(optimizer, model)

for _ in range(15):
    for batch in torch.randperm(len(x)).split(64):
        mine = batch[rank::count]
        optimizer.zero_grad()
        optimizer.backward(F.cross_entropy(model(x[mine]), y[mine]))
        optimizer.step()

accuracy = (model(x).argmax(1) == y).float().mean().item()
if rank == 0:
    print(f"accuracy {accuracy:.3f}")
dist.barrier()
dist.destroy_process_group()
