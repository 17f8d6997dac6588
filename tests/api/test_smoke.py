from tests.api.conftest import Running


def test_chat(server: Running) -> None:
    answer = server.openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "héllo wörld 👋"}]
    )
    print(answer)
    assert answer.choices[0].message.content
