"""One process gives PyTorch's memory to another by CUDA's IPC: torch_ipc.py MIB. One JSON line."""

import json
import sys

import torch
import torch.multiprocessing as processes

ONES = 0x0101010101010101


def other(gets, says):
    tensor = gets.get()
    # Without a copy of it, of which a sum of bytes would make a larger one.
    least, most = (int(of.item()) for of in tensor.view(torch.int64).aminmax())
    says.put((tensor.is_cuda, least == most == ONES, torch.cuda.mem_get_info()))
    del tensor


if __name__ == "__main__":
    count = int(sys.argv[1]) << 20
    context = processes.get_context("spawn")
    gets, says = context.Queue(), context.Queue()
    child = context.Process(target=other, args=(gets, says))
    child.start()
    tensor = torch.ones(count, dtype=torch.uint8, device="cuda:0")
    before = torch.cuda.mem_get_info()[0]
    gets.put(tensor)
    on_gpu, same, (free, of) = says.get(timeout=50)
    child.join(20)
    said = {"on_gpu": on_gpu, "same": same, "free_before": before, "free_at_other": free}
    print(json.dumps({**said, "total": of, "exit": child.exitcode}), flush=True)
