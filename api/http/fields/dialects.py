"""What becomes of the fields of Anthropic's, OpenAI's Responses and Ollama's endpoints."""

from __future__ import annotations

from api.http.fields.field import alias, no_op, refused, supported

MESSAGES = (
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

RESPONSES = (
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

OLLAMA = (
    supported("model", "as everywhere; `:latest` at its end is left out"),
    supported("stream", "true unless given: a line of JSON each"),
    supported("format", '`"json"` or a JSON schema'),
    supported("think", "the template's `enable_thinking`"),
    supported("options", "its fields are below"),
    no_op("keep_alive", "the model stays"),
    refused("logprobs", "/v1/chat/completions gives log-probabilities", False),
    refused("top_logprobs", "/v1/chat/completions gives log-probabilities", 0),
)
OLLAMA_CHAT = (
    supported("messages", "without images"),
    supported("tools", "functions"),
)
OLLAMA_GENERATE = (
    supported("prompt", "a user's message, or the whole prompt if `raw`"),
    supported("system", "the first message"),
    supported("raw", "no chat template"),
    refused("images", "the model reads text only", []),
    refused("suffix", "the model does not fill in the middle", ""),
    refused("template", "the server's template is used (`--chat-template`)", ""),
    refused("context", "send the messages to /api/chat", []),
)
OLLAMA_OPTIONS = (
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

OLLAMA_SHOW = (
    supported("model", "as everywhere"),
    alias("name", "model"),
    no_op("verbose", "there is no more to show"),
)
