"""The client of trl's asynchronous GRPO: facts, pause, an update of the weights from a file, adapters."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
import requests
from accelerate import PartialState
from trl.experimental.async_grpo.vllm_client import VLLMClient

url, model, checkpoint, weights_dir = sys.argv[1:]
PartialState()
client = VLLMClient(url)
client.wait_for_server_ready()
assert client.get_max_model_len() > 100
assert client.get_dtype() == "torch.float32"
assert client.get_world_size() == 1
assert client.get_server_info()["model_config"]["logprobs_mode"] == "raw_logprobs"

version = requests.get(f"{url}/weight_info").json()["weight_version"]
shutil.copy(Path(checkpoint) / "model.safetensors", Path(weights_dir) / "trl.safetensors")
client.init_weight_transfer_engine({"backend": "files"})
client.pause()
client.start_weight_update()
client.update_weights({"path": "trl.safetensors"})
client.finish_weight_update()
client.resume()
assert requests.get(f"{url}/weight_info").json()["weight_version"] == version + 1


def refusal(call: Callable[[], None]) -> str:
    """The words with which the client fails."""
    try:
        call()
    except Exception as error:  # the client raises no other class
        return str(error)
    return "accepted"


for call in (
    lambda: client.init_weight_transfer_engine({"master_address": "127.0.0.1", "master_port": 1}),
    lambda: client.update_weights({"path": "trl.safetensors"}),
    lambda: client.load_lora_adapter("a", "missing"),
):
    words = refusal(call)
    assert "400" in words or "503" in words, words
client.unload_lora_adapter("a")
