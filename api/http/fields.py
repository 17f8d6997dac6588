"""Every field that clients of the generating endpoints send, and what becomes of it: one table.

Parsing follows it (api/http/parsing.py), docs/api.md is written from it (`python -m api.http.reference`), and a test
walks it. A field of the request's model (api/http/protocol.py) is *supported*; an *alias* is another name of one; a
*no-op* is accepted with the values listed (none: any) and changes nothing; a *refused* one would change the answer
and is a 400, except with the values listed, with which it asks for what happens anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from api.http.protocol import (
    Body,
    ChatRequest,
    CompletionRequest,
    MessagesRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    OllamaShowRequest,
    ResponsesRequest,
    StreamOptions,
)


class Status(Enum):
    SUPPORTED = "supported"
    ALIAS = "alias"
    NO_OP = "no-op"
    REFUSED = "refused"


@dataclass(frozen=True)
class Field:
    """`note`: what the field does, or why it does nothing or is refused. `values`: see above; `of`: the
    field that an alias means."""

    name: str
    status: Status
    note: str
    values: tuple[Any, ...] = ()
    of: str | None = None

    def takes(self, value: Any) -> bool:
        """Whether a field that is not supported may have this value."""
        if self.status is Status.NO_OP and not self.values:
            return True
        return any(one == value and isinstance(one, bool) == isinstance(value, bool) for one in self.values)


def supported(name: str, note: str) -> Field:
    return Field(name, Status.SUPPORTED, note)


def alias(name: str, of: str) -> Field:
    return Field(name, Status.ALIAS, f"another name of `{of}`", of=of)


def no_op(name: str, note: str, *values: Any) -> Field:
    return Field(name, Status.NO_OP, note, values)


def refused(name: str, note: str, *but: Any) -> Field:
    return Field(name, Status.REFUSED, note, but)


_GENERATION = (
    supported("model", "the base model or an adapter; may be left out if the key sees the base model"),
    supported("max_tokens", "most tokens of output; default: `--default-max-tokens`, else see the endpoint"),
    supported("min_tokens", "before that many, neither a stop string nor an end token ends the output"),
    supported("temperature", "0: greedy"),
    supported("top_p", "1: off"),
    supported("top_k", "0 or -1: off"),
    supported("min_p", "0: off"),
    supported("seed", "equal requests with a seed have equal answers; each of `n` has a seed derived from it"),
    supported("stop", "a text or a list; the output ends before the first that it holds"),
    supported("stop_token_ids", "tokens that end the output"),
    supported("include_stop_str_in_output", "the stop string, or the ending token's text, stays in the text"),
    supported("n", "answers to each prompt"),
    supported("presence_penalty", "taken off the logits of tokens that the output has"),
    supported("frequency_penalty", "the same, times how often it has them"),
    supported("repetition_penalty", "divides or multiplies the logits of tokens of prompt and output; 1: off"),
    supported("logit_bias", "token id -> what is added to its logit"),
    supported("bad_words", "texts that never come"),
    supported("allowed_token_ids", "the only tokens that come"),
    supported("stream", "server-sent events"),
    supported("stream_options", "only with `stream`; its fields are below"),
    supported("ignore_eos", "the end token does not end the output"),
    supported("skip_special_tokens", "false: control tokens show in the text"),
    supported("return_token_ids", "`token_ids` and `prompt_token_ids` in the answer; the end token is one of them"),
    supported("return_tokens_as_token_ids", "log-probabilities name tokens `token_id:N`"),
    supported("prompt_logprobs", "that many alternatives for each token of the prompt; not with `stream`"),
    supported(
        "truncate_prompt_tokens", "only the last that many tokens of the prompt; -1: what fits beside the output"
    ),
    supported("cache_salt", "the prefix cache is shared only with requests of the same salt"),
    supported("request_id", "the answer's id ends with it, and `x-request-id` is it; the header alone does the same"),
    supported("priority", "smaller runs first, among the tenant's own"),
    supported("response_format", "JSON, or JSON of a schema; `strict` changes nothing, a schema always holds"),
    supported("structured_outputs", "vLLM's: one of `json`, `json_object`, `regex`, `choice`, `grammar`"),
    supported("guided_json", "a JSON schema"),
    supported("guided_regex", "a regular expression for the whole output"),
    supported("guided_choice", "the output is one of these texts"),
    supported("guided_grammar", "a grammar in GBNF or Lark"),
    supported("regex", "SGLang's: a regular expression for the whole output"),
    supported("ebnf", "SGLang's: a grammar in GBNF"),
    supported("grammar", "llama.cpp's: a grammar in GBNF"),
    supported("json_schema", "a JSON schema"),
    alias("n_predict", "max_tokens"),
    alias("max_new_tokens", "max_tokens"),
    alias("repeat_penalty", "repetition_penalty"),
    alias("no_stop_trim", "include_stop_str_in_output"),
    no_op("user", "tenants are told by their keys"),
    no_op("metadata", "nothing is kept with an answer"),
    no_op("store", "an answer is not kept here; /v1/responses keeps those it is asked to"),
    no_op("service_tier", "there is one tier"),
    no_op("prompt_cache_key", "the prefix cache finds equal prompts by itself"),
    no_op("prompt_cache_retention", "the prefix cache keeps what fits, least recently used first out"),
    no_op("prompt_cache_options", "the prefix cache finds equal prompts by itself"),
    no_op("cache_prompt", "the prefix cache is always on", True),
    no_op("safety_identifier", "tenants are told by their keys"),
    no_op("id_slot", "requests have no slots", -1),
    no_op("timings_per_token", "`/metrics` has the timings", False),
    no_op("return_progress", "there is no such event", False),
    no_op("post_sampling_probs", "log-probabilities are those before temperature and filters", False),
    refused("use_beam_search", "there is sampling only", False),
    refused("early_stopping", "there is no beam search", False),
    refused("length_penalty", "there is no beam search", 1.0),
    refused("typical_p", "no such filter", 1.0),
    refused("tfs_z", "no such filter", 1.0),
    refused("top_a", "no such filter", 0.0),
    refused("top_n_sigma", "no such filter", -1.0),
    refused("xtc_probability", "no such filter", 0.0),
    refused("dynatemp_range", "the temperature is fixed", 0.0),
    refused("mirostat", "no such sampler", 0),
    refused("dry_multiplier", "no such penalty", 0.0),
    refused("repeat_last_n", "penalties look at all tokens", -1),
    refused("samplers", "the order of the filters is fixed"),
    refused("logits_processors", "no code of a client's runs here"),
    refused("logit_processors", "no code of a client's runs here"),
    refused("custom_logit_processor", "no code of a client's runs here"),
    refused("stop_regex", "stops are texts: see `stop`", []),
    refused("min_new_tokens", "its name here is `min_tokens`"),
    refused("t_max_predict_ms", "outputs are bounded in tokens", 0),
    refused("n_keep", "the context is not shifted", 0),
    refused("spaces_between_special_tokens", "text is the tokens' own", True),
    refused("detokenize", "`return_token_ids` gives the ids beside the text", True),
    refused("kv_transfer_params", "prompts are computed where they are answered"),
    refused("mm_processor_kwargs", "the model reads text only"),
    refused("return_hidden_states", "only tokens and log-probabilities are given", False),
)

_CHAT = (
    supported("messages", "what the chat template renders; text parts only"),
    supported("max_completion_tokens", "the newer name of `max_tokens`; default: the rest of the context"),
    supported("logprobs", "log-probabilities of the output's tokens"),
    supported("top_logprobs", "that many alternatives for each; needs `logprobs`"),
    supported("add_generation_prompt", "the template ends where the assistant begins"),
    supported("continue_final_message", "the output goes on with the last message"),
    supported(
        "chat_template_kwargs", "variables for the template; one that it does not ask for is named in `warnings`"
    ),
    alias("n_probs", "top_logprobs"),
    no_op("verbosity", "no template has such a control"),
    supported("tools", "functions that the answer may call; at most 128"),
    supported(
        "tool_choice", "`auto`, `none`, `required`, or one function by its name; `none`: they are not in the prompt"
    ),
    supported("parallel_tool_calls", "false: the answer ends with its first call"),
    supported("functions", "the older form of `tools`"),
    supported("function_call", "the older form of `tool_choice`"),
    supported("include_reasoning", "false: reasoning is left out of the answer"),
    supported(
        "reasoning_effort",
        "`none` switches reasoning off, others on, if the template can; it sees the value if it asks for it",
    ),
    supported("enable_thinking", "switches reasoning on or off, if the template can"),
    supported("thinking_token_budget", "after so many tokens of reasoning its end is forced"),
    refused("add_special_tokens", "the template writes them", False),
    refused("modalities", "the model writes text only", ["text"]),
    refused("audio", "the model writes text only"),
    refused("prediction", "drafts are made from the prompt (`--speculate`)"),
    refused("web_search_options", "there is no search"),
    refused("moderation", "there is no moderation"),
    refused("chat_template", "the server's template is used (`--chat-template`)"),
    refused("documents", "write them into a message", []),
)

_COMPLETION = (
    supported("prompt", "a text, a list of token ids, or a list of either"),
    supported("add_special_tokens", "the tokenizer adds its own tokens, such as one that begins a text"),
    supported("echo", "the prompt stands before the output"),
    supported("logprobs", "that many alternatives for each token of output, with `echo` of the prompt too"),
    supported("best_of", "that many answers are made, the `n` with the highest mean log-probability given"),
    alias("n_probs", "logprobs"),
    refused("suffix", "the model does not fill in the middle", ""),
)

_STREAM_OPTIONS = (
    supported("include_usage", "a last event with the usage"),
    supported("continuous_usage_stats", "the usage so far in every event"),
    no_op("include_obfuscation", "nothing is padded"),
)

_MESSAGES = (
    supported("model", "as everywhere"),
    supported("messages", "text, thinking, `tool_use` and `tool_result` blocks"),
    supported("max_tokens", "default: the rest of the context"),
    supported("system", "a text or text blocks"),
    supported("stop_sequences", "see `stop`"),
    supported("stream", "Anthropic's events"),
    supported("temperature", "0: greedy"),
    supported("top_p", "1: off"),
    supported("top_k", "0 or -1: off"),
    supported("tools", "a client's own"),
    supported("tool_choice", "`auto`, `any`, `tool` or `none`"),
    supported("thinking", "`disabled` becomes the template's `enable_thinking: false`; budgets are not kept"),
    no_op("metadata", "tenants are told by their keys"),
    no_op("service_tier", "there is one tier"),
    no_op("cache_control", "the prefix cache finds equal prompts by itself"),
    no_op("output_config", "no template has such a control"),
    no_op("context_management", "the client's messages are taken as they are"),
    refused("mcp_servers", "only a client's own tools are called", []),
    refused("container", "nothing is run here"),
)

_RESPONSES = (
    supported("model", "as everywhere"),
    supported("input", "a text, or items: messages, calls of functions, their outputs, reasoning"),
    supported("instructions", "the first message, of this response alone"),
    supported("previous_response_id", "its messages come before the input; it must have been stored"),
    supported("store", "kept for `previous_response_id` and `GET`, as long as the bounded store has room"),
    supported("stream", "events with sequence numbers"),
    supported("max_output_tokens", "default: the rest of the context"),
    supported("temperature", "0: greedy"),
    supported("top_p", "1: off"),
    supported("tools", "functions"),
    supported("tool_choice", "`auto`, `none`, `required` or a function"),
    supported("parallel_tool_calls", "false: one call at most"),
    supported("text", "its `format` constrains the output"),
    supported("reasoning", "its `effort`"),
    supported("metadata", "comes back with the response"),
    no_op("user", "tenants are told by their keys"),
    no_op("service_tier", "there is one tier"),
    no_op("safety_identifier", "tenants are told by their keys"),
    no_op("prompt_cache_key", "the prefix cache finds equal prompts by itself"),
    no_op("prompt_cache_retention", "the prefix cache keeps what fits, least recently used first out"),
    no_op("include", "reasoning is given as it is; nothing else can be included"),
    no_op("stream_options", "nothing is padded"),
    refused("truncation", "an input that does not fit is a 400", "disabled"),
    refused("background", "a response is made while its client waits", False),
    refused("conversation", "use `previous_response_id`"),
    refused("prompt", "there are no stored prompts"),
    refused("max_tool_calls", "a client calls its tools itself"),
    refused("top_logprobs", "/v1/chat/completions gives log-probabilities", 0),
)

_OLLAMA = (
    supported("model", "as everywhere; `:latest` at its end is left out"),
    supported("stream", "true unless given: a line of JSON each"),
    supported("format", '`"json"` or a JSON schema'),
    supported("think", "the template's `enable_thinking`"),
    supported("options", "its fields are below"),
    no_op("keep_alive", "the model stays"),
    refused("logprobs", "/v1/chat/completions gives log-probabilities", False),
    refused("top_logprobs", "/v1/chat/completions gives log-probabilities", 0),
)
_OLLAMA_CHAT = (
    supported("messages", "without images"),
    supported("tools", "functions"),
)
_OLLAMA_GENERATE = (
    supported("prompt", "a user's message, or the whole prompt if `raw`"),
    supported("system", "the first message"),
    supported("raw", "no chat template"),
    refused("images", "the model reads text only", []),
    refused("suffix", "the model does not fill in the middle", ""),
    refused("template", "the server's template is used (`--chat-template`)", ""),
    refused("context", "send the messages to /api/chat", []),
)
_OLLAMA_OPTIONS = (
    supported("temperature", "0: greedy"),
    supported("top_p", "1: off"),
    supported("top_k", "0 or -1: off"),
    supported("min_p", "0: off"),
    supported("seed", "see above"),
    supported("num_predict", "most tokens of output; below 0: what fits"),
    supported("stop", "a text or a list"),
    supported("repeat_penalty", "see `repetition_penalty`"),
    supported("presence_penalty", "see above"),
    supported("frequency_penalty", "see above"),
    no_op("num_ctx", "the context is the server's"),
    no_op("num_batch", "batches are the server's"),
    no_op("num_gpu", "placement is the server's"),
    no_op("num_thread", "threads are the server's"),
    no_op("main_gpu", "placement is the server's"),
    no_op("use_mmap", "memory is the server's"),
    no_op("numa", "memory is the server's"),
    no_op("num_keep", "the context is not shifted"),
    refused("typical_p", "no such filter", 1.0),
    refused("repeat_last_n", "penalties look at all tokens", -1),
    refused("mirostat", "no such sampler", 0),
)

_OLLAMA_SHOW = (
    supported("model", "as everywhere"),
    alias("name", "model"),
    no_op("verbose", "there is no more to show"),
)

TABLES: dict[str, Sequence[Field]] = {
    "every generating endpoint": _GENERATION,
    "/v1/chat/completions": _CHAT,
    "/v1/completions": _COMPLETION,
    "stream_options": _STREAM_OPTIONS,
    "/v1/responses": _RESPONSES,
    "/v1/messages": _MESSAGES,
    "/api/chat": (*_OLLAMA, *_OLLAMA_CHAT),
    "/api/generate": (*_OLLAMA, *_OLLAMA_GENERATE),
    "options": _OLLAMA_OPTIONS,
}


def fields_of(kind: type[Body]) -> dict[str, Field]:
    """The table of a body's fields by name; for a body without one, its model's are all supported."""
    tables = {
        ChatRequest: (*_GENERATION, *_CHAT),
        CompletionRequest: (*_GENERATION, *_COMPLETION),
        StreamOptions: _STREAM_OPTIONS,
        MessagesRequest: _MESSAGES,
        ResponsesRequest: _RESPONSES,
        OllamaChatRequest: (*_OLLAMA, *_OLLAMA_CHAT),
        OllamaGenerateRequest: (*_OLLAMA, *_OLLAMA_GENERATE),
        OllamaOptions: _OLLAMA_OPTIONS,
        OllamaShowRequest: _OLLAMA_SHOW,
    }
    table = tables.get(kind)
    if table is None:
        return {name: supported(name, "") for name in kind.model_fields}
    return {field.name: field for field in table}
