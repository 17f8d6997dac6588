"""Several jobs on their way to one child: one that is cut off, or that nobody waits for any more, ends alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from api.errors import ApiError
from api.prepare.job import Job, Kind, Prepared, TextSettings
from api.prepare.pool import PromptPool
from api.prepare.prompts import unpacked
from testing.waiting import PATIENCE_S
from tests.api.conftest import TEMPLATE
from tests.api.hostile import HOSTILE, chat, message

JOB = Job(Kind.CHAT, 1000, 4096)
ENDLESS = chat(message('"loops"'))


@contextlib.asynccontextmanager
async def pool(model_dir: Path, folder: Path, cpu_limit_s: float) -> AsyncIterator[PromptPool]:
    template = folder / "template.jinja"
    loops = "{% if messages[0].content == 'loops' %}" + HOSTILE["loops"] + "{% endif %}"
    template.write_text(loops + TEMPLATE)
    made = PromptPool(TextSettings(str(model_dir), chat_template=str(template), cpu_limit_s=cpu_limit_s))
    try:
        await made.start()
        yield made
    finally:
        await made.close()


def asked(made: PromptPool, length: int) -> asyncio.Task[Prepared]:
    """A prompt whose tokens tell its length."""
    return asyncio.create_task(made.prepare(JOB, chat(message(f'"{"ab" * length}"'))))


def test_a_job_that_is_cut_off_is_the_only_one(model_dir: Path, tmp_path: Path) -> None:
    async def test() -> None:
        async with pool(model_dir, tmp_path, 1.0) as made:
            base = len(unpacked((await asked(made, 0)).prompts[0]))
            before = [asked(made, length) for length in range(5)]
            endless = asyncio.create_task(made.prepare(JOB, ENDLESS))
            after = [asked(made, length) for length in range(100)]
            with pytest.raises(ApiError) as caught:
                await endless
            assert caught.value.code == "prompt_too_expensive"
            for tasks in (before, after):
                lengths = [len(unpacked(prepared.prompts[0])) - base for prepared in await asyncio.gather(*tasks)]
                assert lengths == [2 * length for length in range(len(tasks))]

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


@pytest.mark.parametrize(
    "greeted", ["hello", HOSTILE["loops"], "{{ raise_exception('no') }}"], ids=["ok", "loops", "no"]
)
def test_a_child_waits_for_the_first_job(model_dir: Path, tmp_path: Path, greeted: str) -> None:
    """Whatever the template makes of the greeting that it is tried with."""

    async def test() -> None:
        template = tmp_path / "template.jinja"
        template.write_text("{% if messages[0].content == 'Hello' %}" + greeted + "{% endif %}" + TEMPLATE)
        made = PromptPool(TextSettings(str(model_dir), chat_template=str(template), cpu_limit_s=1.0))
        try:
            await made.start()
            await made.warm()
            child = made._small._child
            assert child is not None and child.ended == (greeted == HOSTILE["loops"])
            assert (await asked(made, 1)).prompts
            assert child.ended or made._small._child is child
        finally:
            await made.close()

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_how_many_tokens_open_the_answer(model_dir: Path, tmp_path: Path) -> None:
    """They are what a template adds behind the last message; not known of a prompt whose end is cut off."""

    async def test() -> None:
        wanted = msgspec.structs.replace(JOB, keeps_states=True)
        closed, cut = {"add_generation_prompt": False}, {"truncate_prompt_tokens": 3, "truncation_side": "right"}
        async with pool(model_dir, tmp_path, 10.0) as made:

            async def prepared(job: Job, **fields: object) -> Prepared:
                return await made.prepare(job, json.dumps(json.loads(chat(message('"hi"'))) | fields).encode())

            whole, message_alone = await prepared(wanted), await prepared(wanted, **closed)
            added = len(unpacked(whole.prompts[0])) - len(unpacked(message_alone.prompts[0]))
            assert whole.opening_tokens == added > 0
            others = [message_alone, await prepared(JOB), await prepared(wanted, **cut)]
            assert [each.opening_tokens for each in others] == [None] * 3

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_how_many_tokens_chats_behind_a_system_message_share(model_dir: Path, tmp_path: Path) -> None:
    """Not known of a prompt whose beginning is cut off."""

    async def test() -> None:
        wanted = msgspec.structs.replace(JOB, keeps_states=True)
        left, right = ({"truncate_prompt_tokens": 12, "truncation_side": side} for side in ("left", "right"))
        async with pool(model_dir, tmp_path, 10.0) as made:

            async def prepared(job: Job, said: str = "hi", **fields: object) -> Prepared:
                messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": said}]
                return await made.prepare(job, json.dumps({"messages": messages, **fields}).encode())

            one, other = await prepared(wanted), await prepared(wanted, "\n\n<|im_end|>")
            assert 20 <= one.system_tokens < len(unpacked(one.prompts[0])) - 4
            shared = unpacked(one.prompts[0])[: other.system_tokens]
            assert len(shared) >= 20 and shared == unpacked(other.prompts[0])[: other.system_tokens]
            cut = [await prepared(wanted, **fields) for fields in (left, right)]
            assert [each.system_tokens for each in (await prepared(JOB), *cut)] == [0, 0, 12]

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_where_parts_of_a_prompt_end(model_dir: Path, tmp_path: Path) -> None:
    """Of a chat's last message, and of prompts as text; not known where the beginning is cut off."""

    async def test() -> None:
        wanted = msgspec.structs.replace(JOB, keeps_states=True)
        documents = "\n\n".join("0123456789" * 30 + str(n) for n in range(2)) + "\n\n"
        async with pool(model_dir, tmp_path, 10.0) as made:

            async def chatted(job: Job, **fields: object) -> Prepared:
                messages = [{"role": "user", "content": documents + "Why?"}]
                return await made.prepare(job, json.dumps({"messages": messages, **fields}).encode())

            async def completed(job: Job, **fields: object) -> Prepared:
                body = json.dumps({"prompt": ["hi", documents + "Why?"], **fields}).encode()
                return await made.prepare(msgspec.structs.replace(job, kind=Kind.COMPLETION), body)

            chat, raw = await chatted(wanted), await completed(wanted)
            (ends,), (none, of_raw) = chat.part_ends, raw.part_ends
            assert len(ends) == len(of_raw) == 2 and none == []
            assert len(unpacked(chat.prompts[0])) > ends[1] > ends[0] > 250
            assert of_raw[1] - of_raw[0] == ends[1] - ends[0]
            cut = {"truncate_prompt_tokens": 100}
            others = [await prepare(job, **cut) for prepare, job in ((chatted, wanted), (completed, wanted))]
            assert [each.part_ends for each in (*others, await chatted(JOB), await completed(JOB))] == [[]] * 4

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_a_job_that_nobody_waits_for_ends(model_dir: Path, tmp_path: Path) -> None:
    async def test() -> None:
        async with pool(model_dir, tmp_path, 1000.0) as made:
            await asked(made, 1)
            endless = [asyncio.create_task(made.prepare(JOB, ENDLESS)) for _ in range(3)]
            others = [asked(made, length) for length in range(5)]
            await asyncio.sleep(0.01)
            for task in (*endless, others[0]):
                task.cancel()
            assert all(isinstance(prepared, Prepared) for prepared in await asyncio.gather(*others[1:]))

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))
