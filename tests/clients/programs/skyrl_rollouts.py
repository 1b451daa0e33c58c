"""SkyRL's client of inference servers: samples by token ids, pauses, sleep, an update of the weights from a file."""

import asyncio
import importlib.util
import shutil
import sys
from collections.abc import Awaitable
from pathlib import Path

if sys.version_info < (3, 12) or importlib.util.find_spec("skyrl") is None:
    print("SkyRL 0.3 needs Python 3.12, and is not in requirements.txt, which is for 3.11: install skyrl==0.3.0")
    sys.exit(77)

import aiohttp
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import PauseMode, RemoteInferenceClient

url, model, checkpoint, weights_dir = sys.argv[1:]
PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]


class FromFiles:
    """SkyRL's interface for a kind of transfer."""

    def for_servers(self, world_size: int, num_servers: int, dp_size: int) -> list["FromFiles"]:
        return [self] * num_servers

    def to_api_payload(self) -> dict[str, str]:
        return {"backend": "files"}


async def call(path: str, body: dict) -> int:
    async with aiohttp.ClientSession() as session, session.post(f"{url}{path}", json=body) as answer:
        return answer.status


async def refusal(call: Awaitable[object]) -> int:
    """The status with which a call is refused."""
    try:
        await call
    except aiohttp.ClientResponseError as error:
        return error.status
    return 200


async def sampled(client: RemoteInferenceClient) -> list[list[int]]:
    asked = {"prompt_token_ids": PROMPTS, "sampling_params": {"max_tokens": 30, "seed": 1, "logprobs": 0}}
    found = await client.generate({**asked, "session_ids": ["a", "b"]}, model=model)
    assert [len(values) for values in found["response_logprobs"]] == [len(ids) for ids in found["response_ids"]]
    return found["response_ids"]


async def main() -> None:
    async with RemoteInferenceClient(
        proxy_url=url, server_urls=[url], data_parallel_size=1, model_name=model
    ) as client:
        assert await client.get_world_size() == (1, 1)
        before = await sampled(client)
        for mode in PauseMode:
            await client.pause(mode, clear_cache=True)
            await client.resume()
        await client.sleep(level=2, tags=["kv_cache"])
        await client.wake_up(tags=["kv_cache"])
        await client.reset_prefix_cache(reset_running_requests=True)
        await client.init_weight_update_communicator(FromFiles())
        shutil.copy(Path(checkpoint) / "model.safetensors", Path(weights_dir) / "skyrl.safetensors")
        await client.pause_generation()
        assert await call("/start_weight_update", {}) == 200
        await client.update_named_weights({"path": "skyrl.safetensors"})
        assert await call("/finish_weight_update", {}) == 200
        await client.resume_generation()
        assert await sampled(client) == before, "the same weights"
        assert await refusal(client.update_named_weights({"names": ["a"]})) == 400
        assert await refusal(client.finish_weight_update()) == 404, "/collective_rpc"


asyncio.run(main())
