"""Triton's client: health, metadata, whole and streamed answers, several at once, errors. Usage: ... ADDRESS MODEL"""

import asyncio
import queue
import sys

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

address, model = sys.argv[1:]
PROMPTS = ["What does os.path.join do?", "import os", "def main():"]
PARAMETERS = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


def text_input(text, **others):
    tensors = {"text_input": (np.array([text.encode()], dtype=np.object_), "BYTES")}
    tensors |= {name: (np.array([value]), "BOOL") for name, value in others.items()}
    found = []
    for name, (data, kind) in tensors.items():
        found.append(triton.InferInput(name, [1], kind))
        found[-1].set_data_from_numpy(data)
    return found


def text_of(result):
    output = result.as_numpy("text_output")
    return "" if output is None or not output.size else output.reshape(-1)[0].decode()


def is_final(result):
    return result.get_response().parameters["triton_final_response"].bool_param


client = triton.InferenceServerClient(address)
assert client.is_server_live()
assert client.is_server_ready()
assert client.is_model_ready(model)
assert not client.is_model_ready("no such model")
assert {"text_input", "sampling_parameters"} <= {one.name for one in client.get_model_metadata(model).inputs}

whole = {text: text_of(client.infer(model, text_input(text), parameters=PARAMETERS)) for text in PROMPTS}
assert all(whole.values()), whole
counted = client.infer(model, text_input(PROMPTS[0], return_num_output_tokens=True), parameters=PARAMETERS)
assert counted.as_numpy("num_output_tokens").reshape(-1)[0] == 12

answers = queue.Queue()
client.start_stream(lambda result, error: answers.put((result, error)))
for text in PROMPTS:
    client.async_stream_infer(
        model, text_input(text, stream=True), request_id=text, enable_empty_final_response=True, parameters=PARAMETERS
    )
parts, open_requests = {text: [] for text in PROMPTS}, set(PROMPTS)
while open_requests:
    result, error = answers.get(timeout=60)
    assert error is None, error
    request_id = result.get_response().id
    parts[request_id].append(text_of(result))
    if is_final(result):
        open_requests.remove(request_id)
assert {text: "".join(found) for text, found in parts.items()} == whole
assert all(len(found) > 2 for found in parts.values()), "the answers are streamed"

client.async_stream_infer(model, text_input("x"), request_id="bad", parameters={"max_tokens": 10_000_000})
result, error = answers.get(timeout=60)
assert isinstance(error, InferenceServerException), result
assert "max_tokens" in str(error), error
client.async_stream_infer(model, text_input(PROMPTS[0]), request_id="good", parameters=PARAMETERS)
result, error = answers.get(timeout=60)
assert error is None, error
assert text_of(result) == whole[PROMPTS[0]], "an error ends no other request"
client.stop_stream()
status = "OK"
try:
    client.infer("no such model", text_input("x"))
except InferenceServerException as caught:
    status = caught.status()
assert "NOT_FOUND" in status, status


async def streamed():
    async def one_request():
        yield {
            "model_name": model, "inputs": text_input(PROMPTS[1], stream=True), "request_id": "aio",
            "enable_empty_final_response": True, "parameters": PARAMETERS,
        }  # fmt: skip

    found = []
    async with triton_aio.InferenceServerClient(address) as client:
        async for result, error in client.stream_infer(one_request()):
            assert error is None, error
            found.append(text_of(result))
            if is_final(result):
                break
    return "".join(found)


assert asyncio.run(streamed()) == whole[PROMPTS[1]]
