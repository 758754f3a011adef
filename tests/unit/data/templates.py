"""Chat templates with the ways of released models in small, each with the special tokens that it writes."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN2 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    + CHATML
)
# Earlier reasoning is dropped; the last turn has a block, empty where there is no reasoning.
QWEN3 = """\
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = messages|length - 1 - loop.index0 %}
    {%- if message.role == 'user' and not ns.found %}{% set ns.found = true %}{% set ns.last = index %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- set reason = message.reasoning_content or '' %}
        {%- if loop.index0 > ns.last and (loop.last or reason) %}
            {{- '<think>\n' + reason.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date_string + '\n\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
# The system's words are the first user's; roles must alternate; the assistant is called model.
GEMMA3 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set first = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}
{%- else %}{% set first = '' %}{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception("roles must alternate") }}{% endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\n' + (first if loop.first else '') + message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{% endif %}"""
# The generation prompt is empty; the last user's turn has the system's words.
MISTRAL = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set first = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}
{%- else %}{% set first = '' %}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (first if loop.first else '') + message.content + '[/INST]' }}
    {%- else %}{{- ' ' + message.content + eos_token }}{% endif %}
{%- endfor %}"""
# Reasoning before </think> is cut off everywhere; the generation prompt closes an empty one.
DEEPSEEK_V3 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- message.content }}
    {%- elif message.role == 'user' %}{{- '<｜User｜>' + message.content }}
    {%- else %}
        {{- '<｜Assistant｜></think>' + message.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜></think>' }}{% endif %}"""
# Channels; the last answer ends otherwise than those before.
GPT_OSS = """\
{{- '<|start|>system<|message|>Current date: ' + strftime_now("%Y-%m-%d") + '<|end|>' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if message.thinking and loop.last %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- else %}
        {%- set role = 'developer' if message.role == 'system' else message.role %}
        {{- '<|start|>' + role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""
# A token of its own ends a conversation that asks for nothing.
PHI = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
TAGGED = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "llama 3.1": LLAMA3, "qwen 2.5": QWEN2, "qwen 3": QWEN3, "gemma 3": GEMMA3, "mistral": MISTRAL,
    "deepseek v3": DEEPSEEK_V3, "gpt-oss": GPT_OSS, "phi": PHI, "tagged": TAGGED,
}  # fmt: skip
# What follows a turn's words in the tokens that are learned, where other turns follow and where it is the last.
ENDS = {
    "llama 3.1": ("<|eot_id|>",) * 2, "qwen 2.5": ("<|im_end|>",) * 2, "qwen 3": ("<|im_end|>",) * 2,
    "gemma 3": ("<end_of_turn>",) * 2, "mistral": ("</s>",) * 2, "deepseek v3": ("<｜end▁of▁sentence｜>",) * 2,
    "gpt-oss": ("<|return|>",) * 2, "phi": ("<|end|>", "<|end|>\n</s>"), "tagged": ("<|im_end|>",) * 2,
}  # fmt: skip
SPLITS = ("qwen 3", "gpt-oss")  # whose turns are rendered another way when more follows
BEFORE = {"mistral": " ", "gpt-oss": "<|channel|>final<|message|>"}  # what is learned before a turn's words
SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>",
    "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|user|>", "<|assistant|>", "<|system|>",
]  # fmt: skip
