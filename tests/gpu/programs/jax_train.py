"""Trains a small network with JAX for so many seconds: jax_train.py SECONDS. One JSON line at the end.

JAX takes three quarters of the GPU when it starts, unless XLA_PYTHON_CLIENT_PREALLOCATE says otherwise.
"""

import json
import sys
import time

import jax
import jax.numpy as jnp

seconds = float(sys.argv[1])
keys = jax.random.split(jax.random.PRNGKey(1), 3)
weights = [jax.random.normal(keys[0], (1024, 2048)) * 0.02, jax.random.normal(keys[1], (2048, 10)) * 0.02]
data, target = jax.random.normal(keys[2], (512, 1024)), jnp.zeros((512, 10))


def loss(weights):
    return jnp.mean((jax.nn.relu(data @ weights[0]) @ weights[1] - target) ** 2)


@jax.jit
def step(weights):
    return [weight - 0.01 * slope for weight, slope in zip(weights, jax.grad(loss)(weights))]


weights = jax.block_until_ready(step(weights))
start, steps = time.monotonic(), 0
while time.monotonic() - start < seconds:
    for _ in range(20):
        weights = step(weights)
    jax.block_until_ready(weights)
    steps += 20
took = time.monotonic() - start
memory = jax.devices()[0].memory_stats() or {}
limit = memory.get("bytes_limit", 0)
print(json.dumps({"steps": steps, "steps_per_s": steps / took, "limit": limit, "jax": jax.__version__}), flush=True)
