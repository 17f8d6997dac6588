"""Base and adapters answering the same prompts in one concurrent burst, as a transcript.

python -m benchmarks.burst URL          # a running `make serve`
"""

from __future__ import annotations

import asyncio
import sys

import httpx

PROMPTS = ("What is 23 + 48?", "What colour is a banana?", "Tell me a story about a fox.")


async def burst(url: str) -> str:
    """All prompts to all models at the same moment; returns a Markdown table."""
    async with httpx.AsyncClient(base_url=url.removesuffix("/v1"), timeout=120) as http:
        models = [m["id"] for m in (await http.get("/v1/models")).json()["data"]]

        async def ask(model: str, prompt: str) -> str:
            body = {"model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
            reply = await http.post("/v1/chat/completions", json=body)
            reply.raise_for_status()
            return str(reply.json()["choices"][0]["message"]["content"])

        answers = await asyncio.gather(*(ask(m, p) for p in PROMPTS for m in models))
    rows = [
        f"| {p} | " + " | ".join(answers[i * len(models) : (i + 1) * len(models)]) + " |" for i, p in enumerate(PROMPTS)
    ]
    return "\n".join(["| prompt | " + " | ".join(models) + " |", "|---" * (len(models) + 1) + "|", *rows])


if __name__ == "__main__":
    print(asyncio.run(burst(sys.argv[1])))
