"""Trains a ResNet50 on images of noise: torch_resnet.py SECONDS BATCH [DEVICE]. Says one JSON line when it is
warm, and one at the end: when each step ended (nanoseconds of CLOCK_MONOTONIC), and how many images until then."""

import json
import sys
import time

import torch
from torch import nn

SECONDS, BATCH = float(sys.argv[1]), int(sys.argv[2])
DEVICE = torch.device(sys.argv[3] if len(sys.argv) > 3 else "cuda:0")
WARM_STEPS = 3
PRECISION = torch.float16 if DEVICE.type == "cuda" else torch.bfloat16

# He and others, "Deep Residual Learning for Image Recognition", table 1: blocks of each stage, and its width.
STAGES = [(3, 64), (4, 128), (6, 256), (3, 512)]
EXPANSION = 4
CLASSES = 1000


def convolution(inputs, outputs, size, stride=1):
    padding = size // 2
    layer = nn.Conv2d(inputs, outputs, size, stride=stride, padding=padding, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = width * EXPANSION
        self.way = nn.Sequential(
            convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            convolution(width, outputs, 1),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else convolution(inputs, outputs, 1, stride)

    def forward(self, images):
        return torch.relu(self.way(images) + self.shortcut(images))


def resnet50():
    layers = [convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for number, (blocks, width) in enumerate(STAGES):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, 2 if number and not block else 1))
            inputs = width * EXPANSION
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


def main():
    torch.manual_seed(1)
    network = resnet50().to(DEVICE)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()
    images = torch.randn(BATCH, 3, 224, 224, device=DEVICE)
    labels = torch.randint(0, CLASSES, (BATCH,), device=DEVICE)

    def step():
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, dtype=PRECISION):
            loss = loss_of(network(images), labels)
        loss.backward()
        optimizer.step()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(WARM_STEPS):
        step()
    print(json.dumps({"computing": BATCH}), flush=True)
    begun, seen, ticks = time.monotonic(), 0, []
    while time.monotonic() - begun < SECONDS:
        step()
        seen += BATCH
        ticks.append([time.monotonic_ns(), seen])
    print(json.dumps({"ticks": ticks, "torch": torch.__version__}), flush=True)


main()
