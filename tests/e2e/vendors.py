"""Chats as the vendors of the served families write them: a question that takes two tools, and the answer from their
results. Templates are what theirs come to for such chats, with less said about tools."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from api.text.bytelevel import KIMI, QWEN2
from api.text.calls.formats import CALL, END, HARMONY_MARKERS, RETURN, format_named
from api.text.calls.plain import with_tools


def _tool(name: str, parameter: str, schema: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {parameter: schema}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "parameters": {**parameters, "additionalProperties": False}}}


SKY = _tool("sky", "at", {"type": "string", "enum": ["Ulm", "Bonn"]})
WAIT = _tool("wait", "hours", {"type": "integer", "minimum": 1, "maximum": 9})
TOOLS = [SKY, WAIT]
CALLS: list[tuple[str, dict[str, Any]]] = [("sky", {"at": "Ulm"}), ("wait", {"hours": 2})]
RESULTS = ["wet", "done"]
ULM, HOURS = '{"at": "Ulm"}', '{"hours": 2}'
_SKY, _WAIT = json.dumps(SKY), json.dumps(WAIT)


@dataclass(frozen=True)
class Vendor:
    """`asked` is the prompt of "Ulm?", `said` what the model is to write behind it; `again` the whole prompt with the
    results of its calls, `last` what it is to write then. Of that: `reasoning` and `content` are those of both answers.

    `family`, `shape`: of the tiny model; `stored`: fields of its config.json instead. `control`: tokens that the vendor
    has as special ones, the last ones of which, `ends` of them, end an answer; `words`: added tokens that are plain.
    `pre`: a pattern of api/text/bytelevel.py, None: SentencePiece's way. `fields`: of requests, beside OpenAI's.
    `ids`: that the client gives calls, where the prompt would have random ones."""

    family: str
    template: str
    asked: str
    said: str
    again: str
    last: str
    control: tuple[str, ...]
    ends: int = 1
    words: tuple[str, ...] = ()
    pre: str | None = QWEN2
    reasoning: tuple[str | None, str | None] = ("I look.", "So.")
    content: tuple[str | None, str] = ("One moment.", "It rains.")
    calls: int = 2
    shape: dict[str, Any] = field(default_factory=dict)
    stored: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    ids: tuple[str, ...] = ()

    @property
    def tokens(self) -> tuple[str, ...]:
        return (*self.control, *self.words)

    @property
    def eos(self) -> tuple[str, ...]:
        return self.control[-self.ends :]


def _told(name: str) -> str:
    """What the system message of a template that lists no tools says."""
    return str(with_tools([], TOOLS, format_named(name))[0]["content"])


# ---- Qwen: ChatML


def _chatml(call: str, *, thinks: bool) -> str:
    """`call`: how the template writes the call `c`."""
    think = "<think>\n" if thinks else ""
    reasoning = f"{think}' + (m.reasoning_content or '') + '\n</think>\n\n" if thinks else ""
    template = """
{%- if tools %}{{- '<|im_start|>system\n# Tools\n<tools>' }}
{%- for tool in tools %}{{- '\n' ~ tool | tojson }}{%- endfor %}{{- '\n</tools><|im_end|>\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{- '' if loop.previtem.role == 'tool' else '<|im_start|>user' }}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{{- '' if loop.nextitem is defined and loop.nextitem.role == 'tool' else '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant\nREASONING' + m.content }}
{%- for c in m.tool_calls or [] %}CALL{%- endfor %}{{- '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\nTHINK' }}{%- endif %}"""
    return template.replace("REASONING", reasoning).replace("CALL", call).replace("THINK", think)


_HERMES = """{{- '\n<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- (c.function.arguments | tojson) + '}\n</tool_call>' }}"""
_CODER = """{{- '\n<tool_call>\n<function=' + c.function.name + '>\n' }}
{%- for k, v in c.function.arguments.items() %}{{- '<parameter=' + k + '>\n' ~ v ~ '\n</parameter>\n' }}{%- endfor %}
{{- '</function>\n</tool_call>' }}"""
_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN_WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_QWEN_ASKED = (
    f"<|im_start|>system\n# Tools\n<tools>\n{_SKY}\n{_WAIT}\n</tools><|im_end|>\n"
    "<|im_start|>user\nUlm?<|im_end|>\n<|im_start|>assistant\n"
)
_QWEN_RESULTS = (
    "\n<|im_start|>user\n<tool_response>\nwet\n</tool_response>\n<tool_response>\ndone\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n"
)
_HERMES_CALLS = (
    f'\n<tool_call>\n{{"name": "sky", "arguments": {ULM}}}\n</tool_call>'
    f'\n<tool_call>\n{{"name": "wait", "arguments": {HOURS}}}\n</tool_call>'
)
_CODER_CALLS = (
    "\n<tool_call>\n<function=sky>\n<parameter=at>\nUlm\n</parameter>\n</function>\n</tool_call>"
    "\n<tool_call>\n<function=wait>\n<parameter=hours>\n2\n</parameter>\n</function>\n</tool_call>"
)


def _thinking_qwen(family: str, call: str, calls: str) -> Vendor:
    asked, said = f"{_QWEN_ASKED}<think>\n", f"I look.\n</think>\n\nOne moment.{calls}<|im_end|>"
    return Vendor(
        family=family,
        template=_chatml(call, thinks=True),
        asked=asked,
        said=said,
        again=f"{asked}{said}{_QWEN_RESULTS}<think>\n",
        last="So.\n</think>\n\nIt rains.<|im_end|>",
        control=_CHATML,
        words=_QWEN_WORDS,
    )


_CODER_SAID = f"One moment.{_CODER_CALLS}<|im_end|>"
QWEN_CODER_NEXT = Vendor(
    family="qwen3_next",
    template=_chatml(_CODER, thinks=False),
    asked=_QWEN_ASKED,
    said=_CODER_SAID,
    again=f"{_QWEN_ASKED}{_CODER_SAID}{_QWEN_RESULTS}",
    last="It rains.<|im_end|>",
    control=_CHATML,
    words=_QWEN_WORDS,
    reasoning=(None, None),
)
# Of Qwen2's time: neither tools nor reasoning. Tools are told, and called, in Hermes' form.
_QWEN2_ASKED = (
    f"<|im_start|>system\n{_told('hermes')}<|im_end|>\n<|im_start|>user\nUlm?<|im_end|>\n<|im_start|>assistant\n"
)
_QWEN2_SAID = f"One moment.{_HERMES_CALLS}<|im_end|>"
QWEN2_MOE = Vendor(
    family="qwen2_moe",
    template="{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    asked=_QWEN2_ASKED,
    said=_QWEN2_SAID,
    again=f"{_QWEN2_ASKED}{_QWEN2_SAID}{_QWEN_RESULTS}",
    last="It rains.<|im_end|>",
    control=_CHATML,
    reasoning=(None, None),
)

# ---- DeepSeek: templates that list no tools

_DEEPSEEK = (
    *("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁outputs▁begin｜>"),
    *("<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜end▁of▁sentence｜>"),
)
_R1_ASKED = f"<｜begin▁of▁sentence｜>{_told('deepseek_v3')}<｜User｜>Ulm?<｜Assistant｜>"
_R1_CALLS = (
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>sky\n```json\n{ULM}\n```<｜tool▁call▁end｜>\n"
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>wait\n```json\n{HOURS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    "<｜end▁of▁sentence｜>"
)
DEEPSEEK_R1 = Vendor(  # V3's is the same without `<think>`
    family="deepseek_v3",
    template="""{{- bos_token }}
{%- for m in messages if m.role == 'system' %}{{- m.content }}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' and m.tool_calls %}{{- '<｜Assistant｜>' + (m.content or '') }}
{{- '<｜tool▁calls▁begin｜>' }}{%- for c in m.tool_calls %}{{- '' if loop.first else '\n' }}
{{- '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\n```json\n' + c.function.arguments }}
{{- '\n```<｜tool▁call▁end｜>' }}{%- endfor %}{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- elif m.role == 'tool' %}{{- '\n' if loop.previtem.role == 'tool' else '<｜tool▁outputs▁begin｜>' }}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{{- '' if loop.nextitem is defined and loop.nextitem.role == 'tool' else '<｜tool▁outputs▁end｜>' }}
{%- elif m.role == 'assistant' %}{{- '' if loop.previtem.role == 'tool' else '<｜Assistant｜>' }}
{{- m.content + '<｜end▁of▁sentence｜>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{- '<｜Assistant｜><think>\n' }}{%- endif %}""",
    asked=f"{_R1_ASKED}<think>\n",
    said=f"I look.\n</think>\n\nOne moment.{_R1_CALLS}",
    again=f"{_R1_ASKED}One moment.{_R1_CALLS}<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>wet<｜tool▁output▁end｜>\n"
    "<｜tool▁output▁begin｜>done<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
    last="It rains.<｜end▁of▁sentence｜>",
    control=_DEEPSEEK,
    words=("<think>", "</think>"),
    pre="deepseek-v3",
    reasoning=("I look.", None),
)
_V31_ASKED = f"<｜begin▁of▁sentence｜>{_told('deepseek_v31')}<｜User｜>Ulm?<｜Assistant｜>"
_V31_CALLS = (
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>sky<｜tool▁sep｜>{ULM}<｜tool▁call▁end｜>"
    f"<｜tool▁call▁begin｜>wait<｜tool▁sep｜>{HOURS}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
)
DEEPSEEK_V31 = Vendor(
    family="deepseek_v3",
    template="""{{- bos_token }}
{%- for m in messages if m.role == 'system' %}{{- m.content }}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' %}{{- '' if loop.previtem.role == 'tool' else '<｜Assistant｜></think>' }}
{{- m.content or '' }}
{%- if m.tool_calls %}{{- '<｜tool▁calls▁begin｜>' }}{%- for c in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}
{%- endfor %}{{- '<｜tool▁calls▁end｜>' }}{%- endif %}{{- '<｜end▁of▁sentence｜>' }}
{%- elif m.role == 'tool' %}{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt and messages[-1].role == 'user' %}
{{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{%- endif %}""",
    asked=f"{_V31_ASKED}<think>",
    said=f"I look.</think>One moment.{_V31_CALLS}",
    again=f"{_V31_ASKED}</think>One moment.{_V31_CALLS}<｜tool▁output▁begin｜>wet<｜tool▁output▁end｜>"
    "<｜tool▁output▁begin｜>done<｜tool▁output▁end｜>",
    last="It rains.<｜end▁of▁sentence｜>",
    control=_DEEPSEEK,
    words=("<think>", "</think>"),
    pre="deepseek-v3",
    reasoning=("I look.", None),
    fields={"enable_thinking": True},
)

# ---- Kimi: of a call its id is written

_KIMI_TOOLS = json.dumps(TOOLS, separators=(",", ":"))
_KIMI_ASKED = (
    f"<|im_system|>tool_declare<|im_middle|>{_KIMI_TOOLS}<|im_end|>"
    "<|im_user|>user<|im_middle|>Ulm?<|im_end|><|im_assistant|>assistant<|im_middle|>"
)
_KIMI_SAID = (
    "<think>I look.</think>One moment.<|tool_calls_section_begin|>"
    f"<|tool_call_begin|>functions.sky:0<|tool_call_argument_begin|>{ULM}<|tool_call_end|>"
    f"<|tool_call_begin|>functions.wait:1<|tool_call_argument_begin|>{HOURS}<|tool_call_end|>"
    "<|tool_calls_section_end|><|im_end|>"
)
KIMI_K2 = Vendor(
    family="deepseek_v3",
    stored={"model_type": "kimi_k2"},
    shape={"n_group": 1, "topk_group": 1},
    template="""
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson(separators=(',', ':')) + '<|im_end|>' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|im_user|>user<|im_middle|>' + m.content }}
{%- elif m.role == 'assistant' %}{{- '<|im_assistant|>assistant<|im_middle|>' }}
{{- '<think>' + (m.reasoning_content or '') + '</think>' + m.content }}
{%- if m.tool_calls %}{{- '<|tool_calls_section_begin|>' }}{%- for c in m.tool_calls %}
{{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' + c.function.arguments | tojson }}
{{- '<|tool_call_end|>' }}{%- endfor %}{{- '<|tool_calls_section_end|>' }}{%- endif %}
{%- else %}{{- '<|im_system|>' + (m.name or m.role) + '<|im_middle|>' }}
{{- '## Return of ' + m.tool_call_id + '\n' if m.role == 'tool' else '' }}{{- m.content }}
{%- endif %}{{- '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}""",
    asked=_KIMI_ASKED,
    said=_KIMI_SAID,
    again=f"{_KIMI_ASKED}{_KIMI_SAID}<|im_system|>tool<|im_middle|>## Return of functions.sky:0\nwet<|im_end|>"
    "<|im_system|>tool<|im_middle|>## Return of functions.wait:1\ndone<|im_end|><|im_assistant|>assistant<|im_middle|>",
    last="<think>So.</think>It rains.<|im_end|>",
    control=(
        *("[BOS]", "[EOS]", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
        *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<think>", "</think>", "<|im_end|>"),
    ),
    pre=KIMI,
)

# ---- GLM: the next turn's token ends an answer

_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "<|user|>", "<|observation|>")
_GLM_WORDS = (*_QWEN_WORDS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def _glm(family: str, line: str, opened: str, **shape: Any) -> Vendor:
    """`line`: what stands between parts; `opened`: how an answer begins in the prompt."""
    asked = f"[gMASK]<sop><|system|>\n# Tools\n<tools>\n{_SKY}\n{_WAIT}\n</tools><|user|>\nUlm?<|assistant|>"
    said = (
        f"{line}<think>I look.</think>{line}One moment."
        f"{line}<tool_call>sky{line}<arg_key>at</arg_key>{line}<arg_value>Ulm</arg_value>{line}</tool_call>"
        f"{line}<tool_call>wait{line}<arg_key>hours</arg_key>{line}<arg_value>2</arg_value>{line}</tool_call>"
        "<|observation|>"
    )
    results = "".join(f"{line}<tool_response>{line}{result}{line}</tool_response>" for result in RESULTS)
    template = """[gMASK]<sop>
{%- if tools %}{{- '<|system|>\n# Tools\n<tools>' }}
{%- for tool in tools %}{{- '\n' ~ tool | tojson }}{%- endfor %}{{- '\n</tools>' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|user|>\n' + m.content }}
{%- elif m.role == 'assistant' %}{{- '<|assistant|>LINE<think>' + (m.reasoning_content or '') + '</think>' }}
{{- 'LINE' + m.content if m.content else '' }}
{%- for c in m.tool_calls or [] %}{{- 'LINE<tool_call>' + c.function.name + 'LINE' }}
{%- for k, v in c.function.arguments.items() %}
{{- '<arg_key>' + k + '</arg_key>LINE<arg_value>' ~ v ~ '</arg_value>LINE' }}{%- endfor %}{{- '</tool_call>' }}
{%- endfor %}
{%- elif m.role == 'tool' %}{{- '' if loop.previtem.role == 'tool' else '<|observation|>' }}
{{- 'LINE<tool_response>LINE' + m.content + 'LINE</tool_response>' }}
{%- else %}{{- '<|system|>\n' + m.content }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>OPENED' }}{%- endif %}"""
    return Vendor(
        family=family,
        template=template.replace("LINE", line).replace("OPENED", opened),
        asked=f"{asked}{opened}",
        said=said.removeprefix(opened),
        again=f"{asked}{said}{results}<|assistant|>{opened}",
        last=f"{line}<think>So.</think>{line}It rains.<|user|>".removeprefix(opened),
        control=_GLM,
        ends=2,
        words=_GLM_WORDS,
        pre="glm4",
        shape=shape,
    )


# ---- MiniMax

_MINIMAX_ASKED = (
    f"]~!b[]~b]system\n# Tools\n<tools>\n<tool>{_SKY}</tool>\n<tool>{_WAIT}</tool>\n</tools>[e~[\n"
    "]~b]user\nUlm?[e~[\n]~b]ai\n<think>\n"
)
MINIMAX_M2 = Vendor(
    family="minimax_m2",
    template="""{{- ']~!b[]~b]system\n' }}
{%- if tools %}{{- '# Tools\n<tools>\n' }}
{%- for tool in tools %}{{- '<tool>' ~ tool | tojson ~ '</tool>\n' }}{%- endfor %}{{- '</tools>' }}{%- endif %}
{{- '[e~[\n' }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- ']~b]ai\n' }}
{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' if m.reasoning_content else '' }}{{- m.content }}
{%- if m.tool_calls %}{{- '\n<minimax:tool_call>\n' }}{%- for c in m.tool_calls %}
{{- '<invoke name="' + c.function.name + '">' }}{%- for k, v in c.function.arguments.items() %}
{{- '<parameter name="' + k + '">' ~ v ~ '</parameter>' }}{%- endfor %}{{- '</invoke>\n' }}{%- endfor %}
{{- '</minimax:tool_call>' }}{%- endif %}{{- '[e~[\n' }}
{%- elif m.role == 'tool' %}{{- '' if loop.previtem.role == 'tool' else ']~b]tool' }}
{{- '\n<response>' + m.content + '</response>' }}
{{- '' if loop.nextitem is defined and loop.nextitem.role == 'tool' else '[e~[\n' }}
{%- else %}{{- ']~b]' + m.role + '\n' + m.content + '[e~[\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- ']~b]ai\n<think>\n' }}{%- endif %}""",
    asked=_MINIMAX_ASKED,
    said='I look.\n</think>\n\nOne moment.\n<minimax:tool_call>\n<invoke name="sky">\n<parameter name="at">Ulm'
    '</parameter>\n</invoke>\n<invoke name="wait">\n<parameter name="hours">2</parameter>\n</invoke>\n'
    "</minimax:tool_call>[e~[",
    again=f'{_MINIMAX_ASKED}I look.\n</think>\n\nOne moment.\n<minimax:tool_call>\n<invoke name="sky">'
    '<parameter name="at">Ulm</parameter></invoke>\n<invoke name="wait"><parameter name="hours">2</parameter></invoke>'
    "\n</minimax:tool_call>[e~[\n]~b]tool\n<response>wet</response>\n<response>done</response>[e~[\n]~b]ai\n<think>\n",
    last="So.\n</think>\n\nIt rains.[e~[",
    control=("]!p~[", "]~!b[", "]~b]", "[e~["),
    words=("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
    pre="minimax-m2",
)

# ---- Mixtral 8x22B: nothing is said beside calls, and ids have nine characters

_MISTRAL_ASKED = f"<s>[AVAILABLE_TOOLS] [{_SKY}, {_WAIT}][/AVAILABLE_TOOLS][INST] Ulm?[/INST]"
_MISTRAL_IDS = ("abcdefgh1", "abcdefgh2")
MIXTRAL = Vendor(
    family="mixtral",
    template="""{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == 0 %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.role == 'assistant' and m.tool_calls %}{{- '[TOOL_CALLS] [' }}{%- for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{- raise_exception('ids of calls have 9 characters') }}{%- endif %}
{{- '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + ', "id": "' + c.id + '"}' }}
{{- '' if loop.last else ', ' }}{%- endfor %}{{- ']' + eos_token }}
{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{- ' ' + m.content + eos_token }}
{%- endif %}{%- endfor %}""",
    asked=_MISTRAL_ASKED,
    said=f'[TOOL_CALLS] [{{"name": "sky", "arguments": {ULM}}}, {{"name": "wait", "arguments": {HOURS}}}]</s>',
    again=f'{_MISTRAL_ASKED}[TOOL_CALLS] [{{"name": "sky", "arguments": {ULM}, "id": "abcdefgh1"}}, '
    f'{{"name": "wait", "arguments": {HOURS}, "id": "abcdefgh2"}}]</s>'
    '[TOOL_RESULTS] {"content": wet, "call_id": "abcdefgh1"}[/TOOL_RESULTS]'
    '[TOOL_RESULTS] {"content": done, "call_id": "abcdefgh2"}[/TOOL_RESULTS]',
    last="It rains.</s>",
    control=(
        *("<unk>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
    ),
    pre=None,
    reasoning=(None, None),
    content=(None, "It rains."),
    ids=_MISTRAL_IDS,
)

# ---- gpt-oss: channels, one call a message

_HARMONY_ASKED = (
    "<|start|>developer<|message|>type sky\ntype wait\n<|end|><|start|>user<|message|>Ulm?<|end|><|start|>assistant"
)
GPT_OSS = Vendor(
    family="gpt_oss",
    template="""
{%- if tools %}{{- '<|start|>developer<|message|>' }}
{%- for tool in tools %}{{- 'type ' + tool.function.name + tool.function.description + '\n' }}{%- endfor %}
{{- '<|end|>' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}
{%- if m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}
{%- set c = m.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + c.name + '<|channel|>commentary json<|message|>' }}
{{- c.arguments | tojson + '<|call|>' }}
{%- elif m.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}""",
    asked=_HARMONY_ASKED,
    said="<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary<|message|>One moment."
    f"<|end|><|start|>assistant<|channel|>commentary to=functions.sky <|constrain|>json<|message|>{ULM}<|call|>",
    again=f"{_HARMONY_ASKED}<|channel|>analysis<|message|>I look.\n\nOne moment.<|end|><|start|>assistant "
    f"to=functions.sky<|channel|>commentary json<|message|>{ULM}<|call|><|start|>functions to=assistant<|channel|>"
    'commentary<|message|>"wet"<|end|><|start|>assistant',
    last="<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>It rains.<|return|>",
    control=(*(marker for marker in HARMONY_MARKERS if marker not in (CALL, RETURN)), CALL, RETURN),
    ends=2,
    pre="gpt-4o",
    calls=1,
)
assert END in GPT_OSS.control

VENDORS = {
    "gpt-oss": GPT_OSS,
    "deepseek-r1": DEEPSEEK_R1,
    "deepseek-v3.1": DEEPSEEK_V31,
    "kimi-k2": KIMI_K2,
    "glm-4.6": _glm("glm4_moe", "\n", ""),
    "glm-4.7-flash": _glm("glm4_moe_lite", "", "<think>"),
    "minimax-m2": MINIMAX_M2,
    "qwen3-next": _thinking_qwen("qwen3_next", _HERMES, _HERMES_CALLS),
    "qwen3.5": _thinking_qwen("qwen3_5_moe_text", _CODER, _CODER_CALLS),
    "qwen3-coder-next": QWEN_CODER_NEXT,
    "mixtral": MIXTRAL,
    "qwen2-moe": QWEN2_MOE,
}
