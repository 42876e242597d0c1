"""Chat templates in the shapes that models ship, and conversations to try on them."""

from __future__ import annotations

from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Today\'s <weather> & more, "quoted"',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
]

CHATML = """\
{%- for message in messages -%}
    {%- if loop.first and message.role != 'system' -%}
        {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' -}}
    {%- endif -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

LLAMA3_LIKE = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{%- if tools is not none or system_message %}
<|start|>system<|sep|>

    {%- if tools is not none %}
        {{- "Tools: " ~ tools|length ~ "\\n" }}
        {%- for t in tools %}
            {{- t | tojson(indent=4) }}
            {{- "\\n\\n" }}
        {%- endfor %}
    {%- endif %}
    {{- system_message }}<|eot|>
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|sep|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("one tool call at a time") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|sep|>\\n\\n{"name": "' ~ call.name ~ '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}<|eot|>' }}
    {%- else %}
        {{- '<|start|>tool<|sep|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|sep|>\\n\\n' }}
{%- endif %}
"""

GEMMA_LIKE = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("roles must alternate: user, assistant, user, ...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("bad content") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""

TOOL_CHATML = """\
{%- macro show(content) %}{% if content is string %}{{ content }}{% else -%}
    {% for part in content %}{{ part.text }}{% endfor %}{% endif %}{% endmacro %}
{%- set ns = namespace(calls=0, last_user=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and ns.last_user == -1 %}{% set ns.last_user = messages|length - loop.index %}{% endif %}
{%- endfor %}
{%- if tools %}
<|im_start|>system
# Tools
<tools>
    {%- for tool in tools %}

{{ tool | tojson }}
    {%- endfor %}

</tools><|im_end|>
{% endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}<|im_start|>user{% endif %}

<tool_response>
{{ show(message.content) }}
</tool_response>
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}<|im_end|>
{% endif %}
    {%- else %}
<|im_start|>{{ message.role }}
{% generation %}{{ show(message.content or '') }}{% endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {%- set ns.calls = ns.calls + 1 %}
            {%- if call.function %}{% set call = call.function %}{% endif %}

<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson if call.arguments is not string else call.arguments }}}
</tool_call>
        {%- endfor %}<|im_end|>
{% endif %}
    {%- if loop.index0 > 50 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}calls={{ ns.calls }} last={{ ns.last_user }}
"""

TEMPLATES = {"chatml": CHATML, "llama3-like": LLAMA3_LIKE, "gemma-like": GEMMA_LIKE, "tools": TOOL_CHATML}

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Köln \"<b>\" 'q'", "days": [1, 2.5, None, True]}},
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": "hi"}],
    "system": [{"role": "system", "content": " Be kind. "}, {"role": "user", "content": "Grüße, 世界 😀 <b>&amp;</b>\n\n"}],
    "turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " b "},
        {"role": "user", "content": "<|im_end|>\n{{ x }}"},
    ],
    "empty": [{"role": "user", "content": ""}],
    "call": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": '{"t": 3}', "tool_call_id": "c1"},
        {"role": "tool", "content": "warm"},
        {"role": "assistant", "content": "3 degrees"},
        {"role": "user", "content": "Thanks"},
    ],
}
