"""Five families of models for tests/scripted_model.py: added tokens with the `special` flags of their own tokenizers,
and short chat templates of ours that write turns, tools and calls as theirs do."""

from tests.scripted_model import Family

_TOOLS = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
_TEXT = "{{ message.content or '' }}"

QWEN3 = Family(
    special=("<|im_end|>", "<|endoftext|>", "<|im_start|>"),
    plain=("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    ends=2,
    template=(
        f"{{% if tools %}}<|im_start|>system\n{_TOOLS}<tool_call>\n{{name and arguments}}\n</tool_call><|im_end|>\n"
        "{% endif %}{% for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}\n"
        "{% if message.role == 'tool' %}<tool_response>\n{{ message.content }}\n</tool_response>"
        f"{{% else %}}{_TEXT}{{% for call in message.tool_calls or [] %}}\n<tool_call>\n"
        '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
        "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    ),
)
LLAMA3 = Family(
    special=(
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|begin_of_text|>"),
        *("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
    ),
    ends=3,
    template=(
        f"<|begin_of_text|>{_TOOLS}{{% for message in messages %}}<|start_header_id|>"
        "{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>\n\n"
        f"{_TEXT}{{% for call in message.tool_calls or [] %}}"
        '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}{% endfor %}'
        "<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
)
MISTRAL = Family(
    special=(
        *("</s>", "<s>", "<unk>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
        *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[CALL_ID]", "[ARGS]"),
    ),
    template=(
        f"<s>{{% if tools %}}[AVAILABLE_TOOLS]{_TOOLS}[/AVAILABLE_TOOLS]{{% endif %}}{{% for message in messages %}}"
        f"{{% if message.role == 'system' %}}[SYSTEM_PROMPT]{_TEXT}[/SYSTEM_PROMPT]"
        f"{{% elif message.role == 'user' %}}[INST]{_TEXT}[/INST]"
        f"{{% elif message.role == 'tool' %}}[TOOL_RESULTS]{_TEXT}[/TOOL_RESULTS]"
        f"{{% else %}}{_TEXT}{{% for call in message.tool_calls or [] %}}[TOOL_CALLS]{{{{ call.function.name }}}}[ARGS]"
        "{{ call.function.arguments | tojson }}{% endfor %}</s>{% endif %}{% endfor %}"
    ),
)
DEEPSEEK = Family(  # R1's: `special` is false for what a turn consists of, and arguments are joined as text
    special=("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜▁pad▁｜>"),
    plain=(
        *("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
        *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁sep｜>"),
    ),
    template=(
        f"<｜begin▁of▁sentence｜>{_TOOLS}{{% for message in messages %}}"
        f"{{% if message.role == 'system' %}}{_TEXT}{{% elif message.role == 'user' %}}<｜User｜>{_TEXT}"
        "{% elif message.role == 'tool' %}<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{{ message.content }}"
        "<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
        f"{{% else %}}<｜Assistant｜>{_TEXT}{{% if message.tool_calls %}}<｜tool▁calls▁begin｜>"
        "{% for call in message.tool_calls %}"
        "{{ '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + "
        "'\n```json\n' + call.function.arguments + '\n```<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>"
        "{% endif %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}<｜Assistant｜><think>\n{% endif %}"
    ),
)
HARMONY = Family(
    special=(
        *("<|return|>", "<|call|>", "<|endoftext|>", "<|startoftext|>", "<|constrain|>", "<|channel|>", "<|start|>"),
        *("<|end|>", "<|message|>"),
    ),
    ends=3,
    template=(
        "<|start|>system<|message|>Channels: analysis, commentary, final.<|end|>"
        f"{{% if tools %}}<|start|>developer<|message|>{_TOOLS}<|end|>{{% endif %}}{{% for message in messages %}}"
        "{% if message.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>"
        "{{ message.content }}<|end|>{% elif message.tool_calls %}{% for call in message.tool_calls %}"
        "<|start|>assistant to=functions.{{ call.function.name }}<|channel|>commentary json<|message|>"
        "{{ call.function.arguments | tojson }}<|call|>{% endfor %}{% else %}<|start|>{{ message.role }}"
        f"{{% if message.role == 'assistant' %}}<|channel|>final{{% endif %}}<|message|>{_TEXT}<|end|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
)
FAMILIES = {"qwen3": QWEN3, "llama3": LLAMA3, "mistral": MISTRAL, "deepseek": DEEPSEEK, "harmony": HARMONY}
