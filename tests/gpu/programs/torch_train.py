"""Trains a small network for so many seconds: torch_train.py SECONDS. Says "begun" when it is warm, and
one JSON line at the end."""

import json
import sys
import time

begun = time.monotonic()
import torch  # noqa: E402  (the import is what is timed)
from torch import nn  # noqa: E402

imported = time.monotonic()
seconds = float(sys.argv[1])
device = torch.device("cuda:0")
torch.manual_seed(1)
torch.zeros(1, device=device)
torch.cuda.synchronize()
context = time.monotonic()
network = nn.Sequential(nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10))
network.to(device)
optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
loss_of = nn.CrossEntropyLoss()
data = torch.randn(1024, 2048, device=device)
target = torch.randint(0, 10, (1024,), device=device)


def step():
    optimizer.zero_grad()
    loss = loss_of(network(data), target)
    loss.backward()
    optimizer.step()


step()
torch.cuda.synchronize()
first = time.monotonic()
for _ in range(50):
    step()
torch.cuda.synchronize()
print("begun", flush=True)
start, steps = time.monotonic(), 0
while time.monotonic() - start < seconds:
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    steps += 20
took = time.monotonic() - start
print(
    json.dumps(
        {
            "steps": steps,
            "steps_per_s": steps / took,
            "start_s": first - begun,
            "import_s": imported - begun,
            "context_s": context - imported,
            "torch": torch.__version__,
        }
    ),
    flush=True,
)
