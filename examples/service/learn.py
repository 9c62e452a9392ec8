"""Learn a pattern on a service, with the client of Tinker: python learn.py outputs/service/tokens.json [USER]."""

import json
import sys
from pathlib import Path

import numpy as np
import tinker
from tinker import types

tokens = json.loads(Path(sys.argv[1]).read_text())
user = sys.argv[2] if len(sys.argv) > 2 else "alice"
address = {"base_url": "http://127.0.0.1:8700", "api_key": tokens[user]}

[model] = tinker.RestClient(**address).get_server_capabilities().result().supported_models
with tinker.ServiceClient(**address) as client:
    assert model.model_name is not None
    training = client.create_lora_training_client(base_model=model.model_name, rank=8).result()
    pattern = [20, 21, 22] * 5
    targets, weights = np.array(pattern[1:]), np.ones(len(pattern) - 1, np.float32)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(pattern[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(targets),
            "weights": types.TensorData.from_numpy(weights),
        },
    )
    for step in range(30):
        passed = training.forward_backward([datum], "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
        print(step, passed.result().metrics["loss:sum"])
        stepped.result()
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(pattern[:4])
    sampled = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=8, temperature=0.0)).result()
    print(sampled.sequences[0].tokens)
