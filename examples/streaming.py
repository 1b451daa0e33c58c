"""Several answers at the same time, each printed as it is generated."""

import asyncio

from quire_client import AsyncClient, Delta, Sample


async def show(client: AsyncClient, question: str) -> None:
    text = ""
    async with client.stream_chat(question, temperature=0) as stream:
        async for event in stream.events():
            match event:
                case Delta(text=new):
                    text += new
                case Sample(finish_reason=reason, usage=usage):
                    print(f"{question}\n  {text}\n  [{reason.value}, {usage.output_tokens} tokens]")


async def main() -> None:
    async with AsyncClient() as client:
        await asyncio.gather(*(show(client, f"What does {name} do?") for name in ("len", "zip", "json.dumps")))


asyncio.run(main())
