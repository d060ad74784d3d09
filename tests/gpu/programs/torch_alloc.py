"""Takes memory by PyTorch's allocator until it is refused: torch_alloc.py MOST_MIB. One JSON line."""

import json
import sys

import torch

STEP_MIB = 64
most = int(sys.argv[1])
device = torch.device("cuda:0")
torch.zeros(1, device=device)
free, total = torch.cuda.mem_get_info()
said = {
    "total_mib": total >> 20,
    "free_mib": free >> 20,
    "properties_total_mib": torch.cuda.get_device_properties(0).total_memory >> 20,
    "torch": torch.__version__,
}
held, refusal, message = [], None, ""
while (len(held) + 1) * STEP_MIB <= most:
    try:
        held.append(torch.empty(STEP_MIB << 20, dtype=torch.uint8, device=device))
    except RuntimeError as error:  # OutOfMemoryError is one
        refusal, message = type(error).__name__, str(error)[:400]
        break
said.update(got_mib=len(held) * STEP_MIB, refusal=refusal, message=message, goes_on=False)
try:
    held.clear()
    torch.cuda.empty_cache()
    a = torch.randn(1024, 1024, device=device)
    said["goes_on"] = bool(torch.isfinite((a @ a).sum()).item())
    said["free_after_mib"] = torch.cuda.mem_get_info()[0] >> 20
finally:
    print(json.dumps(said), flush=True)
