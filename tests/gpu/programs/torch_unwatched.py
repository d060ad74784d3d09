"""What a PyTorch program meets that loses its monitor: torch_unwatched.py. It says "begun" when it computes, and one
JSON line when its input has ended."""

import json
import sys

import torch

device = torch.device("cuda:0")
a = torch.randn(4096, 4096, device=device)
b = torch.empty_like(a)
torch.mm(a, a, out=b)
torch.cuda.synchronize()
print("begun", flush=True)
sys.stdin.read()
said = {}


def trial(name, work):
    """What becomes of a piece of work."""
    try:
        said[name] = work()
    except Exception as error:  # whatever it is, it is what is asked for
        said[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"


def computes():
    torch.mm(a, a, out=b)
    torch.cuda.synchronize()
    return "computes"


def allocates():
    torch.empty(256 << 20, dtype=torch.uint8, device=device)
    return "given"


trial("kernels", computes)
trial("memory", allocates)
trial("kernels_after", computes)
trial("free_mib", lambda: torch.cuda.mem_get_info()[0] >> 20)
print(json.dumps(said), flush=True)
